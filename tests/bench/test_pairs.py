"""Picking pairs: those that know are found, those that only look good on their own data are not."""

from dataclasses import replace

import numpy as np
import pytest

from kvmem.bench.pairs import Evidence, pick_pairs, recall, worth

N_SLICES, PER_BLOCK, N_PAIRS = 400, 8, 12
KNOWING = (7, 3)


def question(
    group: int, seed: int, *, knowing: tuple[int, ...] = KNOWING, shares_word: bool = True
) -> Evidence:
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
        shares_word=shares_word,
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


def test_few_paraphrased_questions_count_as_much_as_many_others() -> None:
    """Pairs 7 and 3 know the many, 5 and 1 the few; by number alone the few would have no say."""
    named = [question(g, s) for g in range(4) for s in range(12)]
    few = [question(g, s, knowing=(5, 1), shares_word=False) for g in range(4) for s in (1, 2)]
    picked = pick_pairs(named + few, max_pairs=4)
    assert {7, 5} <= set(picked.pairs)
    assert picked.paraphrased > picked.paraphrased_whole + 0.1
    assert picked.recall == pytest.approx(picked.by_count[len(picked.pairs) - 1])
    # the same questions, all taken for one kind
    alike = pick_pairs([replace(q, shares_word=True) for q in named + few], max_pairs=4)
    assert np.isnan(alike.paraphrased)
    assert picked.pairs[:2] != alike.pairs[:2]


def test_one_history_cannot_check_itself() -> None:
    with pytest.raises(ValueError, match="another"):
        pick_pairs([question(0, s) for s in range(8)])


def test_recall_and_worth_of_a_known_score() -> None:
    asked = question(0, 0)
    score = np.zeros(N_SLICES, np.float32)
    score[asked.gold // PER_BLOCK * PER_BLOCK + 3] = 1  # in the middle of their blocks
    assert worth(score, asked) == pytest.approx(np.log(1e-3))
    assert recall(score, asked) == 1.0
    score[:] = 0
    score[asked.gold] = 1
    assert worth(score, asked) == pytest.approx(0.0)
    assert recall(-score, asked) == 0.0
    # what lies at the end of a block brings the next one along
    beside = np.zeros(N_SLICES, np.float32)
    block = int(asked.gold[0]) // PER_BLOCK
    beside[block * PER_BLOCK - 1] = 1
    assert recall(beside, asked) >= 1 / len(asked.gold)
    assert worth(np.zeros(N_SLICES, np.float32), asked) == pytest.approx(np.log(1e-3))
