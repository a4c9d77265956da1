"""Residency against a dict."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.errors import StateError
from kvmem.kv.residency import Residency


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_it_is_a_dict_that_takes_the_lowest_slot(calls: list[tuple[bool, int]]) -> None:
    residency = Residency(3, 2, 1)
    held: dict[int, int] = {}
    for is_put, block in calls:
        free = sorted(set(range(6)) - set(held.values()))
        if is_put and block not in held and free:
            assert residency.put(block) == free[0]
            held[block] = free[0]
        elif is_put:
            with pytest.raises(StateError):
                residency.put(block)
        elif block in held:
            residency.drop(block)
            del held[block]
        else:
            with pytest.raises(StateError):
                residency.drop(block)
        residency.check()
        assert {b: residency.find(b) for b in range(12) if residency.find(b) != -1} == held
        assert residency.n_used == len(held)
        by_slot = {slot: block for block, slot in held.items()}
        assert residency.blocks().tolist() == [by_slot.get(slot, -1) for slot in range(6)]


def test_regions_are_counted() -> None:
    residency = Residency(2, 2, 1)
    seen = []
    for block in range(6):
        seen.append((residency.n_free_slots(), residency.n_free_slots(reply=True)))
        if block < 5:
            residency.put(block)
    assert seen == [(2, 4), (1, 3), (0, 2), (0, 1), (0, 0), (0, 0)]


def test_a_block_in_the_slack_uses_up_the_reserve() -> None:
    residency = Residency(1, 1, 1)
    for block in range(3):
        residency.put(block)
    residency.drop(0)
    assert residency.n_free_slots(reply=True) == 0, "two are left, as many as budget and reserve"


def test_wrong_sizes_and_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="n_budget_slots is 0"):
        Residency(0)
    with pytest.raises(ValueError, match="-1 reserve"):
        Residency(1, -1)
    residency = Residency(2)
    with pytest.raises(ValueError, match="block is -1"):
        residency.put(-1)
    with pytest.raises(StateError, match="slot 2 is not free"):
        residency.put(0, 2)
    assert residency.find(2**30) == -1
