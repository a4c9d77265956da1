"""Which (layer, KV head) pairs find what is asked for: picked on questions, checked on others.

Evidence is what every pair says of every slice for one question. A set of pairs is worth the mean
logarithm of the share of its score that lies on the gold slices. Pairs join one by one, all with
weight 1: weights that are fitted collapse onto one head and still look fine (docs/retrieval.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Evidence", "Picked", "pick_pairs", "recall", "worth"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

MAX_PAIRS: Final = 8
LEAST_PAIRS: Final = 2
LEAST_SHARE: Final = 1e-3
"""A question whose facts no pair sees must not outweigh all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One question. All slices are of the history; a block has slices_per_block of them.

    scores: f32 [n_pairs, n_slices], each pair's divided by their sum. whole: f32 [n_slices], of the
    pairs that score without a calibration.
    gold: slices that hold the answer. free: slices of blocks that are not visible anyhow.
    n_free: blocks that the budget leaves to be chosen. group: the history it belongs to.
    """

    scores: F32
    whole: F32
    gold: I64
    free: I64
    n_free: int
    slices_per_block: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """pairs: indexes of the chosen ones, best first. The figures are of histories that the pairs
    were not picked on: gold recall of the chosen number of pairs, and of those that score without a
    calibration.
    """

    pairs: tuple[int, ...]
    recall: float
    recall_whole: float
    by_count: tuple[float, ...]
    n_questions: int
    n_groups: int


def worth(score: F32, question: Evidence) -> float:
    """Log share of a score of slices that lies on the gold ones."""
    total = float(score[question.free].sum())
    if total <= 0:
        return float(np.log(LEAST_SHARE))
    return float(np.log(max(LEAST_SHARE, float(score[question.gold].sum()) / total)))


def recall(score: F32, question: Evidence) -> float:
    """Share of the gold slices in the n_free best of the blocks that are not visible anyhow."""
    per_block = question.slices_per_block
    blocks = score.reshape(-1, per_block).sum(axis=1)
    free = np.unique(question.free // per_block)
    best = free[np.argsort(-blocks[free], kind="stable")[: question.n_free]]
    return float(np.isin(question.gold // per_block, best).mean())


def pick_pairs(questions: Sequence[Evidence], *, max_pairs: int = MAX_PAIRS) -> Picked:
    """Pick pairs on all questions; how many, and what they are worth, by two-fold validation.

    Raises ValueError: fewer than two groups.
    """
    groups = sorted({question.group for question in questions})
    if len(groups) < 2:
        raise ValueError("pairs that are picked on one history cannot be checked on another")
    halves = ({g for g in groups[::2]}, {g for g in groups[1::2]})
    n_most = min(max_pairs, len(questions[0].scores))
    held_out = np.zeros((len(questions), n_most))
    for half in halves:
        order = _greedy([q for q in questions if q.group in half], n_most)
        for row, question in enumerate(questions):
            if question.group not in half:
                held_out[row] = [
                    recall(question.scores[order[: n + 1]].sum(axis=0), question)
                    for n in range(n_most)
                ]
    by_count = held_out.mean(axis=0)
    # a quarter of a question more is no reason for another pair, but one alone can be wrong alone
    least = min(LEAST_PAIRS, n_most)
    allowed = by_count[least - 1 :]
    n_pairs = least + int((allowed >= allowed.max() - 0.25 / len(questions)).argmax())
    return Picked(
        pairs=tuple(_greedy(questions, n_pairs)),
        recall=float(by_count[n_pairs - 1]),
        recall_whole=float(np.mean([recall(q.whole, q) for q in questions])),
        by_count=tuple(by_count.tolist()),
        n_questions=len(questions),
        n_groups=len(groups),
    )


def _greedy(questions: Sequence[Evidence], n_pairs: int) -> list[int]:
    """Indexes of pairs, each the one that adds most to those before it."""
    chosen: list[int] = []
    left = list(range(len(questions[0].scores)))
    sums = [np.zeros(q.scores.shape[1], np.float32) for q in questions]
    while len(chosen) < n_pairs:
        gains = [
            np.mean([worth(s + q.scores[pair], q) for s, q in zip(sums, questions, strict=True)])
            for pair in left
        ]
        best = left.pop(int(np.argmax(gains)))
        chosen.append(best)
        for s, question in zip(sums, questions, strict=True):
            s += question.scores[best]
    return chosen
