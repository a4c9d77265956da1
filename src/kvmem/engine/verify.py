"""A step of a reply with drafts: one batch, of which the part that is accepted stays."""

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import positions_behind
from kvmem.engine.room import with_room
from kvmem.llama.context import CancelToken
from kvmem.llama.state import roll_back_state

__all__ = ["Verification"]

I32 = NDArray[np.int32]


class Verification:
    """A token of a reply and proposals behind it, run as one batch; all rows have logits.

    `keep` must follow, and the memory takes nothing else before it. After an error of either the
    history is as before, or at the checkpoint before that.

    n_drafts: at least 1, the most that are proposed; a batch with all of them must fit in what is
        free for a reply, so that no block leaves for tokens that may not stay.
    """

    def __init__(
        self, memory: TieredMemory, token: int, n_drafts: int, cancel: CancelToken | None
    ) -> None:
        assert memory.drafter is not None
        working_set = memory.working_set
        self._memory = memory
        self._drafter = memory.drafter
        first: I32 = np.array([token], np.int32)
        self._pos = positions_behind(working_set.pos, 1 + n_drafts)
        self._first_pos = np.ascontiguousarray(self._pos[:, 0])

        def run() -> None:
            self._cells = with_room(memory, lambda: working_set.prepare(1 + n_drafts, reply=True))
            drafts = self._drafter.propose(self._cells, first, self._first_pos, n_drafts)
            self._tokens: I32 = np.concatenate([first, drafts])
            n = len(self._tokens)
            memory.state_is_certain = False
            memory.context.decode(
                self._tokens,
                self._first_pos[:n],
                outputs="all",
                cancel=cancel,
                meanwhile=memory.provide,
            )

        memory.undone_on_error(run)

    @property
    def drafts(self) -> list[int]:
        """The proposals."""
        drafts: list[int] = self._tokens[1:].tolist()
        return drafts

    def keep(self, n_tokens: int) -> None:
        """Append the first n_tokens of the batch, at least one, and undo the others."""
        memory = self._memory
        tokens, pos = self._tokens[:n_tokens], self._pos[:n_tokens]

        def append() -> None:
            roll_back_state(memory.context, len(self._tokens) - n_tokens)
            # the head took the first token in when it made the proposals
            self._drafter.follow(self._cells[:n_tokens], tokens, self._first_pos[:n_tokens], skip=1)
            memory.working_set.commit(tokens, pos)
            memory.state_is_certain = True

        memory.undone_on_error(append)
