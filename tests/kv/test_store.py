"""HostStore: records, slabs and the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.errors import CapacityError
from kvmem.kv.budget import Charge, HostBudget
from kvmem.kv.port import ArrayPort
from kvmem.kv.store import HostStore

PAGE = 4096


def make(n_records: float, row_bytes: int = 8) -> tuple[HostStore, HostBudget, ArrayPort]:
    port = ArrayPort(1, 4, (row_bytes,))
    record_bytes = HostStore(port, HostBudget(1)).slabs.record_bytes
    budget = HostBudget(int(n_records * record_bytes))
    return HostStore(port, budget), budget, port


def payload(store: HostStore, value: int) -> np.ndarray:
    return np.random.default_rng(value).integers(0, 256, store.slabs.payload_bytes, dtype=np.uint8)


@settings(deadline=None)
@given(
    st.floats(1, 40),
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "put", "discard", "trim"]), st.integers(0, 30)),
        max_size=60,
    ),
)
def test_it_is_a_dict_with_a_limit(n_records: float, calls: list[tuple[str, int]]) -> None:
    store, budget, port = make(n_records)
    expected: dict[int, tuple[int, bytes]] = {}
    for version, (call, block) in enumerate(calls):
        if call == "trim":
            store.trim_slabs()
        elif call == "discard":
            store.discard(block)
            expected.pop(block, None)
        else:
            rows = payload(store, version)
            try:
                store.put(block, version, rows)
            except CapacityError:
                assert len(expected) == int(n_records), "every record that fits is used"
            else:
                expected[block] = version, rows.tobytes()
        store.check()
        assert store.n_records == len(expected)
        assert store.slabs.n_bytes == budget.used == port.slab_bytes <= budget.limit
    for block in range(32):
        if block in expected:
            version, rows_bytes = expected[block]
            assert store.get(block, version) == rows_bytes
            assert not store.has(block, version + 1), "another version is a miss"
        else:
            assert not any(store.has(block, version) for version in range(len(calls)))
    del store
    assert budget.used == port.slab_bytes == 0


def test_a_record_is_one_aligned_piece() -> None:
    store, _, _ = make(20, row_bytes=5000)
    assert store.slabs.payload_offset == 64 + 4 * 28 + 16, "header, tokens, up to a line"
    assert store.slabs.payload_bytes == 20000
    assert store.slabs.record_bytes == 5 * PAGE
    addresses = []
    for block in range(20):
        store.put(block, 1, payload(store, block))
        addresses.append(store.address(block, 1))
    assert all(address % PAGE == 0 for address in addresses)
    gaps = np.diff(np.sort(addresses))
    assert (gaps >= store.slabs.record_bytes).all()


def test_slabs_are_a_sixteenth_of_the_limit_and_at_most_64_mib() -> None:
    assert make(160)[0].slabs.slab_records == 10
    assert make(15)[0].slabs.slab_records == 1, "at least one record"
    port = ArrayPort(1, 4, (1 << 20,))
    store = HostStore(port, HostBudget(1 << 40))
    assert store.slabs.slab_records == (64 << 20) // store.slabs.record_bytes == 15


def test_the_limit_is_not_allocated_up_front() -> None:
    port = ArrayPort(1, 4, (8,))
    budget = HostBudget(1 << 50)
    store = HostStore(port, budget)
    assert budget.used == port.slab_bytes == 0
    store.put(0, 1, payload(store, 0))
    assert budget.used == 64 << 20


def test_the_last_slab_is_as_small_as_the_rest_of_the_limit() -> None:
    store, budget, _ = make(40)
    held = Charge(budget, int(37.5 * store.slabs.record_bytes), "checkpoints")
    assert store.slabs.slab_records == 2
    store.put(0, 1, payload(store, 0))
    store.put(1, 1, payload(store, 1))
    with pytest.raises(CapacityError, match=f"host record needs {store.slabs.record_bytes} bytes"):
        store.put(2, 1, payload(store, 2))
    assert store.get(0, 1) == payload(store, 0).tobytes()
    store.check()
    held.release()
    store.put(2, 1, payload(store, 2))


def test_a_failed_put_keeps_the_older_record() -> None:
    store, _, _ = make(1)
    store.put(0, 1, payload(store, 0))
    with pytest.raises(CapacityError):
        store.put(0, 2, payload(store, 1))
    assert store.get(0, 1) == payload(store, 0).tobytes()


def test_memory_that_the_machine_lacks_is_a_capacity_error() -> None:
    store, budget, port = make(40)
    port.slab_limit_bytes = 3 * store.slabs.record_bytes
    store.put(0, 1, payload(store, 0))
    store.put(1, 1, payload(store, 1))
    with pytest.raises(CapacityError, match=r"the machine has no .* lower the host limit"):
        store.put(2, 1, payload(store, 2))
    assert budget.used == store.slabs.n_bytes == 2 * store.slabs.record_bytes
    store.check()


def test_an_empty_slab_goes_back_and_the_others_stay() -> None:
    store, budget, _ = make(64)  # slabs of 4
    for block in range(12):
        store.put(block, 1, payload(store, block))
    assert store.slabs.n_slabs == 3
    for block in range(4, 8):
        store.discard(block)
    assert store.slabs.n_slabs == 3, "only trimming gives back"
    store.trim_slabs()
    assert (store.slabs.n_slabs, budget.used) == (2, 8 * store.slabs.record_bytes)
    store.check()
    for block in (0, 3, 8, 11):
        assert store.get(block, 1) == payload(store, block).tobytes()
    for block in range(8, 12):
        store.discard(block)
    store.put(20, 1, payload(store, 20))
    store.check()


def test_what_is_not_there_is_a_key_error() -> None:
    store, _, _ = make(4)
    store.put(1, 5, payload(store, 0))
    for block, version in ((0, 5), (1, 4), (-1, 5), (2**30, 5)):
        with pytest.raises(KeyError):
            store.get(block, version)
        with pytest.raises(KeyError):
            store.address(block, version)
    with pytest.raises(ValueError, match="payload has 3 bytes"):
        store.put(0, 1, np.zeros(3, dtype=np.uint8))
    with pytest.raises(ValueError, match="block -1"):
        store.put(-1, 1, payload(store, 0))
