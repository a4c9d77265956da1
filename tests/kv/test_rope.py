"""Un-rotation undoes the rotation of every mode, far out and close in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_retrieval import hadamard, rotate
from synthetic_kv import ROPE_SPECS, image_positions

from kvmem.errors import ConfigError
from kvmem.kv.layout import RopeSpec
from kvmem.kv.rope import unrotate

HEAD_DIM = 64


@pytest.mark.parametrize("name", ROPE_SPECS)
@pytest.mark.parametrize("first", [0, 4000, 199_980])
def test_unrotation_returns_what_was_rotated(name: str, first: int) -> None:
    spec = ROPE_SPECS[name]
    pos = image_positions(first)
    before = np.random.default_rng(first).standard_normal((len(pos), 3, HEAD_DIM))
    rows = rotate(before, pos, spec).astype(np.float32)
    unrotate(rows, pos, spec)
    # f32 storage and f32 products, angles in double: the error does not grow with the position.
    assert np.abs(rows - before).max() < 3e-6


@pytest.mark.parametrize("name", ["neox", "imrope", "none"])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_hadamard_is_undone_before_the_rotation(name: str, size: int) -> None:
    spec = ROPE_SPECS[name]
    pos = image_positions(777)
    before = np.random.default_rng(1).standard_normal((len(pos), 2, HEAD_DIM))
    rows = hadamard(rotate(before, pos, spec), size).astype(np.float32)
    unrotate(rows, pos, spec, size)
    assert np.abs(rows - before).max() < 3e-6


@pytest.mark.parametrize("name", [name for name, spec in ROPE_SPECS.items() if spec is not None])
def test_a_rotation_really_happens(name: str) -> None:
    pos = image_positions(1000)
    before = np.ones((len(pos), 1, HEAD_DIM), np.float32)
    rows = before.copy()
    unrotate(rows, pos, ROPE_SPECS[name])
    assert np.abs(rows - before).max() > 0.1


@pytest.mark.parametrize(
    ("mode", "axis_of_pair"),
    [
        (8, [0, 0, 1, 1, 2, 2, 3, 3]),
        (40, [0, 1, 2, 0, 1, 2, 3, 3]),
    ],
)
def test_each_section_reads_its_own_position(mode: int, axis_of_pair: list[int]) -> None:
    spec = RopeSpec(n_dims=16, mode=mode, sections=(2, 2, 2, 2))
    for axis in range(4):
        pos = np.zeros((1, 4), np.int32)
        pos[0, axis] = 1
        rows = np.ones((1, 1, 16), np.float32)
        unrotate(rows, pos, spec)
        turned = [i for i in range(8) if rows[0, 0, i] != 1]
        assert turned == [i for i, owner in enumerate(axis_of_pair) if owner == axis]


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([0, 2]),
    half=st.integers(1, 32),
    base=st.floats(100, 1e7),
    scale=st.floats(0.01, 1),
    ext=st.sampled_from([0.0, 1.0]),
    pos=st.integers(0, 250_000),
)
def test_round_trip_of_any_spec(
    mode: int, half: int, base: float, scale: float, ext: float, pos: int
) -> None:
    spec = RopeSpec(
        n_dims=2 * half,
        mode=mode,
        freq_base=base,
        freq_scale=scale,
        ext_factor=ext,
        n_ctx_orig=4096,
        offset=HEAD_DIM - 2 * half,
    )
    places = np.array([[pos, 1, 2, 3]], np.int32)
    before = np.random.default_rng(half).standard_normal((1, 2, HEAD_DIM))
    rows = rotate(before, places, spec).astype(np.float32)
    unrotate(rows, places, spec)
    assert np.abs(rows - before).max() < 5e-6


def test_vision_rotation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rope\.mode is 24"):
        RopeSpec(n_dims=64, mode=24)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_dims": 7},
        {"n_dims": 8, "freq_base": 0.0},
        {"n_dims": 8, "freq_scale": 0.0},
        {"n_dims": 8, "attn_factor": 0.0},
        {"n_dims": 8, "offset": -2},
        {"n_dims": 8, "ext_factor": 1.0},
        {"n_dims": 8, "mode": 8},
        {"n_dims": 8, "freq_factors": (1.0, 1.0, 1.0)},
        {"n_dims": 8, "freq_factors": (1.0, 1.0, 0.0, 1.0)},
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RopeSpec(**fields)  # type: ignore[arg-type]


def test_shapes_are_checked_at_the_door() -> None:
    rows = np.zeros((2, 1, 8), np.float32)
    with pytest.raises(ValueError, match="rows need 2 x 4"):
        unrotate(rows, np.zeros((3, 4), np.int32), None)
    with pytest.raises(ValueError, match="reaches dim 16"):
        unrotate(rows, np.zeros((2, 4), np.int32), RopeSpec(n_dims=16))
    with pytest.raises(ValueError, match="hadamard_size"):
        unrotate(rows, np.zeros((2, 4), np.int32), None, 3)
    unrotate(np.zeros((0, 1, 8), np.float32), np.zeros((0, 4), np.int32), None)
