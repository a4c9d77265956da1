"""What the quality tool asks of a history, and how an engine gives it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.twin import rotated, scored_slices, softmax_mass
from kvmem.bench.workload import Question
from kvmem.engine.calibration import ALL_PAIRS_SCORERS, Calibration, scoring
from kvmem.engine.engine import Engine
from kvmem.engine.memory import PlainMemory, TieredMemory
from kvmem.engine.retrieve import QueryTap, choose
from kvmem.engine.session import Session
from kvmem.errors import ConfigError, StateError
from kvmem.kv.layout import Pair
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly
from kvmem.kv.scorers import ScoreInputs, Scores, run_scorer
from kvmem.kv.summary import KeySummaries

__all__ = [
    "EXACT_MASS",
    "Answerer",
    "EngineHistory",
    "HistoryUnderTest",
    "Reply",
    "StockHistory",
    "position_scores",
]

EXACT_MASS: Final = "exact mass"
"""A scorer of this bench alone: attention mass of every key, which no summary can know better."""

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

    def score(self, query: Query, scorer: str, *, picked: bool = False) -> Scores:
        """A score for each block, higher is better. picked: by the calibrated pairs alone."""
        ...

    def select(self, scores: Scores, question: Question) -> I32:
        """The product's selection from these scores, in the budget that the question leaves."""
        ...

    @property
    def block_bytes(self) -> int:
        """K and V of a block."""
        ...

    def bytes_per_token(self, scorer: str, *, picked: bool = False) -> float:
        """What a scorer reads, for each token of the history; NaN if that is all of the keys."""
        ...

    def twin_error(self, query: Query, scores: Scores, *, picked: bool = False) -> float:
        """Largest difference of these scores of `heads` from a NumPy twin's, as a part of them."""
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

    def __init__(
        self, engine: Engine, session: Session, calibration: Calibration | None = None
    ) -> None:
        self._engine = engine
        self._session = session
        self._memory: TieredMemory = session.tiered
        self._memory.seal()
        self._keys: dict[Pair, F32] = {}
        self._picked: KeySummaries | None = None
        self._every: KeySummaries | None = None
        self._asked_pos = np.empty((0, 4), np.int32)
        self._order: NDArray[np.int64] | None = None
        if calibration is not None:
            chosen = scoring(self._memory.layout, calibration)
            self._picked = self._summarise(chosen.pairs, chosen.slice_tokens)
        self._memory.save_checkpoint()  # a hybrid comes back to here after each question

    @classmethod
    def read(
        cls,
        engine: Engine,
        tokens: Sequence[int],
        *,
        calibration: Calibration | None = None,
        by_chunk: bool = False,
    ) -> Self:
        """Read tokens into a new session.

        by_chunk: each chunk is read twice, the second time while the blocks are visible that it
        asked for in the first; else while the first and the newest are.
        """
        session = engine.session()
        if by_chunk:
            _read_by_chunk(session, np.asarray(tokens, np.int32))
        else:
            session.read(tokens)
        return cls(engine, session, calibration)

    @property
    def block_tokens(self) -> int:
        return self._memory.block_tokens

    @property
    def n_blocks(self) -> int:
        return self._memory.n_blocks_of(self._memory.n_tokens)

    def summaries(self, *, slice_tokens: int) -> KeySummaries:
        """Summaries of all pairs in other slices, made from the stored keys."""
        return self._summarise(self._memory.layout.pairs(), slice_tokens)

    def mix_up(self, seed: int, *, keys: bool = True, words: bool = True) -> NDArray[np.int64]:
        """Control: file what scores a block under another one, and show it under its own number.

        keys: its key summaries. words: its tokens in the index; what is not mixed up is in order.
        Returns which block's parts are found under each.
        """
        memory = self._memory
        memory.index.flush()
        now, picked = memory.summaries, self._picked
        order = np.random.default_rng(seed).permutation(now.n_blocks)
        self._order = order if keys else None
        self._keys, self._every = {}, None
        memory.index.use(self._summarise(now.pairs, now.slice_tokens))
        if picked is not None:
            self._picked = self._summarise(picked.pairs, picked.slice_tokens)
        index = LexicalIndex(self.block_tokens, budget=memory.host)
        for block in range(now.n_blocks):
            index.add(block, memory.tokens[self._tokens_of(int(order[block]) if words else block)])
        memory.active.lexical = index
        return order

    def _summarise(self, pairs: Sequence[tuple[int, int]], slice_tokens: int) -> KeySummaries:
        index, working_set = self._memory.index, self._memory.working_set
        return index.recompute(working_set, pairs, slice_tokens, order=self._order)

    def _tokens_of(self, block: int) -> slice:
        return slice(block * self.block_tokens, (block + 1) * self.block_tokens)

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
        tokens = np.asarray(question.tokens, np.int32)
        with _kept(self._session):
            whole = np.concatenate([memory.tokens, tokens])
            start, pairs = memory.n_tokens, memory.layout.pairs()
            content = range(start + question.content.start, start + question.content.stop)
            with QueryTap(memory, whole, content, pairs=pairs) as tap:
                memory.decode(tokens, outputs="none", reply=True)
                self._asked_pos = np.ascontiguousarray(memory.working_set.pos[tap.rows[0]])
                return tap.finish()[0]

    def score(self, query: Query, scorer: str, *, picked: bool = False) -> Scores:
        memory = self._memory
        if scorer == EXACT_MASS:
            mass = self._exact_mass(query)
            return Scores(scorer, mass, np.zeros((len(mass), 2), np.float32))
        if not picked and scorer not in ALL_PAIRS_SCORERS:
            return self._session.score(query, scorer)
        summaries = self._summaries_of(scorer, picked=picked)
        return run_scorer(
            scorer,
            ScoreInputs(
                n_blocks=summaries.n_blocks,
                query=query,
                summaries=summaries,
                lexical=memory.lexical,
                equal_pairs=picked,
                scratch=memory.scratch,
            ),
        )

    def _summaries_of(self, scorer: str, *, picked: bool) -> KeySummaries:
        memory = self._memory
        if picked:
            if self._picked is None:
                rule = "found for this model: run kvmem calibrate"
                raise ConfigError("calibration", "none", rule)
            return self._picked
        if scorer not in ALL_PAIRS_SCORERS:
            return memory.summaries
        if self._every is None:
            chosen = scoring(memory.layout, None, scorer)
            self._every = self._summarise(chosen.pairs, chosen.slice_tokens)
        return self._every

    @property
    def block_bytes(self) -> int:
        return self._memory.working_set.payload_bytes

    def bytes_per_token(self, scorer: str, *, picked: bool = False) -> float:
        if scorer == EXACT_MASS:
            return math.nan
        n_bytes = 0.0
        if scorer in ("lexical", "fused"):
            index = self._memory.lexical
            n_bytes += index.n_bytes / (index.n_blocks * self.block_tokens)
        if scorer not in ("lexical", "recency"):
            n_bytes += self._summaries_of(scorer, picked=picked).bytes_per_token
        return n_bytes

    def twin_error(self, query: Query, scores: Scores, *, picked: bool = False) -> float:
        each = scored_slices(query, self._summaries_of("heads", picked=picked))
        if picked:  # each has the same say
            each /= each.sum(axis=1, keepdims=True)
        wanted = each.sum(axis=0).reshape(len(scores.blocks), -1).sum(axis=1)
        return float(np.abs(scores.blocks / wanted - 1).max())

    def _exact_mass(self, query: Query) -> F32:
        """Softmax mass of each sealed block over all layers and heads, with positions: f32.

        The query must be the newest that was asked, for its positions.
        """
        memory = self._memory
        layers = memory.layout.layers
        if not self._keys:
            plain = self.summaries(slice_tokens=1)
            pos = np.ascontiguousarray(memory.working_set.pos[: plain.n_slices])
            if self._order is not None:
                pos = pos.reshape(plain.n_blocks, -1)[self._order].reshape(pos.shape)
            for index, pair in enumerate(plain.pairs):
                keys = rotated(plain.keys(index)[:, None], pos, layers[pair.layer].rope_k)
                self._keys[pair] = keys[:, 0]
        mass = np.zeros(len(next(iter(self._keys.values()))))
        for pair, keys in self._keys.items():
            layer = layers[pair.layer]
            rows = rotated(query.heads(pair), self._asked_pos, layer.rope_q)
            mass += softmax_mass(rows.reshape(-1, rows.shape[2]), keys, layer.score_scale)
        blocks: F32 = mass.reshape(-1, self.block_tokens).sum(axis=1).astype(np.float32)
        return blocks

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


def _read_by_chunk(session: Session, tokens: I32) -> None:
    memory = session.tiered
    if memory.is_hybrid:
        raise StateError("what each chunk asks for is tried on attention alone")
    n_chunk = memory.chunk_tokens
    for start in range(0, len(tokens), n_chunk):
        chunk = tokens[start : start + n_chunk]
        if memory.working_set.room() < len(chunk):
            query = session.query(chunk, pick_evenly(len(chunk), MAX_ROWS).tolist())
            n_new = memory.n_blocks_of(start + len(chunk)) - memory.working_set.n_blocks
            memory.seal()
            scores = session.score(query, "fused")
            session.apply(session.select(scores, budget_blocks=memory.budget_blocks - n_new))
        session.read(chunk)


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
