"""A copy fails at every point in turn; what is left is always sound and can be finished."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_driver import MemoryDriver

from kvmem.errors import TransferError


def story(*, ordered: bool = False) -> MemoryDriver:
    """2 to 7 are resident, 7 is open; only 0 and 1 have a copy.

    slot   0  1  2  3 | 4  5  .  .
    block  4  5  2  3 | 6  7
    """
    driver = MemoryDriver(
        budget_blocks=4, reserve_blocks=4, slack_blocks=int(ordered), ordered=ordered
    )
    driver.read(16)
    driver.ws.evict([0, 1])
    driver.read(8)
    driver.decode(4 + 2, reply=True)
    assert [driver.ws.slot_of(block) for block in range(8)] == [-1, -1, 2, 3, 0, 1, 4, 5]
    return driver


def full_story() -> MemoryDriver:
    """As before, but 7 and 8 are complete, and block 9 sits in the last slot."""
    driver = story()
    driver.decode(2 + 4 + 1, reply=True)
    assert len(driver.ws.resident()) == driver.ws.n_slots
    return driver


def count_failures(make: Callable[[], MemoryDriver], call: Callable[[MemoryDriver], object]) -> int:
    """Let the first, second, ... operation of the call fail; returns how many there are."""
    n = 0
    while True:
        driver = make()
        copies = {block for block in range(driver.ws.n_blocks) if driver.ws.has_copy(block)}
        driver.port.fail(n + 1)
        try:
            call(driver)
        except TransferError:
            n += 1
        else:
            return n
        finally:
            driver.port.fail(0)
        driver.check()  # no token is lost: each block is resident and right, or its copy is
        assert driver.ws.is_resident(driver.ws.n_blocks - 1)
        assert copies <= {block for block in range(driver.ws.n_blocks) if driver.ws.has_copy(block)}
        call(driver)
        driver.ws.check()


@pytest.mark.parametrize(("ordered", "n_moved"), [(False, 2), (True, 3)])
def test_apply(ordered: bool, n_moved: int) -> None:
    selection = [0, 4, 6, 7]

    def call(driver: MemoryDriver) -> object:
        return driver.ws.apply(selection)

    # three blocks go out, a move is a copy and a publish, and so is what comes in
    assert count_failures(lambda: story(ordered=ordered), call) == 3 + 2 * n_moved + 2

    driver = story(ordered=ordered)
    before = driver.ws.counters
    transfer = driver.ws.apply(selection)
    driver.check()
    n_bytes = driver.ws.payload_bytes
    assert transfer[:6] == (1, 3, 3, n_moved, n_bytes, 3 * n_bytes)
    assert transfer.seconds > 0
    slots = [driver.ws.slot_of(block) for block in selection]
    assert slots == ([0, 1, 2, 3] if ordered else [1, 0, 3, 2])
    after = driver.ws.counters
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (
        n_bytes, 3 * n_bytes, 1, 3, 3, n_moved, 3,
    )  # fmt: skip


def test_seal() -> None:
    assert count_failures(story, lambda driver: driver.ws.seal()) == 5
    driver = story()
    assert driver.ws.n_sealed == 2, "evict() had sealed the first two"
    for _ in range(2):
        driver.ws.seal()
        assert [driver.ws.has_copy(block) for block in range(8)] == [True] * 7 + [False]
        assert driver.ws.counters.blocks_sealed == driver.ws.n_sealed == 7


def test_evict() -> None:
    assert count_failures(story, lambda driver: driver.ws.evict([0, 2, 5])) == 2


def test_make_room() -> None:
    def call(driver: MemoryDriver) -> object:
        return driver.ws.make_room(4 * 4, reply_from_block=4)

    assert count_failures(story, call) == 2
    driver = story()
    assert call(driver) == 2
    assert driver.ws.resident().tolist() == [2, 3, 6, 7], "the oldest of the reply left"


def test_truncate() -> None:
    def call(driver: MemoryDriver) -> object:
        return driver.ws.truncate(2)

    assert count_failures(story, call) == 2, "in, and publish"
    assert count_failures(full_story, call) == 3, "one goes out first"
    driver = full_story()
    transfer = driver.ws.truncate(2)
    assert transfer[:3] == (1, 1, 0)
    driver.twin.cut(2)
    driver.check()


def test_a_failed_truncate_forgets_nothing() -> None:
    driver = full_story()
    n_tokens = driver.ws.n_tokens
    driver.port.fail(2)
    with pytest.raises(TransferError):
        driver.ws.truncate(2)
    assert driver.ws.n_tokens == n_tokens
    assert driver.ws.resident().tolist() == [3, 4, 5, 6, 7, 8, 9]
    driver.check()
    driver.decode(1, reply=True)
    driver.check()
