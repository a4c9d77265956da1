"""What the quality tool asks of a history, and how an engine gives it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.workload import Question
from kvmem.engine.engine import Engine
from kvmem.engine.memory import PlainMemory, TieredMemory
from kvmem.engine.retrieve import choose
from kvmem.engine.session import Session
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly
from kvmem.kv.scorers import Scores
from kvmem.kv.summary import KeySummaries

__all__ = [
    "Answerer",
    "EngineHistory",
    "HistoryUnderTest",
    "Reply",
    "StockHistory",
    "position_scores",
]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class Reply(NamedTuple):
    """A greedy answer. step_s: mean seconds of a decode step; NaN if there was none."""

    text: str
    step_s: float


class Answerer(Protocol):
    """A history that was read and can be continued. Nothing that is asked of it stays in it."""

    def logits(self, tokens: Sequence[int], n_last: int) -> F32:
        """Decode tokens after the history: f32 [n_last, n_vocab] of the last ones."""
        ...

    def greedy(self, tokens: Sequence[int], n: int) -> Reply:
        """At most n tokens, decoded greedily after the history and these tokens."""
        ...


class HistoryUnderTest(Answerer, Protocol):
    """A history that can be seen in part."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def n_blocks(self) -> int:
        """Blocks of the history, an open one included."""
        ...

    def restrict(self, selection: I32 | None) -> None:
        """Make exactly these blocks visible; None for all of them."""
        ...

    def ask(self, question: Question) -> Query:
        """The query of a question, made under what is visible now."""
        ...

    def score(self, query: Query, scorer: str) -> Scores:
        """A score for each block, higher is better."""
        ...

    def select(self, scores: Scores, question: Question) -> I32:
        """The product's selection from these scores, in the budget that the question leaves."""
        ...


class StockHistory:
    """The full cache of plain llama.cpp: an engine whose memory is off."""

    def __init__(self, engine: Engine, tokens: Sequence[int]) -> None:
        self._engine = engine
        self._session = engine.session()
        self._session.read(tokens)

    def logits(self, tokens: Sequence[int], n_last: int) -> F32:
        return self._session.logits(tokens, n_last)

    def greedy(self, tokens: Sequence[int], n: int) -> Reply:
        return _greedy(self._engine, self._session, tokens, n)


class EngineHistory:
    """A history in an engine's tiered memory.

    It is read under the engine's budget. Blocks beyond the budget are shown in the reserve, so a
    reserve that holds history and answer gives full attention over the same stored K and V.
    """

    def __init__(self, engine: Engine, session: Session) -> None:
        self._engine = engine
        self._session = session
        self._memory: TieredMemory = session.tiered
        self._memory.seal()
        self._memory.save_checkpoint()  # a hybrid comes back to here after each question

    @classmethod
    def read(cls, engine: Engine, tokens: Sequence[int]) -> Self:
        """Read tokens into a new session."""
        session = engine.session()
        session.read(tokens)
        return cls(engine, session)

    @property
    def block_tokens(self) -> int:
        return self._memory.block_tokens

    @property
    def n_blocks(self) -> int:
        return self._memory.n_blocks_of(self._memory.n_tokens)

    def summaries(self, *, slice_tokens: int) -> KeySummaries:
        """Summaries of all pairs in other slices, made from the stored keys."""
        return self._memory.summarise(self._memory.layout.pairs(), slice_tokens)

    def fixed_blocks(self, question: Question) -> I32:
        """What is visible whatever scores: sink, newest, the open block."""
        memory = self._memory
        n_blocks = memory.n_blocks_of(memory.n_tokens + question.content.start)
        recent = np.arange(max(0, n_blocks - memory.sizes.n_recent_blocks), n_blocks)
        newest = np.array([self.n_blocks - 1, n_blocks - 1])
        sink = np.arange(memory.sizes.n_sink_blocks)
        fixed: I32 = np.unique(np.concatenate([sink, recent, newest])).astype(np.int32)
        return fixed[fixed < self.n_blocks]

    def restrict(self, selection: I32 | None) -> None:
        if selection is None:
            selection = np.arange(self.n_blocks, dtype=np.int32)
        self._session.apply(selection)

    def ask(self, question: Question) -> Query:
        # Session.query makes room in the budget, which would hide blocks that were to be seen.
        memory = self._memory
        content = np.arange(question.content.start, question.content.stop, dtype=np.int32)
        rows = content[pick_evenly(len(content), MAX_ROWS)]
        layers = np.unique(np.array([pair.layer for pair in memory.summaries.pairs], np.int32))
        tokens = np.asarray(question.tokens, np.int32)
        by_layer = [np.empty((0, 0, 0), np.float32)] * len(memory.layout.layers)
        with _kept(self._session):
            start = memory.n_tokens
            memory.port.begin_tap(layers, rows)
            memory.decode(tokens, outputs="none", reply=True)
            for layer, tapped in zip(layers, memory.port.end_tap(), strict=True):
                by_layer[layer] = tapped
            pos = np.ascontiguousarray(memory.working_set.pos[start + rows])
        pairs = memory.summaries.pairs
        return Query.from_tap(memory.layout, pairs, by_layer, pos, tokens[content])

    def score(self, query: Query, scorer: str) -> Scores:
        return self._session.score(query, scorer)

    def select(self, scores: Scores, question: Question) -> I32:
        # As a session chooses: the question's tokens count, and its first block is the newest one.
        memory = self._memory
        start = memory.n_tokens + question.content.start
        n_blocks = memory.n_blocks_of(start)
        n_asked = memory.n_blocks_of(memory.n_tokens + len(question.tokens)) - n_blocks
        selection = choose(
            memory,
            scores,
            n_blocks=n_blocks,
            budget_blocks=memory.budget_blocks - n_asked,
            pins=(self.n_blocks - 1,),
        )
        return selection[selection < self.n_blocks]

    def logits(self, tokens: Sequence[int], n_last: int) -> F32:
        return self._session.logits(tokens, n_last)

    def greedy(self, tokens: Sequence[int], n: int) -> Reply:
        return _greedy(self._engine, self._session, tokens, n)


def position_scores(n_blocks: int, *, first: Sequence[int] | NDArray[np.integer] = ()) -> Scores:
    """Scores that rank the blocks of `first` highest and all others by age, the newest first."""
    blocks = np.arange(n_blocks, dtype=np.float32)
    blocks[np.asarray(first, np.int64)] += n_blocks
    return Scores("position", blocks, np.zeros((n_blocks, 2), np.float32))


@contextmanager
def _kept(session: Session) -> Iterator[PlainMemory | TieredMemory]:
    """The session's memory; what is appended to it inside is forgotten."""
    memory = session.memory
    n_tokens = memory.n_tokens
    try:
        yield memory
    finally:
        memory.truncate(n_tokens)


def _greedy(engine: Engine, session: Session, tokens: Sequence[int], n: int) -> Reply:
    said: list[int] = []
    steps_s: list[float] = []
    with _kept(session) as memory:
        step = np.asarray(tokens, np.int32)
        while len(said) < n:
            started = perf_counter()
            if isinstance(memory, TieredMemory):
                memory.decode(step, reply=True)
            else:
                memory.decode(step)
            token = int(memory.context.logits(-1).argmax())
            steps_s.append(perf_counter() - started)
            if engine.vocab.is_eog(token):
                break
            said.append(token)
            step = np.array([token], np.int32)
    # The first step reads the question.
    mean = fmean(steps_s[1:]) if len(steps_s) > 1 else float("nan")
    return Reply(engine.vocab.detokenize(said, special=False), mean)
