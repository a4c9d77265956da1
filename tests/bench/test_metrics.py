"""The measures against values worked out by hand."""

import math

import numpy as np
import pytest

from kvmem.bench import metrics
from kvmem.engine.prompt import Span

GOLD = (Span(30, 36), Span(64, 66))


def test_gold_recall_counts_tokens_not_blocks() -> None:
    # Tokens 30, 31 lie in block 0, 32..35 in block 1, 64 and 65 in block 2.
    assert metrics.gold_recall([1], GOLD, 32) == pytest.approx(4 / 8)
    assert metrics.gold_recall([0, 1], GOLD, 32) == pytest.approx(6 / 8)
    assert metrics.gold_recall([0, 1, 2, 9], GOLD, 32) == 1.0
    assert metrics.gold_recall([7], GOLD, 32) == 0.0


def test_gold_rank_is_that_of_the_best_block_and_ties_count_against_it() -> None:
    scores = np.array([0.1, 0.5, 0.2, 0.9, 0.5], np.float32)
    assert metrics.gold_rank(scores, GOLD, 32) == 3  # block 1, behind block 3 and level with 4
    assert math.isnan(metrics.gold_rank(scores[:0], GOLD, 32))  # all of it in the open block


def test_kl_of_equal_rows_is_zero_and_of_known_rows_is_known() -> None:
    even = np.zeros((1, 2), np.float32)
    uneven = np.log(np.array([[0.75, 0.25]], np.float32))
    assert metrics.kl_divergence(uneven, uneven) == pytest.approx(0.0, abs=1e-12)
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert metrics.kl_divergence(even, uneven + np.float32(3)) == pytest.approx(expected, rel=1e-6)


def test_value_rows_are_the_last_ones() -> None:
    logits = np.eye(4, dtype=np.float32)[[2, 0, 3]]
    assert metrics.says_value(logits, (0, 3))
    assert not metrics.says_value(logits, (2, 0))
    assert metrics.top1_agreement(logits, np.eye(4, dtype=np.float32)[[2, 1, 3]]) == (
        pytest.approx(2 / 3)
    )


@pytest.mark.parametrize(
    ("text", "value", "stated"),
    [
        ("The height is 67 metres.", "67", True),
        ("The height is 67.6 metres.", "67", False),
        ("The height is 167.", "67", False),
        ("It leaves at 1:15.", "1:15", True),
        ("It leaves at 1:15:52.", "1:15", False),
        ("There are 8,765 people", "8,765", True),
        ("There are 18,765 people", "8,765", False),
        ("Ask  Marta\nlindqvist!", "Marta Lindqvist", True),
        ("Martas", "Marta", False),
    ],
)
def test_a_value_is_stated_as_a_whole(text: str, value: str, stated: bool) -> None:
    assert metrics.states(text, value) is stated


def test_kle_is_zero_for_recency_and_one_for_gold() -> None:
    assert metrics.kle(0.8, 0.8, 0.1) == 0.0
    assert metrics.kle(0.1, 0.8, 0.1) == 1.0
    assert math.isnan(metrics.kle(0.3, 0.5, 0.5))


def test_the_bootstrap_draws_whole_prompts() -> None:
    values = [0.0] * 6 + [1.0] * 6
    by_prompt = metrics.bootstrap(values, [0] * 6 + [1] * 6)
    by_question = metrics.bootstrap(values, list(range(12)))
    assert by_prompt.mean == by_question.mean == 0.5
    # Two prompts: a quarter of the resamples are all zeros, a quarter all ones.
    assert (by_prompt.low, by_prompt.high) == (0.0, 1.0)
    assert 0.0 < by_question.low < by_question.high < 1.0
    assert metrics.bootstrap(values, [0] * 12, seed=3) == metrics.bootstrap(
        values, [0] * 12, seed=3
    )
    assert math.isnan(metrics.bootstrap([], []).mean)
