"""LlamaPort: the layout that the graph tells, the query tap's rules, and a closed context."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import random_tokens

from kvmem.errors import DecodeError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.layout import KV_TYPES, ROPE_IMROPE, ROPE_NEOX, ROPE_NORMAL
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

BLOCK = 32


def make_context(path: Path, **settings: object) -> Context:
    sizes = {"n_ctx": 512, "n_cells": 4 * BLOCK, "block_tokens": BLOCK, "n_batch": 64}
    return Context(Model(path), **{**sizes, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "mode", "layers", "rotated"),
    [
        ("llama", ROPE_NORMAL, [0, 1], [True, True]),
        ("qwen2", ROPE_NEOX, [0, 1], [True, True]),
        ("qwen3", ROPE_NEOX, [0, 1], [True, True]),
        ("qwen3moe", ROPE_NEOX, [0, 1], [True, True]),
        ("smollm3", ROPE_NORMAL, [0, 1, 2, 3], [True, True, True, False]),
        ("qwen35", ROPE_IMROPE, [1, 3], [True, True]),
        ("qwen35_mtp", ROPE_IMROPE, [1, 3], [True, True]),
    ],
)
def test_layout_is_read_from_the_graph(
    kind: str, mode: int, layers: list[int], rotated: list[bool], tiny: Callable[..., Path]
) -> None:
    with make_context(tiny(kind), type_k="q8_0", type_v="q4_0") as context:
        layout = LlamaPort(context).layout
    assert [layer.il for layer in layout.layers] == layers
    assert [layer.rope_k is not None for layer in layout.layers] == rotated
    for layer in layout.layers:
        assert layer.rope_k == layer.rope_q
        assert layer.rope_k is None or layer.rope_k.mode == mode
        assert (layer.n_head, layer.n_head_kv) == (4, 2)
        assert (layer.head_dim_k, layer.head_dim_v) == (32, 32)
        assert (KV_TYPES[layer.type_k].name, KV_TYPES[layer.type_v].name) == ("q8_0", "q4_0")
        assert (layer.k_row_bytes, layer.v_row_bytes) == (2 * 34, 2 * 18)
        assert layer.attn_scale == pytest.approx(32**-0.5)
    assert layout.payload_bytes == len(layers) * BLOCK * 2 * (34 + 18)


@pytest.mark.parametrize(("head_dim", "expected"), [(32, 0), (64, 64), (128, 128), (192, 64)])
def test_quantised_keys_of_wide_heads_went_through_a_hadamard(
    head_dim: int, expected: int, tiny: Callable[..., Path]
) -> None:
    path = tiny("llama", head_dim=head_dim)
    for type_k, size in (("q8_0", expected), ("f16", 0)):
        with make_context(path, type_k=type_k, type_v=type_k) as context:
            assert {layer.hadamard for layer in LlamaPort(context).layout.layers} == {size}


def test_the_pool_is_what_was_asked_for(tiny_llama: Path) -> None:
    with make_context(tiny_llama, type_k="f16", type_v="f16") as context:
        port = LlamaPort(context)
        assert (port.n_slots, port.block_tokens) == (4, BLOCK)
        assert port.device_bytes() == (2 * 2 * 4 * BLOCK * 2 * 32 * 2, 0)
        assert not port.is_hybrid
        assert context.n_ctx == 512  # the workspace is larger than the pool


def test_tap_wants_rows_that_are_decoded(tiny_llama: Path) -> None:
    layers, rows = np.array([0, 1], np.int32), np.array([1, 5], np.int32)
    with make_context(tiny_llama) as context:
        port = LlamaPort(context)
        with pytest.raises(StateError, match="not open"):
            port.end_tap()
        for wrong in (np.array([2], np.int32), np.array([-1], np.int32), np.array([], np.int32)):
            with pytest.raises(ValueError, match="layer"):
                port.begin_tap(wrong, rows)
        working_set = WorkingSet(
            port, block_tokens=BLOCK, budget_blocks=2, reserve_blocks=1, budget=HostBudget(1 << 20)
        )
        port.begin_tap(layers, rows)
        working_set.prepare(4)
        context.decode(np.array(random_tokens(4), np.int32), np.arange(4, dtype=np.int32))
        with pytest.raises(StateError, match="not decoded to its end"):
            port.end_tap()  # row 5 never came
        with pytest.raises(StateError, match="not open"):
            port.end_tap()
        del working_set


def test_tap_refuses_rows_out_of_order(tiny_llama: Path) -> None:
    with make_context(tiny_llama) as context:
        port = LlamaPort(context)
        with pytest.raises(ValueError, match="ascend"):
            port.begin_tap(np.array([0], np.int32), np.array([5, 1], np.int32))
        port.begin_tap(np.array([0], np.int32), np.array([1, 5], np.int32))
        with pytest.raises(StateError, match="open already"):
            port.begin_tap(np.array([0], np.int32), np.array([1, 5], np.int32))


def test_unplaced_tokens_are_refused(tiny_llama: Path) -> None:
    with make_context(tiny_llama) as context:
        port = LlamaPort(context)
        with pytest.raises(DecodeError, match="no free cells"):
            context.decode(np.array(random_tokens(4), np.int32), np.arange(4, dtype=np.int32))
        assert port.n_cells_used == 0


def test_a_closed_context_closes_its_port(tiny_llama: Path) -> None:
    context = make_context(tiny_llama)
    port = LlamaPort(context)
    context.close()
    one = np.array([0], np.int32)
    for use in (
        lambda: port.n_cells_used,
        lambda: port.is_hybrid,
        lambda: port.transfer,
        lambda: port.device_bytes(),
        lambda: port.begin_tap(one, one),
        lambda: port.end_tap(),
        lambda: LlamaPort(context),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_stock_context_has_no_port(tiny_llama: Path) -> None:
    with (
        Context(Model(tiny_llama), n_ctx=64) as context,
        pytest.raises(StateError, match="no placeable memory"),
    ):
        LlamaPort(context)


def test_host_slabs_in_a_cycle_are_given_back(tiny_llama: Path) -> None:
    # the store gives its slabs back through the port while the collector takes references away
    for _ in range(3):
        context = make_context(tiny_llama)
        working_set = WorkingSet(
            LlamaPort(context),
            block_tokens=BLOCK,
            budget_blocks=2,
            reserve_blocks=1,
            budget=HostBudget(1 << 24),
        )
        working_set.prepare(BLOCK)
        tokens, pos = np.array(random_tokens(BLOCK), np.int32), np.arange(BLOCK, dtype=np.int32)
        context.decode(tokens, pos)
        working_set.commit(tokens, np.repeat(pos[:, None], 4, axis=1))
        working_set.seal()
        assert working_set.n_sealed == 1
        cycle: list[object] = [working_set]
        cycle.append(cycle)
        del context, working_set, cycle
        assert gc.collect() > 0
