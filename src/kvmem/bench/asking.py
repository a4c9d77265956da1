"""What a measurement does with a session: read a history, and ask behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.progress import Report, silent
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats

__all__ = ["Asked", "ask", "read_in_pieces"]

READ_TOKENS: Final = 2048
"""Tokens between two reports of progress, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole reply: its tokens, their bytes, and how it went."""

    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]
    stats: RequestStats


def ask(session: Session, prompt: Prompt, params: GenerateParams) -> Asked:
    """Generate to the end."""
    *said, done = session.generate(prompt, params)
    assert isinstance(done, Done)
    reply = [event for event in said if isinstance(event, TokenEvent)]
    return Asked(
        tuple(event.token for event in reply), tuple(event.piece for event in reply), done.stats
    )


def read_in_pieces(
    session: Session,
    tokens: Sequence[int] | NDArray[np.int32],
    what: str = "",
    report: Report = silent,
    *,
    piece_tokens: int = READ_TOKENS,
) -> float:
    """Read the tokens behind the history. Returns the seconds that it took."""
    started = perf_counter()
    for start in range(0, len(tokens), piece_tokens):
        session.read(tokens[start : start + piece_tokens])
        report(what, min(start + piece_tokens, len(tokens)), len(tokens))
    return perf_counter() - started
