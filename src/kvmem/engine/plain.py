"""Stock llama.cpp as the memory of one history, without tiers."""

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.context import CancelToken, Context

__all__ = ["Outputs", "PlainMemory"]

I32 = NDArray[np.int32]
Outputs = Literal["last", "all", "none"] | Sequence[int]


class PlainMemory:
    """Stock llama.cpp: one cache of workspace size, no blocks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._tokens = np.empty(context.n_ctx, np.int32)
        self.n_tokens = 0

    @property
    def tokens(self) -> I32:
        return self._tokens[: self.n_tokens]

    def decode(
        self, tokens: I32, *, outputs: Outputs = "last", cancel: CancelToken | None = None
    ) -> None:
        """Run one batch. After an error the history is as before."""
        start, stop = self.n_tokens, self.n_tokens + len(tokens)
        try:
            self.context.decode(
                tokens, np.arange(start, stop, dtype=np.int32), outputs=outputs, cancel=cancel
            )
        except BaseException:
            self.truncate(start)
            raise
        self._tokens[start:stop] = tokens
        self.n_tokens = stop

    def clock(self) -> float:
        """Seconds, for PhaseTimes.measure."""
        return perf_counter()

    def settle(self) -> None:
        """Undo what an interrupted repair left: tokens in the cache that the history has not."""
        self.truncate(self.n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Forget the tokens from n_tokens on.

        A recurrent state that cannot be rewound forgets everything.
        """
        # first: where an interrupt follows, the cache has more than the history, and never less
        self.n_tokens = min(self.n_tokens, n_tokens)
        if self.context.seq_pos_max(0) >= n_tokens and not self.context.seq_rm(0, n_tokens, -1):
            self.n_tokens = 0
            self.context.clear()

    def close(self) -> None:
        self.context.close()
