"""The comparisons of these tests can fail: each kind of damage is noticed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from memory_driver import MemoryDriver

from kvmem.errors import TransferError

HEADER_BYTES = 64
META_BYTES = 28


@pytest.fixture
def driver() -> MemoryDriver:
    """Eight blocks of which 0 to 5 are only on the host."""
    driver = MemoryDriver()
    driver.read(4 * 7 + 1)
    driver.ws.evict(driver.ws.resident().tolist()[:-1])
    return driver


def record(driver: MemoryDriver, block: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The payload of a host record, to be damaged."""
    address = driver.ws.record_address(block)
    return (ctypes.c_ubyte * driver.ws.payload_bytes).from_address(address)


def metas(driver: MemoryDriver, block: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The CellMeta of a record: they end at the payload's line of 64 bytes."""
    n_bytes = driver.ws.block_tokens * META_BYTES
    start = driver.ws.record_address(block) - -(-(HEADER_BYTES + n_bytes) // 64) * 64 + HEADER_BYTES
    return (ctypes.c_ubyte * n_bytes).from_address(start)


def test_shuffled_rows_are_noticed(driver: MemoryDriver) -> None:
    payload = record(driver, 2)
    payload[0:6] = [*payload[3:6], *payload[0:3]]  # two K rows
    with pytest.raises(AssertionError, match="block 2"):
        driver.check()
    driver.ws.apply([2, 7])
    with pytest.raises(AssertionError, match="block 2"):
        driver.check()


def test_swapped_payloads_are_noticed(driver: MemoryDriver) -> None:
    one, other = record(driver, 1), record(driver, 3)
    one[:], other[:] = list(other), list(one)
    with pytest.raises(AssertionError, match="block 1"):
        driver.check()


def test_a_flipped_bit_on_the_device_is_noticed(driver: MemoryDriver) -> None:
    driver.ws.apply([4, 7])
    cell = 4 * driver.ws.slot_of(4) + 3
    rows = driver.port.rows(cell)
    rows[-1] ^= 1
    driver.port.overwrite(cell, rows)
    with pytest.raises(AssertionError, match="block 4"):
        driver.check()


def test_a_record_of_other_tokens_is_a_miss(driver: MemoryDriver) -> None:
    one, other = metas(driver, 1), metas(driver, 3)
    tokens = np.frombuffer(bytes(one), dtype=np.int32).reshape(4, 7)[:, 4]
    assert tokens.tolist() == driver.twin.tokens[4:8]
    one[:] = list(other)
    with pytest.raises(AssertionError, match="record of block 1 holds other tokens"):
        driver.ws.check()
    for call in (lambda: driver.ws.apply([1, 7]), lambda: driver.ws.read(1)):
        with pytest.raises(TransferError, match="record of block 1 does not hold"):
            call()
    assert driver.ws.resident().tolist() == [7], "it never became visible"
    assert driver.ws.read(3) == driver.twin.block_bytes(3)
