"""Histories that take turns on the device: what moves, and what each failing copy leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import deepcopy
from itertools import count

import numpy as np
import pytest
from memory_driver import MemoryDriver
from oracles import HistoryTwin

from kvmem.errors import CapacityError, TransferError
from kvmem.kv.budget import Charge
from kvmem.kv.history import History
from kvmem.kv.store import HostStore


class TwoHistories:
    """The driver's history of eight blocks (the last one open), and one that branched at token 18:
    blocks 0 to 3 are common, 4 is cut inside.
    """

    def __init__(self, *, n_records: int = 300) -> None:
        self.driver = MemoryDriver(budget_blocks=5, reserve_blocks=2, n_records=n_records)
        self.driver.read(4 * 7 + 2)
        self.driver.ws.apply([0, 1, 4, 5, 7])
        self.other = self.driver.ws.branch(self.driver.ws.history, 18)
        self.other_twin = deepcopy(self.driver.twin)
        self.other_twin.cut(18)

    def check(self, parked: list[tuple[History, HistoryTwin]]) -> None:
        self.driver.check_bytes()
        self.driver.ws.check([history for history, _ in parked])
        for history, twin in parked:
            assert history.tokens.tolist() == twin.tokens
            for block in range(twin.n_blocks):
                assert history.read(block) == twin.block_bytes(block), f"block {block}"

    def switch(self) -> None:
        self.driver.ws.switch(self.other)
        self.driver.twin, self.other_twin = self.other_twin, self.driver.twin


def test_only_what_differs_moves() -> None:
    two = TwoHistories()
    ws = two.driver.ws
    before, slots = ws.history, {block: ws.slot_of(block) for block in (0, 1)}
    two.check([(two.other, two.other_twin)])
    assert (two.other.n_records, two.other.n_shared) == (5, 4)
    transfer = ws.switch(two.other)
    assert ws.resident().tolist() == [0, 1, 4]
    assert {block: ws.slot_of(block) for block in (0, 1)} == slots
    assert (transfer.n_in, transfer.n_out, transfer.n_kept) == (1, 3, 2)
    two.driver.twin, twin = two.other_twin, two.driver.twin
    two.check([(before, twin)])
    two.driver.decode(3)
    two.check([(before, twin)])
    ws.truncate(6)  # inside a block that both hold
    two.driver.twin.cut(6)
    two.check([(before, twin)])


def test_the_window_comes_back_slot_by_slot() -> None:
    two = TwoHistories()
    ws = two.driver.ws
    first = ws.history
    window = {block: ws.slot_of(block) for block in ws.resident().tolist()}
    ws.switch(two.other)
    ws.switch(first)
    assert {block: ws.slot_of(block) for block in ws.resident().tolist()} == window
    two.check([(two.other, two.other_twin)])


def test_each_copy_of_a_switch_may_fail() -> None:
    n = 0
    while True:
        two = TwoHistories()
        ws, first, twin = two.driver.ws, two.driver.ws.history, two.driver.twin
        two.driver.port.fail(n + 1)
        try:
            ws.switch(two.other)
        except TransferError:
            n += 1
        else:
            break
        two.driver.port.fail(0)
        parked = [(two.other, two.other_twin)]
        if ws.history is not first:
            assert ws.n_tokens == 0
            parked.append((first, twin))
            two.driver.twin = HistoryTwin(4, two.driver.twin.row_bytes)
        two.check(parked)
        ws.switch(two.other)
        two.driver.twin = two.other_twin
        two.check([(first, twin)])
    assert n == 3, "the open block out, the other's open block in and published"


@pytest.mark.parametrize("is_parked", [False, True])
def test_each_copy_of_a_branch_may_fail(is_parked: bool) -> None:
    def make() -> tuple[TwoHistories, History]:
        two = TwoHistories()
        source = two.driver.ws.history
        if is_parked:
            two.switch()
        return two, source

    def call(two: TwoHistories, source: History) -> Callable[[], object]:
        return lambda: two.driver.ws.branch(source, source.n_tokens)

    two, source = make()
    two.driver.port.fail(1)
    if is_parked:  # host to host: no device call to fail
        assert call(two, source)() is not None
    else:
        with pytest.raises(TransferError):
            call(two, source)()
    two.driver.port.fail(0)
    parked = source if is_parked else two.other
    two.check([(parked, two.other_twin)])


def test_a_full_host_refuses_and_changes_nothing() -> None:
    two = TwoHistories()
    ws, budget = two.driver.ws, two.driver.budget
    first = ws.history
    others = Charge(budget, budget.free, "others")
    filler = HostStore(two.driver.port, budget, first.store)
    with pytest.raises(CapacityError):
        for block in count():
            filler.put(block, block, np.zeros(ws.payload_bytes, np.uint8))
    for call in (lambda: ws.switch(two.other), lambda: ws.branch(first, 18)):
        with pytest.raises(CapacityError):
            call()
        assert ws.history is first
    two.driver.check_bytes()
    filler.discard(0)
    two.switch()
    del filler
    ws.check([first])
    others.release()


def test_a_history_that_is_forgotten_gives_its_bytes_back() -> None:
    two = TwoHistories()
    ws, budget = two.driver.ws, two.driver.budget
    n_used = ws.history.store.slabs.n_used
    two.other.forget()
    assert ws.history.store.slabs.n_used == n_used - 1, "its own open block; the rest is shared"
    assert budget.used == ws.host_bytes
    two.check([])


def test_damage_of_a_shared_record_is_noticed_by_both() -> None:
    """A control: the comparisons above can fail."""
    two = TwoHistories()
    ws = two.driver.ws
    ws.evict([0])
    payload = (ctypes.c_ubyte * ws.payload_bytes).from_address(ws.record_address(0))
    payload[1] ^= 1
    assert ws.read(0) != two.driver.twin.block_bytes(0)
    assert two.other.read(0) != two.other_twin.block_bytes(0)
    with pytest.raises(AssertionError, match="block 0"):
        two.check([(two.other, two.other_twin)])
