"""Summaries against the mean of the known pre-rotation keys."""

import ctypes
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from oracles_retrieval import slice_means
from synthetic_kv import (
    DEQUANTIZE,
    F16,
    F32,
    NEOX,
    Q8_0,
    dequantize_q8_0,
    make_history,
    make_layout,
    positions,
)

from kvmem.errors import CapacityError, ConfigError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.layout import RopeSpec
from kvmem.kv.summary import KeySummaries
from kvmem.kv.summary_worker import SummaryWorker

YARN = RopeSpec(n_dims=64, n_ctx_orig=4096, freq_scale=1 / 8, ext_factor=1.0)
IMROPE = RopeSpec(n_dims=32, mode=40, freq_base=1e7, sections=(6, 5, 5, 0))


@pytest.mark.parametrize("slice_tokens", [1, 4, 8, 32])
@pytest.mark.parametrize(
    ("type_k", "hadamard_size", "storage_error"),
    [
        (F32, 0, 0.0),
        (F32, 64, 0.0),
        (F16, 0, 2e-3),
        (F16, 32, 2e-3),
        (Q8_0, 64, 0.03),
        (Q8_0, 0, 0.03),
    ],
)
def test_keys_are_the_means_within_half_a_step(
    slice_tokens: int, type_k: int, hadamard_size: int, storage_error: float
) -> None:
    layout = make_layout(
        type_k=type_k, hadamard_size=hadamard_size, ropes=(NEOX, YARN, IMROPE, None), n_layers=4
    )
    history = make_history(layout, 3, first_pos=190_000)
    summaries = history.fill(KeySummaries(layout, layout.pairs(), slice_tokens))
    assert summaries.n_slices == 96 // slice_tokens
    for index, pair in enumerate(summaries.pairs):
        wanted = slice_means(history.keys[pair.layer][:, pair.kv_head], slice_tokens)
        found = summaries.keys(index)
        assert found.shape == wanted.shape
        # int8: half a step of max / 127, and the scale's own rounding to a half (2^-11 of 127).
        top = np.abs(wanted).max(axis=1, keepdims=True) + storage_error
        assert (np.abs(found - wanted) <= top / 127 * 0.57 + storage_error).all()


@pytest.mark.parametrize("type_k", [F32, Q8_0])
def test_a_few_pairs_in_any_order_equal_all_pairs(type_k: int) -> None:
    layout = make_layout(n_layers=3, n_head=8, n_head_kv=4, type_k=type_k, ropes=(NEOX, None))
    history = make_history(layout, 2)
    whole = history.fill(KeySummaries(layout, layout.pairs()))
    few = history.fill(KeySummaries(layout, [(2, 3), (0, 1), (2, 0)]))
    for index, pair in enumerate(few.pairs):
        expected = whole.keys(layout.pairs().index(pair))
        assert np.array_equal(few.keys(index), expected)


def test_heads_that_are_no_whole_groups_are_read_by_the_row() -> None:
    layout = make_layout(head_dim=48, n_head_kv=2, type_k=Q8_0, ropes=(None,))
    history = make_history(layout, 1)
    found = history.fill(KeySummaries(layout, [(1, 1)], 1)).keys(0)
    assert np.abs(found - history.keys[1][:, 1]).max() < 0.05


def test_padded_rows_are_stepped_over() -> None:
    layout = make_layout(n_layers=1)
    layer = replace(
        layout.layers[0], k_row_bytes=layout.layers[0].k_row_bytes + 64, v_offset=100_000
    )
    layout = replace(layout, layers=(layer,), payload_bytes=200_000)
    history = make_history(layout, 1)
    found = history.fill(KeySummaries(layout, [(0, 1)], 1)).keys(0)
    assert np.abs(found - history.keys[0][:, 1]).max() < 0.02


def test_truncated_and_refilled_equals_fresh() -> None:
    layout = make_layout()
    history = make_history(layout, 6)
    summaries = history.fill(KeySummaries(layout, layout.pairs(), 4))
    expected = [summaries.keys(i) for i in range(4)]
    for keep in (5, 3, 0):
        summaries.truncate(keep)
        assert summaries.n_blocks == keep
        assert all(np.array_equal(summaries.keys(i), expected[i][: keep * 8]) for i in range(4))
        # Other blocks first, so that stale bytes would show.
        other = make_history(layout, 6, seed=5)
        for block in range(keep, 6):
            summaries.add(block, other.payloads[block].ctypes.data, other.block_pos(block))
        summaries.truncate(keep)
        for block in range(keep, 6):
            summaries.add(block, history.payloads[block].ctypes.data, history.block_pos(block))
        assert all(np.array_equal(summaries.keys(i), expected[i]) for i in range(4))


