"""One retrieval: read Q, score the blocks, choose, move. docs/retrieval.md has the formulas."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.memory import Outputs, TieredMemory
from kvmem.engine.room import with_room
from kvmem.engine.stats import MemoryReport
from kvmem.errors import StateError
from kvmem.kv.layout import Pair
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly
from kvmem.kv.scorers import DEFAULT_SCORER, EDGE_TAIL_TOKENS, ScoreInputs, Scores, run_scorer
from kvmem.kv.select import select
from kvmem.llama.context import CancelToken

__all__ = ["QueryTap", "apply", "choose", "choose_blocks", "read_query", "score"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# A block brings a neighbour along where this part of its score lies near their border. On a trained
# model 0.5 to 0.9 choose nearly the same blocks; where scores are diffuse 0.5 wastes the budget
# (docs/retrieval.md, "Facts behind a border").
EDGE_SHARE = 0.7

EMPTY = np.empty((0, 0, 0), np.float32)


class QueryTap:
    """Reads Q of chosen tokens while they are decoded, in any number of calls.

    tokens: the whole prompt. contents: of each query the indices of the tokens that ask; all of
    them ascend, and none is decoded yet. They are thinned evenly, to `rows`. pairs: those of the
    queries; None for those that score. Use it as a context, and `finish` inside.
    """

    def __init__(
        self,
        memory: TieredMemory,
        tokens: I32,
        *contents: Sequence[int],
        pairs: Sequence[Pair] | None = None,
    ) -> None:
        self._memory = memory
        self._pairs = memory.summaries.pairs if pairs is None else pairs
        asked = [np.asarray(content, np.int32) for content in contents]
        self.rows: list[I32] = [one[pick_evenly(len(one), MAX_ROWS)] for one in asked]
        self._rows = np.concatenate(self.rows)
        self._words = [tokens[one] for one in asked]
        self._layers = np.array(sorted({pair.layer for pair in self._pairs}), np.int32)
        self._is_open = False

    def __enter__(self) -> Self:
        first = self._memory.n_tokens
        if self._rows[0] < first:
            raise StateError(f"token {self._rows[0]} is decoded already: its Q cannot be read")
        self._end()  # one that an interrupt has left open
        self._memory.port.begin_tap(self._layers, self._rows - first)
        self._is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self._end()

    def _end(self) -> None:
        self._is_open = False
        with suppress(StateError):  # incomplete, or none: only closed
            self._memory.port.end_tap()

    @property
    def is_complete(self) -> bool:
        """Whether all of the tokens are decoded."""
        return self._memory.n_tokens > int(self._rows[-1])

    def finish(self) -> list[Query]:
        """The queries. Raises StateError if a token was not decoded."""
        self._is_open = False
        tapped = self._memory.port.end_tap()
        borders = np.cumsum([len(rows) for rows in self.rows])[:-1]
        by_query = zip(*(np.split(rows, borders) for rows in tapped), strict=True)
        return [
            self._query(list(layers), rows, words)
            for layers, rows, words in zip(by_query, self.rows, self._words, strict=True)
        ]

    def _query(self, tapped: list[NDArray[np.float32]], rows: I32, words: I32) -> Query:
        memory = self._memory
        by_layer: list[NDArray[np.float32]] = [EMPTY] * len(memory.layout.layers)
        for layer, read in zip(self._layers, tapped, strict=True):
            by_layer[layer] = read
        pos = np.ascontiguousarray(memory.working_set.pos[rows])
        return Query.from_tap(memory.layout, self._pairs, by_layer, pos, words)


def read_query(
    memory: TieredMemory,
    tokens: I32,
    content: Sequence[int],
    *,
    outputs: Outputs = "last",
    cancel: CancelToken | None = None,
) -> Query:
    """Append ``tokens`` and read Q of those at the indices ``content`` on the way.
    The blocks that fill are not stored yet: after a replay they would hold other bytes.
    """
    start = memory.n_tokens
    whole = np.concatenate([memory.tokens, tokens])
    with QueryTap(memory, whole, [start + index for index in content]) as tap:
        memory.read(tokens, outputs=outputs, cancel=cancel, seal=False)
        return tap.finish()[0]


def score(memory: TieredMemory, query: Query | None, scorer: str = DEFAULT_SCORER) -> Scores:
    """Score every stored block. Waits for the summaries that are still being made."""
    memory.index.flush()
    inputs = ScoreInputs(
        n_blocks=memory.summaries.n_blocks,
        query=query,
        summaries=memory.summaries,
        lexical=memory.lexical,
        threads=memory.score_threads,
        equal_pairs=memory.scoring.is_calibrated,
        scratch=memory.scratch,
    )
    return with_room(memory, lambda: run_scorer(scorer, inputs))  # the scratch memory may grow


def choose(
    memory: TieredMemory,
    scores: Scores,
    *,
    n_blocks: int,
    budget_blocks: int,
    pins: Sequence[int] = (),
) -> I32:
    """The blocks to hold of the first n_blocks: ascending, at most budget_blocks.

    The newest one is always in. See `choose_blocks`.
    """
    return choose_blocks(
        scores,
        n_blocks=n_blocks,
        budget_blocks=budget_blocks,
        block_tokens=memory.block_tokens,
        pins=pins,
        sink_blocks=memory.sizes.n_sink_blocks,
        recent_blocks=memory.sizes.n_recent_blocks,
    )


def choose_blocks(
    scores: Scores,
    *,
    n_blocks: int,
    budget_blocks: int,
    block_tokens: int,
    pins: Sequence[int] = (),
    sink_blocks: int = 0,
    recent_blocks: int = 1,
) -> I32:
    """The selection of these scores, without a memory.

    Blocks without a score (not stored yet) rank last. A block whose score lies at one of its ends
    brings the neighbour there along: what was asked for stands before its answer, and a border may
    part them. Behind a block of fewer than EDGE_TAIL_TOKENS so many come as hold that many tokens.
    """
    padded = np.full(n_blocks, -np.inf, np.float32)
    n_scored = min(n_blocks, len(scores.blocks))
    padded[:n_scored] = scores.blocks[:n_scored]
    shares = np.zeros((n_blocks, 2), np.float32)
    shares[:n_scored] = scores.edges[:n_scored]
    n_behind = -(-EDGE_TAIL_TOKENS // block_tokens)
    if n_behind > 1:
        padded = _line_up(padded, shares >= EDGE_SHARE, n_behind, budget_blocks)
        shares[:] = 0  # nobody brings anybody twice
    # select() looks at the neighbour's side of a border, and the share is known on this side
    beside = np.zeros((n_blocks, 2), np.float32)
    beside[1:, 0] = shares[:-1, 1]
    beside[:-1, 1] = shares[1:, 0]
    selection: I32 = select(
        padded,
        n_blocks,
        budget_blocks,
        pins,
        sink_blocks,
        recent_blocks,
        edge=beside,
        edge_threshold=EDGE_SHARE,
    )
    return selection


def _line_up(scores: F32, brings: NDArray[np.bool_], n_behind: int, n_most: int) -> F32:
    """Other scores of the same blocks: each has right behind it in rank what it brings along.

    brings: whether it brings the block before it, and the n_behind blocks behind it. n_most: so
    many are wanted at most.
    """
    n_blocks = len(scores)
    # the newer first among equals, as in select()
    order = np.argsort(scores, kind="stable")[::-1][:n_most]
    behind = order[:, None] + np.arange(1, n_behind + 1)
    behind[~brings[order, 1]] = n_blocks
    before = np.where(brings[order, 0], order - 1, -1)
    line = np.column_stack([order, behind, before]).ravel()
    line = line[(line >= 0) & (line < n_blocks)]
    _, first = np.unique(line, return_index=True)
    lined_up = np.zeros(n_blocks, np.float32)
    lined_up[line[np.sort(first)]] = np.arange(len(first), 0, -1)
    lined_up[np.isnan(scores)] = np.nan  # select() refuses them
    return lined_up


def apply(memory: TieredMemory, selection: I32, report: MemoryReport) -> None:
    """Make exactly these blocks visible, and count what moves. Nothing is done for no blocks."""
    if len(selection) == 0:
        return
    with report.times.measure("move_s", memory.clock):
        if len(np.setdiff1d(memory.working_set.resident(), selection)):
            memory.seal()
        else:  # nothing has to leave
            memory.try_seal()
        transfer = memory.working_set.apply(selection)
    report.count(transfer)
