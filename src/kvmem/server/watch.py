"""What the server has done so far, and does now: for /slots, /metrics and those who wait."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from kvmem.engine.events import Done, Event, PromptProgress, TokenEvent
from kvmem.engine.prompt import Prompt

__all__ = ["Now", "Totals", "Watch"]


@dataclass(frozen=True, slots=True)
class Now:
    """The request that runs. number: counts requests from 1; 0 before the first."""

    number: int = 0
    is_running: bool = False
    prompt_tokens: int = 0
    read_tokens: int = 0
    reply_tokens: int = 0
    report: dict[str, Any] | None = None  # of the newest request that ended


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all requests that have ended."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    prompt_s: float = 0.0
    reply_tokens: int = 0
    decode_steps: int = 0  # without the first token of each reply, which decode_s is without too
    decode_s: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    blocks_in: int = 0
    blocks_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    ends: dict[str, int] = field(default_factory=dict)  # why a request ended > how often
    uses: dict[str, int] = field(default_factory=dict)  # how its conversation was found


class Watch:
    """Told by the engine's thread, read by any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Now()
        self._totals = Totals()

    @property
    def now(self) -> Now:
        return self._now

    @property
    def totals(self) -> Totals:
        with self._lock:
            return replace(self._totals, ends=dict(self._totals.ends), uses=dict(self._totals.uses))

    def began(self, prompt: Prompt) -> None:
        """A request runs."""
        self._now = Now(
            number=self._now.number + 1,
            is_running=True,
            prompt_tokens=len(prompt.tokens),
            report=self._now.report,
        )

    def saw(self, event: Event) -> None:
        """It made progress, or ended."""
        now = self._now
        if isinstance(event, PromptProgress):
            self._now = replace(now, read_tokens=event.n_done)
        elif isinstance(event, TokenEvent):
            self._now = replace(now, reply_tokens=now.reply_tokens + 1)
        elif isinstance(event, Done):
            self._ended(event)

    def failed(self) -> None:
        """It ended with an error."""
        self._now = replace(self._now, is_running=False)
        with self._lock:
            self._totals = replace(self._totals, ends=_plus_one(self._totals.ends, "error"))

    def _ended(self, done: Done) -> None:
        stats, memory = done.stats, done.stats.memory
        self._now = replace(self._now, is_running=False, report=memory.as_dict())
        with self._lock:
            before = self._totals
            total = replace(
                before,
                prompt_tokens=before.prompt_tokens + stats.prompt_tokens,
                cached_tokens=before.cached_tokens + stats.cached_tokens,
                replayed_tokens=before.replayed_tokens + memory.replayed_tokens,
                prompt_s=before.prompt_s + stats.prompt_s,
                reply_tokens=before.reply_tokens + stats.completion_tokens,
                decode_steps=before.decode_steps + max(0, stats.completion_tokens - 1),
                decode_s=before.decode_s + stats.decode_s,
                draft_tokens=before.draft_tokens + stats.draft_n,
                accepted_tokens=before.accepted_tokens + stats.draft_n_accepted,
                blocks_in=before.blocks_in + memory.blocks_in,
                blocks_out=before.blocks_out + memory.blocks_out,
                bytes_in=before.bytes_in + memory.bytes_in,
                bytes_out=before.bytes_out + memory.bytes_out,
            )
            self._totals = replace(
                total,
                ends=_plus_one(total.ends, done.reason),
                uses=_plus_one(total.uses, memory.conversation_use),
            )


def _plus_one(counts: dict[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}
