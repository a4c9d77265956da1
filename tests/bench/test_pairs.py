"""Picking pairs: those that know are found, those that only look good on their own data are not."""

import numpy as np
import pytest

from kvmem.bench.pairs import Evidence, pick_pairs, recall, worth

N_SLICES, PER_BLOCK, N_PAIRS = 400, 8, 12
KNOWING = (7, 3)


def question(group: int, seed: int, *, knowing: tuple[int, ...] = KNOWING) -> Evidence:
    """Two pairs see the gold slices (each misses some questions), the rest is noise."""
    rng = np.random.default_rng([group, seed])
    scores = rng.random((N_PAIRS, N_SLICES), np.float32)
    gold = np.sort(rng.choice(np.arange(16, 360), 3, replace=False))
    for rank, pair in enumerate(knowing):
        if seed % 3 != rank:
            scores[pair, gold] += 4
    return Evidence(
        scores=scores,
        whole=scores.sum(axis=0),
        gold=gold,
        free=np.arange(PER_BLOCK, N_SLICES - PER_BLOCK),
        n_free=4,
        slices_per_block=PER_BLOCK,
        group=group,
    )


def test_the_pairs_that_know_are_picked_and_held_out_recall_says_so() -> None:
    picked = pick_pairs([question(g, s) for g in range(4) for s in range(8)])
    assert set(picked.pairs[:2]) == set(KNOWING)
    assert len(picked.pairs) <= 4
    assert picked.recall > picked.recall_whole + 0.1
    assert picked.recall == pytest.approx(picked.by_count[len(picked.pairs) - 1])
    assert (picked.n_questions, picked.n_groups) == (32, 4)


def test_noise_that_fits_one_history_is_not_worth_more_on_another() -> None:
    questions = [question(g, s, knowing=()) for g in range(4) for s in range(8)]
    picked = pick_pairs(questions)
    chance = 4 / (N_SLICES / PER_BLOCK)
    assert picked.recall < 4 * chance


def test_one_history_cannot_check_itself() -> None:
    with pytest.raises(ValueError, match="another"):
        pick_pairs([question(0, s) for s in range(8)])


def test_recall_and_worth_of_a_known_score() -> None:
    asked = question(0, 0)
    score = np.zeros(N_SLICES, np.float32)
    score[asked.gold] = 1
    assert recall(score, asked) == 1.0
    assert worth(score, asked) == pytest.approx(0.0)
    assert recall(-score, asked) == 0.0
    assert worth(np.zeros(N_SLICES, np.float32), asked) == pytest.approx(np.log(1e-3))
