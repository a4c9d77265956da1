"""What scores the history on the device: key summaries and token index, of the same blocks."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.conversation import Conversation
from kvmem.kv.summary import KeySummaries
from kvmem.kv.summary_worker import SummaryWorker
from kvmem.kv.working_set import WorkingSet

__all__ = ["BlockIndex"]


class BlockIndex:
    """Feeds the summaries and the token index of the conversation that is on the device.

    The summaries are made on a thread of their own, from the host records.
    """

    def __init__(self, conversation: Conversation, block_tokens: int) -> None:
        self._conversation = conversation
        self._block_tokens = block_tokens
        self._worker = SummaryWorker(conversation.summaries)

    def follow(self, conversation: Conversation) -> None:
        """This one is on the device from now on.

        What was queued for the one before is done, or its error raised.
        """
        self._conversation = conversation
        self._worker.attach(conversation.summaries)

    def add_sealed(self, working_set: WorkingSet) -> None:
        """Queue the sealed blocks that are not in yet.

        Raises CapacityError; the next call goes on where this one stopped.
        """
        lexical = self._conversation.lexical
        for block in range(lexical.n_blocks, working_set.n_sealed):
            start, stop = block * self._block_tokens, (block + 1) * self._block_tokens
            self._worker.add(
                block,
                working_set.record_address(block),
                working_set.pos[start:stop],
                owner=working_set,
            )
            try:
                lexical.add(block, working_set.tokens[start:stop])  # last: what it knows is queued
            except BaseException:
                self._worker.truncate(block)
                raise

    def truncate(self, n_blocks: int) -> None:
        """Forget the blocks from n_blocks on, before the store lets go of their records."""
        self._worker.truncate(n_blocks)
        self._conversation.lexical.truncate(n_blocks)

    def mend(self) -> None:
        """Make both parts agree where an error or an interrupt came between them."""
        if self._worker.summaries is not self._conversation.summaries:
            self.follow(self._conversation)
        n_blocks = self._worker.n_blocks, self._conversation.lexical.n_blocks
        if n_blocks[0] != n_blocks[1]:
            self.truncate(min(n_blocks))

    def flush(self) -> None:
        """Wait for what is queued, or raise the first error."""
        self._worker.flush()

    def recompute(
        self,
        working_set: WorkingSet,
        pairs: Sequence[tuple[int, int]],
        slice_tokens: int,
        *,
        order: NDArray[np.int64] | None = None,
    ) -> KeySummaries:
        """New summaries of all that is summarised, made from the stored keys.

        order: which block's keys are filed under each, for a control; None for its own.
        """

        def records(n_blocks: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
            """Address and positions of each block's keys."""
            for block in range(n_blocks) if order is None else order[:n_blocks].tolist():
                start, stop = block * self._block_tokens, (block + 1) * self._block_tokens
                pos = np.ascontiguousarray(working_set.pos[start:stop])
                yield working_set.record_address(block), pos

        self.flush()
        return self._conversation.summaries.recompute(pairs, records, slice_tokens)

    def use(self, summaries: KeySummaries) -> None:
        """Feed these from now on, which are of the same blocks."""
        self._conversation.summaries = summaries
        self._worker.attach(summaries)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        self._worker.close()