def test_many_chunks_hold_what_one_would() -> None:
    layout = make_layout(n_layers=1, n_head=1, n_head_kv=1, head_dim=32, ropes=(None,))
    history = make_history(layout, 70)
    summaries = history.fill(KeySummaries(layout, [(0, 0)], 1))  # 2,240 slices, 1,024 a chunk
    assert summaries.blocks_per_chunk == 32
    assert np.abs(summaries.keys(0) - history.keys[0][:, 0]).max() < 0.02


@pytest.mark.parametrize("slice_tokens", [2, 8, 32])
def test_block_keys_are_the_mean_of_their_slices(slice_tokens: int) -> None:
    layout = make_layout(block_tokens=64)
    summaries = make_history(layout, 40).fill(KeySummaries(layout, [(1, 0), (0, 1)], slice_tokens))
    for index in range(2):
        wanted = summaries.keys(index).reshape(40, -1, 64).mean(axis=1, dtype=np.float64)
        assert np.abs(summaries.block_keys(index) - wanted).max() < 1e-6


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_a_key_that_overflowed_says_nothing_and_harms_nobody(bad: float) -> None:
    layout = make_layout(ropes=(None,))
    history = make_history(layout, 1)
    history.payloads[0][: 4 * 128].view(np.float32)[0] = (
        bad  # first dim of token 0, head 0, layer 0
    )
    found = history.fill(KeySummaries(layout, layout.pairs())).keys(0)
    assert (found[0] == 0).all()
    assert np.isfinite(found).all() and (found[1:] != 0).any(axis=1).all()


def test_bytes_are_counted_and_given_back() -> None:
    layout = make_layout()
    history = make_history(layout, 3)
    budget = HostBudget(10**9)
    summaries = history.fill(KeySummaries(layout, layout.pairs(), 4, budget))
    assert budget.used == summaries.n_bytes >= summaries.n_slices * 4 * (64 + 2)
    assert summaries.bytes_per_token == 4 * (64 + 2) / 4
    summaries.truncate(0)
    assert budget.used == 0
    history.fill(summaries)
    del summaries
    assert budget.used == 0


def test_no_room_changes_nothing() -> None:
    layout = make_layout()
    history = make_history(layout, 1)
    budget = HostBudget(100)
    summaries = KeySummaries(layout, layout.pairs(), 4, budget)
    with pytest.raises(CapacityError, match="key summaries"):
        history.fill(summaries)
    assert (summaries.n_blocks, summaries.n_bytes, budget.used) == (0, 0, 0)


def test_recompute_gives_other_pairs_of_the_same_blocks() -> None:
    layout = make_layout()
    history = make_history(layout, 5)
    budget = HostBudget(10**9)
    summaries = history.fill(KeySummaries(layout, [(0, 0)], 4, budget))

    def records(n_blocks: int):  # type: ignore[no-untyped-def]
        for block in range(n_blocks):
            yield history.payloads[block].ctypes.data, history.block_pos(block)

    changed = summaries.recompute([(1, 1), (0, 1)], records, 8)
    fresh = history.fill(KeySummaries(layout, [(1, 1), (0, 1)], 8))
    assert (changed.n_blocks, changed.slice_tokens, changed.pairs) == (5, 8, fresh.pairs)
    assert all(np.array_equal(changed.keys(i), fresh.keys(i)) for i in range(2))
    used = budget.used
    with pytest.raises(StateError, match="4 records"):
        summaries.recompute([(1, 0)], lambda n: list(records(n))[:4])
    assert budget.used == used and summaries.n_blocks == 5


