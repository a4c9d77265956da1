"""One prompt on its way into the memory: the steps of which every decision consists."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvmem.engine import retrieve
from kvmem.engine.events import PromptProgress
from kvmem.engine.marks import Marks
from kvmem.engine.memory import TieredMemory
from kvmem.engine.stats import Decision, MemoryReport
from kvmem.kv.query import Query
from kvmem.llama.context import CancelToken

__all__ = ["Passage"]

I32 = NDArray[np.int32]


@dataclass(slots=True)
class Passage:
    """Reads one prompt, and writes down what it did.

    tokens: int32 [n], the whole prompt; the memory holds its beginning.
    """

    memory: TieredMemory
    tokens: I32
    marks: Marks
    report: MemoryReport
    cancel: CancelToken | None
    _n_shown: int = 0

    @property
    def n_new(self) -> int:
        """Tokens that are not read yet."""
        return len(self.tokens) - self.memory.n_tokens

    def tail_start(self, start: int) -> int:
        """Where the part begins that is read under the selection.

        Not before start, and at most half of the budget.
        """
        memory = self.memory
        half = max(1, memory.budget_blocks // 2) * memory.block_tokens
        return max(start, len(self.tokens) - half)

    def first_pass_end(self, asked: int) -> int:
        """How far a first pass goes that asks with tokens before ``asked``.

        On a hybrid to the first mark from there on: whether the state there is worth a copy is
        known when it is known whether the pass stays.
        """
        return next((mark for mark in self.marks.points if mark >= asked), len(self.tokens))

    def read_to(
        self,
        stop: int,
        *,
        phase: Literal["read_s", "query_s", "replay_s"] = "read_s",
        seal: bool = True,
        keep: bool = False,
    ) -> Iterator[PromptProgress]:
        """Read up to ``stop`` in chunks, saving checkpoints at the marks, reporting in between.

        seal, keep: as in TieredMemory.read. At ``stop`` itself a first pass saves none.
        """
        memory = self.memory
        marks = [point for point in self.marks.points if memory.n_tokens < point <= stop]
        for point in (*marks, stop):
            while memory.n_tokens < point:
                start = memory.n_tokens
                end = memory.chunk_end(start, point)
                # behind what a first pass has read nothing is read again
                is_new = phase == "replay_s" and start >= self._n_shown
                with self.report.times.measure("read_s" if is_new else phase, memory.clock):
                    memory.read(self.tokens[start:end], cancel=self.cancel, seal=seal, keep=keep)
                    memory.spread_checkpoint()
                n_again = max(0, min(end, self._n_shown) - start)
                self.report.replayed_tokens += n_again
                self.report.read_tokens += end - start - n_again
                self._n_shown = max(self._n_shown, end)
                yield PromptProgress(self._n_shown, len(self.tokens))
            if point in marks and (phase != "query_s" or point < stop):
                memory.save_checkpoint()

    def read_rest(self, selection: I32, start: int) -> Iterator[PromptProgress]:
        """Go on behind a first pass from ``start`` on, which stays; so do the blocks selected."""
        memory = self.memory
        memory.try_seal()
        if memory.n_tokens in self.marks.points:
            memory.save_checkpoint()
        if memory.working_set.room() < self.n_new:
            own = np.arange(start // memory.block_tokens, memory.working_set.n_blocks)
            self.apply(np.union1d(selection, own).astype(np.int32))
        yield from self.read_to(len(self.tokens))

    def choose(self, query: Query | None, start: int, *, keep_from: int | None = None) -> I32:
        """Score, and choose for the history before ``start``, with room for what follows it.

        keep_from: a token; blocks from there on stay, whatever they score.
        """
        memory = self.memory
        n_blocks = memory.n_blocks_of(start)
        n_rest = memory.n_blocks_of(len(self.tokens)) - n_blocks
        with self.report.times.measure("score_s", memory.clock):
            return retrieve.choose(
                memory,
                retrieve.score(memory, query, memory.scorer),
                n_blocks=n_blocks,
                budget_blocks=memory.budget_blocks - n_rest,
                pins=() if keep_from is None else range(keep_from // memory.block_tokens, n_blocks),
            )

    def choose_for_reply(self, query: Query, start: int) -> I32:
        """Choose for a reply alone, with what was read from ``start`` on in it."""
        self.memory.try_seal()
        return self.choose(query, self.memory.n_tokens, keep_from=start)

    def apply(self, selection: I32) -> None:
        """Make exactly these blocks visible."""
        retrieve.apply(self.memory, selection, self.report)

    def decide(self, decision: Decision, reason: str) -> None:
        self.report.decision = decision
        self.report.reason = reason
