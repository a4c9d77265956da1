"""What the key summaries say, in plain NumPy and float64: for parity, and for single pairs.

The formulas are those of docs/retrieval.md; the code shares nothing with kv/score.pyx.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import Pair
from kvmem.kv.query import Query
from kvmem.kv.summary import KeySummaries

__all__ = ["pair_slices", "scored_slices"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def pair_slices(query: Query, pair: Pair, keys: F32, *, power: int = 2) -> F64:
    """Sum over the query's rows and the pair's query heads of p^power: f64 [n_slices].

    keys: f32 [n_slices, head_dim], un-rotated.
    """
    heads = query.heads(pair)
    rows = heads.reshape(-1, heads.shape[2]).astype(np.float64)
    logits = rows @ keys.T.astype(np.float64) * query.layout.layers[pair.layer].score_scale
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    total: F64 = (p**power).sum(axis=0)
    return total


def scored_slices(
    query: Query, summaries: KeySummaries, pairs: Sequence[Pair] | None = None, *, power: int = 2
) -> F64:
    """The same for each of these pairs (all of the summaries): f64 [n_pairs, n_slices]."""
    chosen = summaries.pairs if pairs is None else pairs
    index = {pair: i for i, pair in enumerate(summaries.pairs)}
    return np.stack(
        [pair_slices(query, pair, summaries.keys(index[pair]), power=power) for pair in chosen]
    )
