"""Checkpoints: recurrent states by position. A hybrid model can go back to these points of its history and to no others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import CapacityError
from kvmem.kv.budget import HostBudget
from kvmem.llama.context import Context
from kvmem.llama.state import restore_state, save_state, state_bytes

__all__ = ["Checkpoint", "Checkpoints"]

# 150 MiB each on the 27B shape. Enough for both ends of the last turn, its question, and a spread over what came before.
MAX_CHECKPOINTS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after n_tokens tokens. state: u8."""

    n_tokens: int
    state: NDArray[np.uint8]


class Checkpoints:
    """The checkpoints of one history, ascending, counted against the host limit.

    limit: how many are kept. When one too many is saved, the one goes that leaves the smallest gap behind, so that they
    stay spread over the history; the newest stays.
    """

    def __init__(self, context: Context, budget: HostBudget, limit: int = MAX_CHECKPOINTS) -> None:
        self._context = context
        self._budget = budget
        self._limit = limit
        self._saved: list[Checkpoint] = []
        self._spare: list[NDArray[np.uint8]] = []  # buffers of dropped checkpoints, used again and still charged

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def positions(self) -> list[int]:
        return [saved.n_tokens for saved in self._saved]

    @property
    def n_bytes(self) -> int:
        return sum(len(saved.state) for saved in self._saved) + sum(len(buffer) for buffer in self._spare)

    def save(self, n_tokens: int) -> None:
        """Keep the state as it is now, after n_tokens tokens. Where the host limit leaves no room, an older one goes.

        Raises CapacityError if not even one fits.
        """
        if self._saved and self._saved[-1].n_tokens == n_tokens:
            return
        assert not self._saved or self._saved[-1].n_tokens < n_tokens, "checkpoints ascend"
        buffer = self._take_buffer(state_bytes(self._context))
        save_state(self._context, buffer)
        self._saved.append(Checkpoint(n_tokens, buffer))
        if len(self._saved) > self._limit:
            self._drop(self._least_missed())

    def nearest(self, n_tokens: int) -> Checkpoint | None:
        """The newest checkpoint at or before n_tokens."""
        return next((saved for saved in reversed(self._saved) if saved.n_tokens <= n_tokens), None)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Make the state what it was then, and forget the checkpoints after it."""
        restore_state(self._context, checkpoint.state)
        self.drop_after(checkpoint.n_tokens)

    def drop_after(self, n_tokens: int) -> None:
        """Forget the checkpoints beyond n_tokens."""
        while self._saved and self._saved[-1].n_tokens > n_tokens:
            self._drop(len(self._saved) - 1)

    def clear(self) -> None:
        """Forget all, and give their memory back."""
        self.drop_after(-1)
        while self._spare:
            self._budget.release(len(self._spare.pop()))

    def _take_buffer(self, n_bytes: int) -> NDArray[np.uint8]:
        while True:
            if self._spare:
                buffer = self._spare.pop()
                if len(buffer) == n_bytes:
                    return buffer
                self._budget.release(len(buffer))
                continue
            try:
                self._budget.charge(n_bytes, "a checkpoint of the recurrent state")
            except CapacityError:
                if not self._saved:
                    raise
                self._drop(self._least_missed() if len(self._saved) > 1 else 0)
                continue
            return np.empty(n_bytes, np.uint8)

    def _least_missed(self) -> int:
        """Index of the checkpoint, not the newest, between whose neighbours the gap is smallest."""
        before = [0, *self.positions[:-2]]
        after = self.positions[1:]
        gaps = [high - low for low, high in zip(before, after, strict=True)]
        return gaps.index(min(gaps))

    def _drop(self, index: int) -> None:
        self._spare.append(self._saved.pop(index).state)
