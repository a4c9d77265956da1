"""Which blocks a chosen one brings along, by how many tokens a block has."""

import numpy as np
import pytest

from kvmem.engine.retrieve import EDGE_SHARE, choose_blocks
from kvmem.kv.scorers import Scores


def chosen(
    scores: list[float],
    edges: dict[int, tuple[float, float]],
    *,
    n_blocks: int,
    budget_blocks: int,
    block_tokens: int,
) -> list[int]:
    """Nothing but the newest block is in anyhow. edges: shares near start and end, else 0."""
    shares = np.zeros((len(scores), 2), np.float32)
    for block, share in edges.items():
        shares[block] = share
    known = Scores("heads", np.array(scores, np.float32), shares)
    blocks = choose_blocks(
        known,
        n_blocks=n_blocks,
        budget_blocks=budget_blocks,
        block_tokens=block_tokens,
        recent_blocks=0,
    )
    return [int(block) for block in blocks]


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


def test_blocks_of_8_are_those_of_a_line_that_is_written_out() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        n_blocks = int(rng.integers(1, 30))
        n_scored = int(rng.integers(0, n_blocks + 1))
        blocks = rng.integers(0, 6, n_scored).astype(np.float32)  # with many equals
        edges = rng.choice(np.array([0, 0.5, 1], np.float32), (n_scored, 2))
        pins = rng.integers(0, n_blocks, 2).tolist()
        budget = int(rng.integers(3, 12))
        line = [n_blocks - 1, *pins, 0]
        known = sorted(range(n_scored), key=lambda b: (-blocks[b], -b))
        for block in [*known, *range(n_blocks - 1, n_scored - 1, -1)]:
            line.append(block)
            if block < n_scored:
                line += [block + 1, block + 2] * bool(edges[block, 1] >= EDGE_SHARE)
                line += [block - 1] * bool(edges[block, 0] >= EDGE_SHARE)
        inside = [block for block in dict.fromkeys(line) if 0 <= block < n_blocks]
        got = choose_blocks(
            Scores("heads", blocks, edges),
            n_blocks=n_blocks,
            budget_blocks=budget,
            block_tokens=8,
            pins=pins,
            sink_blocks=1,
        )
        assert got.tolist() == sorted(inside[:budget])


def test_a_score_that_is_no_number_is_refused_for_blocks_of_any_size() -> None:
    for block_tokens in (8, 16):
        with pytest.raises(ValueError, match="score of block 1 is NaN"):
            chosen([0, np.nan, 1], {}, n_blocks=3, budget_blocks=2, block_tokens=block_tokens)
