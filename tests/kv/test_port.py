"""ArrayPort, as strict as the other tests need it to be."""

from __future__ import annotations

import numpy as np
import pytest
from memory_driver import MemoryDriver

from kvmem.errors import StateError, TransferError
from kvmem.kv.port import ArrayPort, DevicePort, HostMemory


def some(n: int, n_bytes: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.arange(n, dtype=np.int32)
    pos = np.arange(4 * n, dtype=np.int32).reshape(n, 4)
    return tokens, pos, np.arange(n * n_bytes, dtype=np.uint8).reshape(n, n_bytes)


def test_shape() -> None:
    port = ArrayPort(3, 4, (3, 5))
    assert isinstance(port, DevicePort)
    assert (port.n_slots, port.block_tokens, port.row_bytes) == (3, 4, (3, 5))
    assert port.payload_bytes == 4 * 8
    assert port.visible().tolist() == []
    assert port.meta(0) is None


@pytest.mark.parametrize(
    ("n_slots", "block_tokens", "row_bytes"),
    [(0, 4, (1,)), (1, 0, (1,)), (1, 1, ()), (1, 1, (0,)), (2**20, 2**12, (1,))],
)
def test_wrong_shapes_are_refused(
    n_slots: int, block_tokens: int, row_bytes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"slots|row_bytes"):
        ArrayPort(n_slots, block_tokens, row_bytes)


def test_decode_writes_the_cells_that_were_placed() -> None:
    driver = MemoryDriver()
    cells = driver.decode(6)
    assert driver.port.visible().tolist() == cells == [0, 1, 2, 3, 4, 5]
    assert [driver.port.rows(cell).tobytes() for cell in cells] == driver.twin.rows
    pos = driver.twin.pos[2]
    assert driver.port.meta(2) == (pos, driver.twin.tokens[2], pos[2], pos[1])


def test_decode_needs_cells_for_its_tokens() -> None:
    driver = MemoryDriver()
    with pytest.raises(StateError, match="1 tokens, but cells for 0"):
        driver.port.decode(*some(1))
    driver.ws.prepare(2)
    with pytest.raises(StateError, match="3 tokens, but cells for 2"):
        driver.port.decode(*some(3))
    with pytest.raises(ValueError, match="bytes"):
        driver.port.decode(*some(2, n_bytes=7))
    driver.port.decode(*some(2))
    with pytest.raises(StateError, match="cells for 0"):
        driver.port.decode(*some(1))


def test_forgotten_rows_are_overwritten() -> None:
    driver = MemoryDriver()
    driver.decode(2)
    driver.ws.clear()
    assert len({driver.port.rows(cell).tobytes() for cell in range(4)}) == 1


def test_a_copy_that_fails_leaves_half_of_the_bytes() -> None:
    driver = MemoryDriver()
    driver.decode(4)
    whole = driver.twin.block_bytes(0)
    driver.ws.seal()
    driver.decode(1)
    driver.ws.evict([0])
    slot_rows = [driver.port.rows(cell).tobytes() for cell in range(4)]
    driver.port.fail(1)
    with pytest.raises(TransferError, match="stage in of slot 0 failed"):
        driver.ws.apply([0, 1])
    assert [driver.port.rows(cell).tobytes() for cell in range(4)] == slot_rows, "cleared again"
    driver.ws.apply([0, 1])
    assert driver.ws.read(0) == whole


def test_fail_counts_from_now_on() -> None:
    driver = MemoryDriver()
    driver.decode(4)
    before = driver.port.n_operations
    driver.port.fail(2)
    driver.ws.read(0)
    with pytest.raises(TransferError):
        driver.ws.read(0)
    driver.ws.read(0)
    assert driver.port.n_operations == before + 3
    driver.port.fail(1)
    driver.port.fail(0)
    driver.ws.read(0)
    with pytest.raises(ValueError, match="n is -1"):
        driver.port.fail(-1)


def test_cells_that_do_not_exist_are_refused() -> None:
    port = ArrayPort(2, 4, (3, 5))
    for cell in (-1, 8):
        with pytest.raises(ValueError, match="not of this device"):
            port.rows(cell)
        with pytest.raises(ValueError, match="not of this device"):
            port.overwrite(cell, np.zeros(8, dtype=np.uint8))


def test_host_memory_is_writable_and_goes_back() -> None:
    port = ArrayPort(1, 4, [3])
    memory = np.asarray(memoryview(HostMemory(port, 5000)))
    assert len(memory) == port.slab_bytes == 5000
    memory[:] = 7
    part = memory[4000:]
    del memory
    assert part.tolist() == [7] * 1000
    assert port.slab_bytes == 5000, "a part holds all of it"
    del part
    assert port.slab_bytes == 0


def test_host_memory_that_is_not_there_is_an_error() -> None:
    port = ArrayPort(1, 4, [3])
    port.slab_limit_bytes = 4999
    with pytest.raises(MemoryError):
        HostMemory(port, 5000)
    assert port.slab_bytes == 0
