"""Which blocks a chosen one brings along, by how many tokens a block has."""

import numpy as np

from kvmem.engine.retrieve import EDGE_SHARE, choose_blocks
from kvmem.kv.scorers import Scores


def chosen(scores: list[float], edges: dict[int, tuple[float, float]], **sizes: int) -> list[int]:
    """Nothing but the newest block is in anyhow. edges: shares near start and end, else 0."""
    shares = np.zeros((len(scores), 2), np.float32)
    for block, share in edges.items():
        shares[block] = share
    known = Scores("heads", np.array(scores, np.float32), shares)
    return choose_blocks(known, recent_blocks=0, **sizes).tolist()


def test_a_block_of_8_brings_16_tokens_behind_it_and_one_block_before() -> None:
    scores = [0.0, 0, 0, 9, 0, 0, 0, 5, 4, 0]
    both = {3: (1.0, 1.0)}
    for budget, wanted in ((2, [3]), (3, [3, 4]), (4, [3, 4, 5]), (5, [2, 3, 4, 5])):
        got = chosen(scores, both, n_blocks=10, budget_blocks=budget, block_tokens=8)
        assert got == [*wanted, 9]
    # those brought along bring nobody; the next by score comes behind them
    got = chosen(scores, both | {5: (1, 1)}, n_blocks=10, budget_blocks=6, block_tokens=8)
    assert got == [2, 3, 4, 5, 7, 9]


def test_a_block_of_8_brings_nobody_where_its_score_lies_elsewhere() -> None:
    scores = [0.0, 0, 0, 9, 0, 0, 0, 5, 4, 0]
    below = EDGE_SHARE - 0.01
    for shares, wanted in (((below, below), [3, 7]), ((1, below), [2, 3]), ((below, 1), [3, 4])):
        got = chosen(scores, {3: shares}, n_blocks=10, budget_blocks=3, block_tokens=8)
        assert got == [*wanted, 9]


def test_a_block_of_16_brings_one_to_each_side() -> None:
    scores = [0.0, 0, 0, 9, 0, 0, 0, 5, 4, 0]
    for block_tokens in (16, 128):
        got = chosen(scores, {3: (1, 1)}, n_blocks=10, budget_blocks=5, block_tokens=block_tokens)
        assert got == [2, 3, 4, 7, 9]


def test_neighbours_end_with_the_history_and_may_have_no_score_yet() -> None:
    got = chosen(
        [9.0, 0, 0, 0, 8, 7], {0: (1, 1), 5: (1, 1)}, n_blocks=7, budget_blocks=6, block_tokens=8
    )
    assert got == [0, 1, 2, 4, 5, 6]
    # as many blocks as the budget has, whatever the line is
    scores = np.random.default_rng(0).normal(size=40).tolist()
    everything = {block: (1.0, 1.0) for block in range(40)}
    for budget in (1, 7, 40, 60):
        got = chosen(scores, everything, n_blocks=40, budget_blocks=budget, block_tokens=8)
        assert len(got) == min(budget, 40)
