"""A layout that does not fit its payload is refused with the field's name."""

from dataclasses import replace

import pytest
from synthetic_kv import Q8_0, make_layout

from kvmem.errors import ConfigError
from kvmem.kv.layout import KvLayout, Pair, RopeSpec


def test_pairs_are_every_head_of_every_layer() -> None:
    assert make_layout().pairs() == (Pair(0, 0), Pair(0, 1), Pair(1, 0), Pair(1, 1))


def test_equal_specs_are_equal_values() -> None:
    assert RopeSpec(n_dims=8) == RopeSpec(n_dims=8)
    assert len({RopeSpec(n_dims=8), RopeSpec(n_dims=8), RopeSpec(n_dims=8, freq_base=5e5)}) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_head": 3}, "n_head"),
        ({"n_head_kv": 0}, "n_head"),
        ({"type_k": 99}, "type_k"),
        ({"k_row_bytes": 100}, "k_row_bytes"),
        ({"v_row_bytes": 100}, "v_row_bytes"),
        ({"dequantize": 0}, "dequantize"),
        ({"attn_scale": 0.0}, "attn_scale"),
        ({"hadamard": 48}, "hadamard"),
        ({"hadamard": 128}, "hadamard"),
        ({"rope_k": RopeSpec(n_dims=64, offset=2)}, "rope_k"),
        ({"rope_q": RopeSpec(n_dims=128)}, "rope_q"),
        ({"head_dim_k": 40, "type_k": Q8_0}, "k_row_bytes"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(change: dict[str, object], named: str) -> None:
    layer = make_layout().layers[0]
    with pytest.raises(ConfigError, match=named):
        replace(layer, **change)  # type: ignore[arg-type]


def test_rows_must_lie_apart_and_inside() -> None:
    layout = make_layout()
    first, second = layout.layers
    with pytest.raises(ConfigError, match="K of 4"):
        replace(layout, layers=(first, replace(second, k_offset=second.k_offset - 1)))
    with pytest.raises(ConfigError, match="V of 4"):
        replace(layout, payload_bytes=layout.payload_bytes - 1)
    with pytest.raises(ConfigError, match="layers"):
        KvLayout(layers=(), block_tokens=32, payload_bytes=0)


def test_a_layer_without_v_is_fine() -> None:
    layer = replace(make_layout().layers[0], head_dim_v=0, v_row_bytes=0)
    assert KvLayout(layers=(layer,), block_tokens=32, payload_bytes=32 * layer.k_row_bytes)


def test_scale_of_a_score_is_the_models() -> None:
    layer = make_layout(head_dim=64).layers[0]
    assert layer.score_scale == 0.125
    assert replace(layer, attn_scale=1.0).score_scale == 1.0
