"""The token table and its bytes. How it grows and is cut shows in the working set's tests."""

from __future__ import annotations

import pytest
from memory_driver import MemoryDriver

from kvmem.errors import CapacityError
from kvmem.kv.block import BlockTable
from kvmem.kv.budget import Charge, HostBudget


def test_an_empty_table_costs_nothing() -> None:
    budget = HostBudget(1)
    table = BlockTable(4, budget)
    assert (table.n_tokens, table.n_blocks, table.n_bytes, budget.used) == (0, 0, 0, 0)
    assert table.tokens().shape == (0,)
    assert table.pos().shape == (0, 4)


def test_no_block_without_tokens() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        BlockTable(0, HostBudget(1))


def test_views_are_read_only_and_outlive_growth() -> None:
    driver = MemoryDriver()
    driver.read(10)
    tokens, pos = driver.ws.tokens, driver.ws.pos
    for view in (tokens, pos):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    kept = tokens.tolist()
    driver.read(500)
    assert driver.ws.tokens[:10].tolist() == kept == tokens.tolist()
    assert [tuple(one) for one in pos.tolist()] == driver.twin.pos[:10]
    assert driver.ws.tokens.base is not None, "no copy"


def test_growth_is_charged_and_given_back() -> None:
    driver = MemoryDriver()
    driver.read(600)
    assert driver.ws.host_bytes == driver.budget.used
    assert driver.ws.host_bytes - 4096 * driver.ws.n_sealed >= 600 * 20, "tokens and positions"
    budget = driver.budget
    del driver
    assert budget.used == 0


def test_a_table_that_may_not_grow_changes_nothing() -> None:
    driver = MemoryDriver(budget_blocks=200)
    driver.read(256)  # as many as the first arrays hold
    summaries = Charge(driver.budget, driver.budget.free, "summaries")
    with pytest.raises(CapacityError, match="token table"):
        driver.ws.prepare(1)
    driver.check()
    assert driver.ws.n_pending == 0
    summaries.release()
    driver.ws.prepare(1)
