"""What the quality tool asks of a history, whatever holds it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Blocks = NDArray[np.int32]


class HistoryUnderTest(Protocol):
    """A history that was read once and can be seen in part.

    Queries are opaque: they go from `ask` to `score`. Nothing that is asked stays in the history.
    """

    @property
    def block_tokens(self) -> int: ...

    @property
    def n_blocks(self) -> int:
        """Blocks of the history, the open one included."""
        ...

    def restrict(self, selection: Blocks | None) -> None:
        """Make exactly these blocks visible; None for all of them."""
        ...

    def ask(self, question: Sequence[int]) -> Any:
        """The query of a question, made under what is visible now."""
        ...

    def score(self, query: Any, scorer: str) -> F32:
        """f32 [n_blocks], higher is better."""
        ...

    def select(self, scores: F32) -> Blocks:
        """The product's selection from these scores, under the budget."""
        ...

    def logits(self, tokens: Sequence[int], n_last: int) -> F32:
        """Decode tokens after the history: f32 [n_last, n_vocab] of the last ones."""
        ...

    def greedy(self, tokens: Sequence[int], n: int) -> str:
        """Text of at most n tokens decoded greedily after the history and these tokens."""
        ...
