"""What the key summaries say, in plain NumPy and float64: for parity, and for single pairs.

The formulas are those of docs/retrieval.md; the code shares nothing with kv/score.pyx.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import Pair, RopeSpec
from kvmem.kv.query import Query
from kvmem.kv.rope import unrotate
from kvmem.kv.scorers import HEADS_CENTRING
from kvmem.kv.summary import KeySummaries

__all__ = ["pair_slices", "rotated", "scored_slices", "softmax_mass"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def pair_slices(
    query: Query, pair: Pair, keys: F32, *, power: int = 2, centring: float = HEADS_CENTRING
) -> F64:
    """Sum over the query's rows and the pair's query heads of p^power: f64 [n_slices].

    keys: f32 [n_slices, head_dim], un-rotated. centring: see score_blocks.
    """
    heads = query.heads(pair)
    rows = heads.reshape(-1, heads.shape[2]).astype(np.float64)
    if len(heads) > 1:
        rows = rows - centring * rows.mean(axis=0)
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


def rotated(rows: F32, pos: NDArray[np.int32], spec: RopeSpec | None) -> F32:
    """Rows [n, n_heads, head_dim] as attention sees them at pos [n, 4]; their length is kept.

    Turning back from the mirrored position turns forward.
    """
    out = np.array(rows, np.float32, order="C")
    if spec is not None:
        unrotate(out, np.ascontiguousarray(-pos), spec)
    return out


def softmax_mass(rows: F32, keys: F32, scale: float) -> F64:
    """Sum over rows of the softmax over all keys: f64 [n_keys]."""
    logits = rows.astype(np.float64) @ keys.T.astype(np.float64) * scale
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    total: F64 = (p / p.sum(axis=1, keepdims=True)).sum(axis=0)
    return total
