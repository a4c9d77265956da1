"""What the engine reads: tokens, and which of them belong to whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Prompt", "RoleSpan", "Span", "Tokens", "positions_behind", "text_positions"]


@final
class Tokens(Sequence[int]):
    """Token ids in an array, which nobody writes to: as a tuple of them, without its cost.

    A prompt of 256K tokens is asked for its length and its beginning, and read as an array.
    """

    __slots__ = ("_array",)

    def __init__(self, array: NDArray[np.int32]) -> None:
        """array: int32 [n]; kept, and read-only from now on."""
        array.flags.writeable = False
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "Tokens": ...
    def __getitem__(self, index: int | slice) -> "int | Tokens":
        if isinstance(index, slice):
            return Tokens(self._array[index])
        return int(self._array[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return np.array_equal(self._array, other._array)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Tokens({self._array.tolist()})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._array, dtype, copy=copy)


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open token range [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) runs backwards or below zero")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """The content tokens of one message, without the template's own tokens."""

    role: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered and tokenised request.

    spans: contents of the messages that were found in the rendered text, in order.
    query_span: content of the last user message; None where it could not be found.
    last_part: where the last of several parts of the last message begins, or a tagged text at its
        end, in tokens: clients put there what is another text at the next turn. None for neither.
    query_fallback: why query_span is None, for the memory report; empty otherwise.
    conversation_id: what the client calls the conversation; a hint.
    is_read_anew: nothing that is known of it is used.
    """

    tokens: Sequence[int]
    spans: tuple[RoleSpan, ...] = ()
    query_span: Span | None = None
    last_part: int | None = None
    query_fallback: str = ""
    conversation_id: str | None = None
    is_read_anew: bool = False

    def __post_init__(self) -> None:
        limit = len(self.tokens)
        for span in (*(item.span for item in self.spans), self.query_span):
            if span is not None and span.stop > limit:
                raise ValueError(f"span ends at {span.stop}, the prompt has {limit} tokens")


def text_positions(start: int, stop: int) -> NDArray[np.int32]:
    """Positions of text tokens.

    int32 [n, 4], as llama.cpp expands them for M-RoPE (t, y, x equal, the fourth 0).
    """
    pos = np.zeros((stop - start, 4), np.int32)
    pos[:, :3] = np.arange(start, stop, dtype=np.int32)[:, None]
    return pos


def positions_behind(pos: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    """Positions of n text tokens behind a history: int32 [n, 4].

    pos: int32 [m, 4], those of the history. A token's position is not its index: the rows of an
    image share one and count in the others, and text goes on behind the largest of its last row.
    """
    start = int(pos[-1, :3].max()) + 1 if len(pos) else 0
    return text_positions(start, start + n)
