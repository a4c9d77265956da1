"""SummaryWorker: computes summaries beside prefill, one block after the other."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import StateError
from kvmem.kv.summary import KeySummaries

__all__ = ["SummaryWorker"]


class SummaryWorker:
    """One thread that feeds a KeySummaries. Records must stay in place until flush() returns."""

    def __init__(self, summaries: KeySummaries) -> None:
        self.summaries = summaries
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvmem-summary")
        self._pending: deque[Future[None]] = deque()
        self._n_blocks = summaries.n_blocks
        self._may_have_lost_one = False
        self._closed = False

    @property
    def n_blocks(self) -> int:
        """Blocks that were added, summarised or not."""
        return self._n_blocks

    @property
    def n_pending(self) -> int:
        """Blocks that were added and are not summarised yet."""
        return sum(not future.done() for future in self._pending)

    def add(
        self, block: int, payload: int, pos: NDArray[np.int32], *, owner: object = None
    ) -> None:
        """Queue the next block; arguments as KeySummaries.add. `pos` is copied.

        owner: of the payload, kept alive until it is read, also when all others drop it.
        The memory is reserved here: CapacityError is raised at once, and then nothing was queued.
        """
        if self._closed:
            raise StateError("the summary worker is closed")
        if block != self._n_blocks:
            raise StateError(
                f"summary of block {block} is out of order: the next is {self._n_blocks}"
            )
        while self._pending and self._pending[0].done() and self._pending[0].exception() is None:
            self._pending.popleft()
        self.summaries.reserve(block + 1)
        copy = np.array(pos, np.int32, order="C")
        # an interrupt in between leaves a block queued that nobody knows
        self._may_have_lost_one = True
        self._n_blocks += 1
        self._pending.append(self._pool.submit(self._summarise, block, payload, copy, owner))
        self._may_have_lost_one = False

    def _summarise(self, block: int, payload: int, pos: NDArray[np.int32], owner: object) -> None:
        del owner  # that this call holds it is all that is wanted; the caller's frame does
        self.summaries.add(block, payload, pos)

    def flush(self) -> None:
        """Wait until every queued block is summarised, or raise the first error.

        After an error `summaries.n_blocks` blocks are good and the next one is to be added again.
        """
        if self._may_have_lost_one:  # one thread: behind this, it is done as well
            self._pending.append(self._pool.submit(lambda: None))
            self._may_have_lost_one = False
        error: BaseException | None = None
        while self._pending:
            raised = self._pending[0].exception()  # an interrupt while it waits leaves it queued
            self._pending.popleft()
            error = error or raised
        self._n_blocks = self.summaries.n_blocks
        if error is not None:
            raise error

    def truncate(self, n_blocks: int) -> None:
        """Wait, then forget the blocks from n_blocks on; those whose summary failed, too."""
        try:
            self.flush()
        finally:
            # else an interrupt ended the wait: blocks are still being read
            if not self._pending and not self._may_have_lost_one:
                self.summaries.truncate(n_blocks)
                self._n_blocks = self.summaries.n_blocks

    def attach(self, summaries: KeySummaries) -> None:
        """Feed these from now on. What was queued for the others is done, or its error raised."""
        self.flush()
        self.summaries = summaries
        self._n_blocks = summaries.n_blocks

    def close(self) -> None:
        """Drop what has not begun, wait for what has, end the thread. Twice is safe."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> "SummaryWorker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
