"""A query keeps evenly picked, un-rotated rows of the layers that score."""

import numpy as np
import pytest
from oracles_retrieval import hadamard, rotate
from synthetic_kv import NEOX, make_layout, positions

from kvmem.kv.layout import Pair, RopeSpec
from kvmem.kv.query import MAX_ROWS, Query, pick_evenly

YARN = RopeSpec(n_dims=64, n_ctx_orig=4096, freq_scale=0.25, ext_factor=1.0)


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 100, 5000])
@pytest.mark.parametrize("limit", [1, 2, 16])
def test_rows_are_picked_evenly(n: int, limit: int) -> None:
    picked = pick_evenly(n, limit)
    assert len(picked) == min(n, limit)
    if n >= 2 and limit >= 2:
        steps = np.diff(picked)
        assert (picked[0], picked[-1]) == (0, n - 1)
        assert steps.min() >= 1 and steps.max() - steps.min() <= 1


def test_rows_come_back_un_rotated() -> None:
    layout = make_layout(n_layers=3, ropes=(NEOX, YARN, None), hadamard_size=64)
    pos = positions(40, first=123_456)
    rng = np.random.default_rng(3)
    before = rng.standard_normal((3, 40, 4, 64))
    tapped = np.stack(
        [
            hadamard(rotate(rows, pos, layer.rope_q), 64)
            for rows, layer in zip(before, layout.layers, strict=True)
        ]
    ).astype(np.float32)
    kept = tapped.copy()
    query = Query.from_tap(layout, [(2, 0), (0, 1), (2, 1)], tapped, pos, tokens=[5, 6, 5])
    assert np.array_equal(tapped, kept)
    assert sorted(query.layers) == [0, 2]
    assert query.n_rows == MAX_ROWS
    assert query.tokens.tolist() == [5, 6, 5]
    picked = pick_evenly(40, MAX_ROWS)
    for index in (0, 2):
        assert np.abs(query.layers[index] - before[index][picked]).max() < 5e-6
    heads = query.heads(Pair(0, 1))
    assert np.shares_memory(heads, query.layers[0])
    assert np.array_equal(heads, query.layers[0][:, 2:4])


def test_fewer_rows_are_all_kept() -> None:
    layout = make_layout()
    rows = np.ones((2, 3, 4, 64), np.float32)
    assert Query.from_tap(layout, [(0, 0)], rows, positions(3)).n_rows == 3
    assert Query.from_tap(layout, [(0, 0)], rows[:, :0], positions(0)).n_rows == 0
    assert Query.from_tap(layout, [(0, 0)], rows, positions(3), max_rows=2).n_rows == 2


def test_parts_are_taken_and_joined_in_the_layers_that_both_know() -> None:
    layout = make_layout()
    rows = np.random.default_rng(1).standard_normal((2, 5, 4, 64)).astype(np.float32)
    both = Query.from_tap(layout, [(0, 0), (1, 0)], rows, positions(5), tokens=range(5))
    one = Query.from_tap(layout, [(0, 0)], rows, positions(5), tokens=range(5, 10))
    part = both.take(np.array([0, 2]), 3)
    assert part.tokens.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(part.layers[1], both.layers[1][[0, 2]])
    joined = part.join(one)
    assert list(joined.layers) == [0]
    assert joined.n_rows == 7
    assert joined.tokens.tolist() == [0, 1, 2, *range(5, 10)]


def test_shapes_are_checked() -> None:
    layout = make_layout()
    with pytest.raises(ValueError, match="1 layers for a layout of 2"):
        Query.from_tap(layout, [(0, 0)], np.ones((1, 3, 4, 64), np.float32), positions(3))
    with pytest.raises(ValueError, match="rows of layer 1"):
        Query.from_tap(layout, [(0, 0)], np.ones((2, 3, 2, 64), np.float32), positions(3))
    with pytest.raises(ValueError, match="limit"):
        pick_evenly(5, 0)
