"""The one limit on host memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.errors import CapacityError
from kvmem.kv.budget import Charge, HostBudget


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(st.none() | st.integers(0, 60), max_size=30))
def test_the_limit_is_never_passed(limit: int, changes: list[int | None]) -> None:
    budget, held = HostBudget(limit), list[Charge]()
    for change in changes:
        used = budget.used
        if change is None:
            held[:1] = []
        elif used + change > limit:
            with pytest.raises(CapacityError):
                Charge(budget, change, "a checkpoint")
            assert budget.used == used
        else:
            held.append(Charge(budget, change, "a checkpoint"))
        assert budget.used == sum(charge.n_bytes for charge in held) <= budget.limit == limit
        assert budget.free == limit - budget.used


def test_the_message_names_the_numbers_and_the_way_out() -> None:
    budget = HostBudget(100)
    held = Charge(budget, 60)
    with pytest.raises(
        CapacityError, match=r"a checkpoint needs 41 .* 60 of the limit of 100 .* raise"
    ):
        Charge(budget, 41, "a checkpoint")
    assert Charge(budget, 40).n_bytes + held.n_bytes == 100


def test_a_limit_is_needed() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        HostBudget(0)
    with pytest.raises(OverflowError):
        HostBudget(-1)
    with pytest.raises(OverflowError):
        Charge(HostBudget(10), -1)


def test_a_charge_holds_its_bytes_as_long_as_it_lives() -> None:
    budget = HostBudget(100)
    first, second = Charge(budget, 60, "a state"), Charge(budget, 30)
    with pytest.raises(CapacityError, match="a state needs 11"):
        Charge(budget, 11, "a state")
    assert (budget.used, first.n_bytes) == (90, 60)
    first.release()
    first.release()
    assert (budget.used, first.n_bytes) == (30, 0)
    del second
    assert budget.used == 0
