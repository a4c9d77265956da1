"""The measures of recall, each a small pure function, and the interval of a mean.

Sources: gold-token recall, KLE and the rank of the best gold block are defined in
docs/benchmarks.md; the percentile bootstrap over clusters is Efron and Tibshirani, An
Introduction to the Bootstrap (1993), chapter 13, with prompts as the units that are drawn.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmem.engine.prompt import Span

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def gold_tokens(gold: Sequence[Span]) -> NDArray[np.int64]:
    """Token indexes of all gold spans, ascending and unique."""
    return np.unique(np.concatenate([np.arange(span.start, span.stop) for span in gold]))


def gold_blocks(gold: Sequence[Span], block_tokens: int) -> NDArray[np.int64]:
    """Blocks that hold at least one gold token."""
    return np.unique(gold_tokens(gold) // block_tokens)


def gold_recall(selection: ArrayLike, gold: Sequence[Span], block_tokens: int) -> float:
    """Share of the gold tokens that lie in the selected blocks."""
    return float(np.isin(gold_tokens(gold) // block_tokens, np.asarray(selection)).mean())


def gold_rank(scores: F32, gold: Sequence[Span], block_tokens: int) -> float:
    """Rank of the best gold block, 1 for the highest score; ties count against it.

    NaN where none of them has a score: the block that is still open is visible without one.
    """
    is_gold = np.isin(np.arange(len(scores)), gold_blocks(gold, block_tokens))
    if not is_gold.any():
        return math.nan
    return float((scores[~is_gold] >= scores[is_gold].max()).sum() + 1)


def log_softmax(logits: F32) -> F64:
    """f64 [n_rows, n_vocab], each row a log distribution."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def kl_divergence(reference: F32, logits: F32) -> float:
    """Mean over rows of KL(reference || logits), in nats. Both f32 [n_rows, n_vocab]."""
    expected, found = log_softmax(reference), log_softmax(logits)
    return float((np.exp(expected) * (expected - found)).sum(axis=1).mean())


def top1_agreement(reference: F32, logits: F32) -> float:
    """Share of rows in which both have the same most probable token."""
    return float((reference.argmax(axis=1) == logits.argmax(axis=1)).mean())


def says_value(logits: F32, value: Sequence[int]) -> bool:
    """Whether each of the last rows has the value's token on top: what greedy decoding says."""
    return bool((logits[-len(value) :].argmax(axis=1) == np.asarray(value)).all())


def states(text: str, value: str) -> bool:
    """Whether a text states the value as a whole: 67.6 does not state 67, nor 1:15:52 1:15.

    Case and runs of white space do not count.
    """
    said = " ".join(text.lower().split())
    wanted = re.escape(" ".join(value.lower().split()))
    return bool(re.search(rf"(?<!\w)(?<!\d[.,:-]){wanted}(?!\w|[.,:-]\d)", said))


def kle(kl: float, kl_recency: float, kl_gold: float) -> float:
    """KL efficiency: 0 for recency, 1 for the gold blocks; NaN where they do not differ."""
    span = kl_recency - kl_gold
    return (kl_recency - kl) / span if abs(span) > 1e-9 else float("nan")


def bootstrap(
    values: Sequence[float],
    clusters: Sequence[int],
    *,
    n_drawn: int | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of `values` and its 95 % interval when whole clusters (prompts) are drawn.

    values, clusters: one entry a question, the cluster says which prompt it belongs to.
    n_drawn: clusters of a draw; None for as many as there are.
    """
    data, labels = np.asarray(values, np.float64), np.asarray(clusters)
    if len(data) == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    _, cluster = np.unique(labels, return_inverse=True)
    counts, sums = np.bincount(cluster), np.bincount(cluster, data)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(counts), size=(n_resamples, n_drawn or len(counts)))
    found = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(found, (2.5, 97.5))
    return Interval(float(data.mean()), float(low), float(high))
