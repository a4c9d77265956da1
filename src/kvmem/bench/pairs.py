"""Which (layer, KV head) pairs find what is asked for: picked on questions, checked on others.

Evidence is what every pair says of every slice for one question. A set of pairs is worth the mean
logarithm of the share of its score that lies on the gold slices. Pairs join one by one, all with
weight 1: weights that are fitted collapse onto one head and still look fine (docs/retrieval.md).
Questions that name what the fact names and paraphrased ones count the same, however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.calibration import SLICE_TOKENS
from kvmem.engine.retrieve import choose_blocks
from kvmem.kv.scorers import Scores, edge_slices

__all__ = ["Evidence", "Picked", "pick_pairs", "recall", "worth"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

MAX_PAIRS: Final = 8
LEAST_PAIRS: Final = 2
MOST_FOLDS: Final = 4
LEAST_SHARE: Final = 1e-3
"""A question whose facts no pair sees must not outweigh all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One question. All slices are of the history; a block has slices_per_block of them.

    scores: f32 [n_pairs, n_slices], each pair's divided by their sum; slices of SLICE_TOKENS.
    whole: f32 [n_slices], of the pairs that score without a calibration.
    gold: slices that hold the answer. free: slices of blocks that are not visible anyhow.
    n_free: blocks that the budget leaves to be chosen. group: the history it belongs to.
    shares_word: whether the question repeats a rare word of its fact; else it is paraphrased.
    """

    scores: F32
    whole: F32
    gold: I64
    free: I64
    n_free: int
    slices_per_block: int
    group: int
    shares_word: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """pairs: indexes of the chosen ones, best first. The figures are of histories that the pairs
    were not picked on: gold recall of the chosen number of pairs, and of those that score without a
    calibration (whole), both kinds of questions counting the same; and of paraphrased ones alone,
    NaN if there are none.
    """

    pairs: tuple[int, ...]
    recall: float
    recall_whole: float
    by_count: tuple[float, ...]
    paraphrased: float
    paraphrased_whole: float
    n_questions: int
    n_groups: int


def worth(score: F32, question: Evidence) -> float:
    """Log share of a score of slices that lies on the gold ones."""
    total = float(score[question.free].sum())
    if total <= 0:
        return float(np.log(LEAST_SHARE))
    return float(np.log(max(LEAST_SHARE, float(score[question.gold].sum()) / total)))


def recall(score: F32, question: Evidence) -> float:
    """Share of the gold slices in what would be brought back: n_free of the blocks that are not
    visible anyhow, chosen as a server chooses, neighbours too.
    """
    per_block = question.slices_per_block
    slices = score.reshape(-1, per_block)
    blocks = slices.sum(axis=1)
    head, tail = edge_slices(per_block, SLICE_TOKENS)
    edges = np.stack([slices[:, :head].sum(axis=1), slices[:, -tail:].sum(axis=1)], axis=1)
    edges = np.divide(edges, blocks[:, None], np.zeros_like(edges), where=edges > 0)
    fixed = np.setdiff1d(np.arange(len(blocks)), question.free // per_block)
    chosen = choose_blocks(
        Scores("heads", blocks, edges),
        n_blocks=len(blocks),
        budget_blocks=len(fixed) + question.n_free,
        block_tokens=per_block * SLICE_TOKENS,
        pins=fixed.tolist(),
        recent_blocks=0,
    )
    return float(np.isin(question.gold // per_block, chosen).mean())


def pick_pairs(questions: Sequence[Evidence], *, max_pairs: int = MAX_PAIRS) -> Picked:
    """Pick pairs on all questions; how many, and what they are worth, by four-fold validation.

    How many: as many as find most of the kind of question that they find less of.
    Raises ValueError: fewer than two groups.
    """
    groups = sorted({question.group for question in questions})
    if len(groups) < 2:
        raise ValueError("pairs that are picked on one history cannot be checked on another")
    folds = [set(groups[fold::MOST_FOLDS]) for fold in range(min(MOST_FOLDS, len(groups)))]
    n_most = min(max_pairs, len(questions[0].scores))
    held_out = np.zeros((len(questions), n_most))
    for fold in folds:
        order = _greedy([q for q in questions if q.group not in fold], n_most)
        for row, question in enumerate(questions):
            if question.group in fold:
                held_out[row] = [
                    recall(question.scores[order[: n + 1]].sum(axis=0), question)
                    for n in range(n_most)
                ]
    by_count = _shares(questions) @ held_out
    worse = np.min([held_out[rows].mean(axis=0) for rows in _kinds(questions)], axis=0)
    # a quarter of a question more is no reason for another pair, but one alone can be wrong alone
    least = min(LEAST_PAIRS, n_most)
    allowed = worse[least - 1 :]
    n_pairs = least + int((allowed >= allowed.max() - 0.25 / len(questions)).argmax())
    whole = np.array([recall(question.whole, question) for question in questions])
    paraphrased = [row for row, question in enumerate(questions) if not question.shares_word]
    return Picked(
        pairs=tuple(_greedy(questions, n_pairs)),
        recall=float(by_count[n_pairs - 1]),
        recall_whole=float(_shares(questions) @ whole),
        by_count=tuple(by_count.tolist()),
        paraphrased=_mean(held_out[paraphrased, n_pairs - 1]),
        paraphrased_whole=_mean(whole[paraphrased]),
        n_questions=len(questions),
        n_groups=len(groups),
    )


def _kinds(questions: Sequence[Evidence]) -> list[list[int]]:
    """Indexes of the questions of each kind that there is."""
    kinds = [
        [row for row, question in enumerate(questions) if question.shares_word is kind]
        for kind in (True, False)
    ]
    return [rows for rows in kinds if rows]


def _shares(questions: Sequence[Evidence]) -> F64:
    """What each question counts, both kinds the same in all: f64 [n], the sum is 1."""
    shares = np.zeros(len(questions))
    kinds = _kinds(questions)
    for rows in kinds:
        shares[rows] = 1 / (len(kinds) * len(rows))
    return shares


def _mean(values: F64) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _greedy(questions: Sequence[Evidence], n_pairs: int) -> list[int]:
    """Indexes of pairs, each the one that adds most to those before it."""
    chosen: list[int] = []
    left = list(range(len(questions[0].scores)))
    sums = [np.zeros(q.scores.shape[1], np.float32) for q in questions]
    shares = _shares(questions)
    while len(chosen) < n_pairs:
        gains = [
            shares @ [worth(s + q.scores[pair], q) for s, q in zip(sums, questions, strict=True)]
            for pair in left
        ]
        best = left.pop(int(np.argmax(gains)))
        chosen.append(best)
        for s, question in zip(sums, questions, strict=True):
            s += question.scores[best]
    return chosen
