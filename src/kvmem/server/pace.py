"""How far and how fast a reply comes, for streams that tell it on the way."""

from time import perf_counter
from typing import Any

from kvmem.engine.events import PromptProgress
from kvmem.engine.stats import RequestStats
from kvmem.server.sse import timings_of

__all__ = ["Pace"]


class Pace:
    """Of one reply, by the clock of the one who sends it.

    with_progress, with_timings: what the client wants to be told.
    """

    def __init__(self, *, with_progress: bool, with_timings: bool) -> None:
        self._with_progress = with_progress
        self._with_timings = with_timings
        self._began = perf_counter()
        self._answered: float | None = None
        self._reused: int | None = None
        self._stats = RequestStats()

    def read(self, event: PromptProgress) -> dict[str, Any]:
        """So much of the prompt is read: fields for a chunk, nothing where none are wanted."""
        elapsed = perf_counter() - self._began
        if self._reused is None:  # the first event says what was reused
            self._reused = event.n_done
        self._stats.prompt_tokens = event.n_done
        self._stats.cached_tokens = self._reused
        self._stats.prompt_s = elapsed if event.n_done > self._reused else 0.0
        if not self._with_progress:
            return {}
        progress = {
            "total": event.n_total,
            "cache": self._reused,
            "processed": event.n_done,
            "time_ms": int(elapsed * 1e3),
        }
        return {"prompt_progress": progress, **self._timings()}

    def said(self, n_tokens: int) -> dict[str, Any]:
        """So many more tokens are said: fields for their chunk."""
        now = perf_counter()
        if self._answered is None:
            self._answered = now
            self._stats.prompt_s = now - self._began
        self._stats.completion_tokens += n_tokens
        self._stats.decode_s = now - self._answered
        return self._timings()

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings_of(self._stats)} if self._with_timings else {}
