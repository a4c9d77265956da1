"""What a generation yields, in order: progress while the prompt is read, tokens, and one Done."""

from dataclasses import dataclass
from typing import Literal

from kvmem.engine.logprobs import TokenChances, TokenLogprobs
from kvmem.engine.stats import RequestStats

__all__ = ["Done", "Event", "PromptProgress", "StopReason", "TokenEvent"]

StopReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """n_done of n_total prompt tokens are in the memory, reused ones included."""

    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token.

    Piece: its bytes, which may end inside a character; empty for an end token.
    Logprobs and chances: where they were asked for.
    """

    token: int
    piece: bytes
    logprobs: TokenLogprobs | None = None
    chances: TokenChances | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end. "stop": an end token; "length": max_tokens or the workspace is used up."""

    reason: StopReason
    stats: RequestStats


Event = PromptProgress | TokenEvent | Done
