"""`kvmem bench speed --url`: first tokens and decoding behind a long history, through the wire.

For each depth a history that the server cannot know is read (cold), then question after question is
asked behind it (warm), each with the replies before it, as a chat goes on.
"""

import math
import random
import secrets
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvmem.bench.progress import Report, silent
from kvmem.bench.wire import Answer, Message, Wire, make_characters, open_wire
from kvmem.errors import ConfigError

__all__ = ["RemoteRecord", "RemoteRow", "RemoteSpec", "remote_rows", "run_remote_speed"]

Kind = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """What is asked.

    depths: tokens of the histories, about. question_tokens: of a question, about. reply_tokens: of
    each reply. repeats: questions behind each history.
    """

    depths: tuple[int, ...] = (7168,)
    question_tokens: int = 512
    reply_tokens: int = 32
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("repeats", self.repeats, "at least 1")
        if self.reply_tokens < 2:
            raise ConfigError("decode", self.reply_tokens, "at least 2")
        for depth in self.depths:
            if depth < self.question_tokens:
                raise ConfigError("depth", depth, f"at least {self.question_tokens}, a question")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRecord:
    """One request. cached_tokens: as the server tells it, else what it must have kept.

    own_prefill_per_s, own_decode_per_s: the server's own figures, None where it has none.
    """

    kind: Kind
    depth_tokens: int
    round: int
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    first_token_s: float
    decode_s: float
    own_prefill_per_s: float | None
    own_decode_per_s: float | None

    @property
    def prefill_per_s(self) -> float:
        """New tokens of the prompt over the time to the first token."""
        return (self.prompt_tokens - self.cached_tokens) / self.first_token_s

    @property
    def decode_per_s(self) -> float:
        """NaN where the server sent no text, or all of it at once."""
        if self.reply_tokens < 2 or self.decode_s <= 0:
            return math.nan
        return (self.reply_tokens - 1) / self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRow:
    """Medians of the requests of one kind behind one depth."""

    kind: Kind
    depth_tokens: int
    n: int
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    prefill_per_s: float
    decode_per_s: float
    own_prefill_per_s: float | None
    own_decode_per_s: float | None


def run_remote_speed(
    spec: RemoteSpec,
    url: str,
    *,
    api_key: str | None = None,
    report: Report = silent,
) -> Iterator[RemoteRecord]:
    """All requests of all depths.

    Raises:
        ConfigError: the HTTP client is not installed.
        EngineError: the server did not answer, refused a request, or told no usage.
    """
    with open_wire(url, api_key) as wire:
        chars_per_token = wire.characters_per_token()
        for depth in spec.depths:
            yield from _run_depth(spec, wire, depth, chars_per_token, report)


def _run_depth(
    spec: RemoteSpec, wire: Wire, depth: int, chars_per_token: float, report: Report
) -> Iterator[RemoteRecord]:
    rng = random.Random(depth)
    # no server has seen this number, whatever it has kept of an earlier run
    opening = f"Log {secrets.token_hex(8)} of the harbour."
    messages: list[Message] = [{"role": "system", "content": opening}]
    n_tokens, held = depth, 0
    for turn in range(spec.repeats + 1):
        report(f"requests at {depth}", turn, spec.repeats + 1)
        text = make_characters(rng, int(n_tokens * chars_per_token))
        messages.append({"role": "user", "content": f"{text}\n\nWhat was said last?"})
        answer = wire.ask(messages, spec.reply_tokens)
        yield _record("warm" if turn else "cold", depth, turn, answer, held)
        messages.append({"role": "assistant", "content": answer.text})
        n_tokens, held = spec.question_tokens, answer.prompt_tokens
    report(f"requests at {depth}", spec.repeats + 1, spec.repeats + 1)


def _record(kind: Kind, depth: int, turn: int, answer: Answer, held: int) -> RemoteRecord:
    return RemoteRecord(
        kind=kind,
        depth_tokens=depth,
        round=turn,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=held if answer.cached_tokens is None else answer.cached_tokens,
        reply_tokens=answer.reply_tokens,
        first_token_s=answer.first_s,
        decode_s=answer.end_s - answer.first_s,
        own_prefill_per_s=answer.timings.get("prompt_per_second"),
        own_decode_per_s=answer.timings.get("predicted_per_second"),
    )


def remote_rows(records: Sequence[RemoteRecord]) -> list[RemoteRow]:
    """One row for each depth and kind, in the order of the records."""
    rows = []
    for depth, kind in dict.fromkeys((r.depth_tokens, r.kind) for r in records):
        group = [r for r in records if (r.depth_tokens, r.kind) == (depth, kind)]
        rates = [r.decode_per_s for r in group if not math.isnan(r.decode_per_s)]
        rows.append(
            RemoteRow(
                kind=kind,
                depth_tokens=depth,
                n=len(group),
                prompt_tokens=int(statistics.median(r.prompt_tokens for r in group)),
                new_tokens=int(statistics.median(r.prompt_tokens - r.cached_tokens for r in group)),
                first_token_s=statistics.median(r.first_token_s for r in group),
                prefill_per_s=statistics.median(r.prefill_per_s for r in group),
                decode_per_s=statistics.median(rates) if rates else math.nan,
                own_prefill_per_s=_median([r.own_prefill_per_s for r in group]),
                own_decode_per_s=_median([r.own_decode_per_s for r in group]),
            )
        )
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return statistics.median(told) if told else None