def test_doors_refuse_what_cannot_be() -> None:
    layout = make_layout()
    history = make_history(layout, 1)
    for pairs, slice_tokens in (
        ([], 4), ([(0, 0), (0, 0)], 4), ([(2, 0)], 4), ([(0, 2)], 4), ([(0, 0)], 5), ([(0, 0)], 0)
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            KeySummaries(layout, pairs, slice_tokens)
    summaries = KeySummaries(layout, [(0, 0)])
    address = history.payloads[0].ctypes.data
    with pytest.raises(StateError, match="out of order"):
        summaries.add(1, address, history.pos)
    with pytest.raises(ValueError, match="32 x 4"):
        summaries.add(0, address, positions(31))
    with pytest.raises(ValueError, match="null"):
        summaries.add(0, 0, history.pos)
    with pytest.raises(ValueError, match="n_blocks"):
        summaries.truncate(-1)
    for read in (summaries.keys, summaries.block_keys):
        with pytest.raises(IndexError):
            read(1)


class TestSummaryWorker:
    def test_same_keys_as_without(self) -> None:
        layout = make_layout(type_k=Q8_0)
        history = make_history(layout, 8)
        expected = history.fill(KeySummaries(layout, layout.pairs()))
        with SummaryWorker(KeySummaries(layout, layout.pairs())) as worker:
            for block in range(8):
                pos = history.block_pos(block).copy()
                worker.add(block, history.payloads[block].ctypes.data, pos)
                pos[:] = -1  # the worker keeps its own
            worker.flush()
            assert (worker.summaries.n_blocks, worker.n_pending) == (8, 0)
            for index in range(4):
                assert np.array_equal(worker.summaries.keys(index), expected.keys(index))
            worker.truncate(3)
            worker.add(3, history.payloads[3].ctypes.data, history.block_pos(3))
            worker.flush()
            assert worker.summaries.n_blocks == 4

    def test_add_returns_while_the_thread_is_busy(self) -> None:
        gate = threading.Event()

        def slow(source: int, target: int, n: int) -> None:
            gate.wait(30)
            dequantize_q8_0(source, target, n)

        function = DEQUANTIZE(slow)
        address = ctypes.cast(function, ctypes.c_void_p).value
        layout = make_layout(type_k=Q8_0, dequantize=address)
        history = make_history(layout, 2)
        with SummaryWorker(KeySummaries(layout, [(0, 0)])) as worker:
            for block in range(2):
                worker.add(block, history.payloads[block].ctypes.data, history.block_pos(block))
            assert (worker.summaries.n_blocks, worker.n_pending) == (0, 2)
            gate.set()
            worker.flush()
            assert worker.summaries.n_blocks == 2

    def test_what_an_interrupted_wait_left_is_waited_for_again(self) -> None:
        """Until then its record is read: nothing may be dropped."""
        gate = threading.Event()

        def slow(source: int, target: int, n: int) -> None:
            gate.wait(30)
            dequantize_q8_0(source, target, n)

        function = DEQUANTIZE(slow)
        address = ctypes.cast(function, ctypes.c_void_p).value
        layout = make_layout(type_k=Q8_0, dequantize=address)
        history = make_history(layout, 1)
        with SummaryWorker(KeySummaries(layout, [(0, 0)])) as worker:
            worker.add(0, history.payloads[0].ctypes.data, history.block_pos(0))
            me = threading.get_ident()
            threading.Timer(0.2, signal.pthread_kill, (me, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                worker.truncate(0)
            assert worker.n_pending == 1
            gate.set()
            worker.truncate(0)
            assert (worker.summaries.n_blocks, worker.n_pending) == (0, 0)

    def test_an_error_of_the_thread_is_raised_by_flush_and_the_block_can_come_again(self) -> None:
        layout = make_layout()
        history = make_history(layout, 3)
        with SummaryWorker(KeySummaries(layout, [(0, 0)])) as worker:
            worker.add(0, history.payloads[0].ctypes.data, history.block_pos(0))
            worker.add(1, 0, history.block_pos(1))
            worker.add(2, history.payloads[2].ctypes.data, history.block_pos(2))
            with pytest.raises(ValueError, match="null"):
                worker.flush()
            assert worker.summaries.n_blocks == 1
            for block in (1, 2):
                worker.add(block, history.payloads[block].ctypes.data, history.block_pos(block))
            worker.flush()
            assert worker.summaries.n_blocks == 3

    def test_no_room_is_raised_at_once(self) -> None:
        layout = make_layout()
        history = make_history(layout, 1)
        budget = HostBudget(10)
        with SummaryWorker(KeySummaries(layout, [(0, 0)], 4, budget)) as worker:
            with pytest.raises(CapacityError):
                worker.add(0, history.payloads[0].ctypes.data, history.block_pos(0))
            assert worker.n_pending == 0

    def test_closed_twice_and_used_after(self) -> None:
        worker = SummaryWorker(KeySummaries(make_layout(), [(0, 0)]))
        worker.close()
        worker.close()
        with pytest.raises(StateError, match="closed"):
            worker.add(0, 1, positions(32))
        worker.flush()

    def test_out_of_order_is_refused_at_once(self) -> None:
        with (
            SummaryWorker(KeySummaries(make_layout(), [(0, 0)])) as worker,
            pytest.raises(StateError, match="out of order"),
        ):
            worker.add(1, 1, positions(32))
