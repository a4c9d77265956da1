"""One retrieval: read Q, score the blocks, choose, move. docs/retrieval.md has the formulas."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.memory import Outputs, TieredMemory
from kvmem.errors import KvmemError
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly
from kvmem.kv.scorers import DEFAULT_SCORER, ScoreInputs, Scores, run_scorer
from kvmem.kv.select import select
from kvmem.llama.context import CancelToken

__all__ = ["choose", "read_query", "score"]

I32 = NDArray[np.int32]


def read_query(
    memory: TieredMemory,
    tokens: I32,
    content: Sequence[int],
    *,
    outputs: Outputs = "last",
    cancel: CancelToken | None = None,
) -> Query:
    """Append ``tokens`` and read the Q of those at the indices ``content`` (evenly thinned) on the
    way.

    The blocks that fill are not stored yet: after a replay they would hold other bytes.
    """
    start = memory.n_tokens
    asked = np.asarray(content, np.int32)
    rows = asked[pick_evenly(len(asked), MAX_ROWS)]
    layers = np.array(sorted({pair.layer for pair in memory.summaries.pairs}), np.int32)
    memory.port.begin_tap(layers, rows)
    try:
        memory.read(tokens, outputs=outputs, cancel=cancel, seal=False)
    except BaseException:
        with suppress(KvmemError):  # incomplete by now: only closed
            memory.port.end_tap()
        raise
    tapped = memory.port.end_tap()
    by_layer: list[NDArray[np.float32]] = [np.empty((0, 0, 0), np.float32)] * len(
        memory.layout.layers
    )
    for i, layer in enumerate(layers):
        by_layer[layer] = tapped[i]
    return Query.from_tap(
        memory.layout,
        memory.summaries.pairs,
        by_layer,
        np.ascontiguousarray(memory.working_set.pos[start + rows]),
        tokens[asked],
    )


def score(memory: TieredMemory, query: Query | None, scorer: str = DEFAULT_SCORER) -> Scores:
    """Score every stored block. Waits for the summaries that are still being made."""
    memory.worker.flush()
    return run_scorer(
        scorer,
        ScoreInputs(
            n_blocks=memory.summaries.n_blocks,
            query=query,
            summaries=memory.summaries,
            lexical=memory.lexical,
            scratch=memory.scratch,
        ),
    )


def choose(
    memory: TieredMemory,
    scores: Scores,
    *,
    n_blocks: int,
    budget_blocks: int,
    pins: Sequence[int] = (),
) -> I32:
    """The blocks to hold of the first n_blocks: ascending, at most budget_blocks.

    Blocks without a score (not stored yet) rank last; the newest one is always in.
    """
    padded = np.full(n_blocks, -np.inf, np.float32)
    n_scored = min(n_blocks, len(scores.blocks))
    padded[:n_scored] = scores.blocks[:n_scored]
    selection: I32 = select(
        padded,
        n_blocks,
        budget_blocks,
        pins,
        memory.sizes.n_sink_blocks,
        memory.sizes.n_recent_blocks,
    )
    return selection
