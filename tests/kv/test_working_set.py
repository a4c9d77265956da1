"""The working set's promises, one story each. Random ones are in tests/model_based."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from memory_driver import RECORD_BYTES, ROW_BYTES, MemoryDriver

from kvmem.errors import CapacityError, ConfigError, StateError, TransferError
from kvmem.kv.budget import Charge, HostBudget
from kvmem.kv.port import ArrayPort
from kvmem.kv.working_set import WorkingSet


def test_room_counts_by_region() -> None:
    driver = MemoryDriver(budget_blocks=3, reserve_blocks=2, slack_blocks=1, ordered=True)
    ws = driver.ws
    assert (ws.room(), ws.room(reply=True)) == (12, 20)
    driver.decode(6)
    assert (ws.room(), ws.room(reply=True)) == (6, 14)
    driver.decode(6)
    assert (ws.room(), ws.room(reply=True)) == (0, 8)
    with pytest.raises(CapacityError, match="0 blocks of 4 are free for prefill"):
        ws.prepare(1)
    driver.decode(6, reply=True)
    assert (ws.room(), ws.room(reply=True)) == (2, 2), "the open block, wherever it is"
    with pytest.raises(CapacityError, match="3 tokens"):
        ws.prepare(3, reply=True)
    driver.check()


def test_rejected_tokens_leave_nothing_behind() -> None:
    driver = MemoryDriver(budget_blocks=2, reserve_blocks=1)
    driver.decode(3)
    cells = driver.decode(9, n_accepted=2, reply=True)
    assert cells == list(range(3, 12))
    assert driver.port.visible().tolist() == list(range(5))
    assert driver.ws.resident().tolist() == [0, 1]
    assert driver.ws.room(reply=True) == 7
    assert driver.ws.n_tokens == 5
    assert driver.ws.n_cells_used == 5
    assert driver.ws.highest_used_cell == 4
    driver.check()


def test_rollback_and_commit_belong_to_prepare() -> None:
    driver = MemoryDriver()
    driver.decode(3)
    none = np.zeros(0, dtype=np.int32), np.zeros((0, 4), dtype=np.int32)
    with pytest.raises(StateError, match="without prepare"):
        driver.ws.commit(*none)
    with pytest.raises(StateError, match="without prepare"):
        driver.ws.rollback()
    cells = driver.ws.prepare(4)
    assert cells.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        cells[0] = 1
    calls: list[Callable[[], object]] = [
        lambda: driver.ws.prepare(1),
        driver.ws.room,
        driver.ws.seal,
        lambda: driver.ws.evict([0]),
        lambda: driver.ws.apply([0]),
        lambda: driver.ws.make_room(1, reply_from_block=0),
        lambda: driver.ws.truncate(1),
        lambda: driver.ws.read(0),
    ]
    for call in calls:
        with pytest.raises(StateError, match="4 tokens are prepared: commit or roll back"):
            call()
    tokens, pos = np.zeros(5, dtype=np.int32), np.zeros((5, 4), dtype=np.int32)
    with pytest.raises(ValueError, match="5 tokens, but 4 are prepared"):
        driver.ws.commit(tokens, pos)
    with pytest.raises(ValueError, match="pos has shape"):
        driver.ws.commit(tokens[:2], pos)
    driver.ws.rollback()
    driver.check()


def test_cells_that_the_device_refuses_leave_nothing_prepared() -> None:
    driver = MemoryDriver()
    driver.decode(3)
    driver.port.fail(1)
    with pytest.raises(TransferError, match="place of slot 0"):
        driver.ws.prepare(6)
    assert driver.ws.n_pending == 0
    assert driver.ws.room() == 9
    driver.check()
    driver.decode(6)
    driver.check()


def test_the_last_tokens_block_stays() -> None:
    driver = MemoryDriver()
    driver.decode(8)  # the last block is complete
    with pytest.raises(StateError, match="block 1 holds the last token"):
        driver.ws.evict([0, 1])
    with pytest.raises(StateError, match="block 1 holds the last token"):
        driver.ws.apply([0])
    with pytest.raises(StateError, match="must hold it"):
        driver.ws.apply([])
    assert driver.ws.resident().tolist() == [0, 1]
    driver.decode(1)
    assert driver.ws.evict([0, 1]) == 2
    assert driver.ws.evict([0, 1]) == 0, "not resident: passed over"
    driver.check()


def test_wrong_arguments_are_named() -> None:
    driver = MemoryDriver()
    driver.decode(9)
    ws = driver.ws
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ws.prepare(0), "n_tokens is 0"),
        (lambda: ws.read(3), r"block 3 is not in 0\.\.2"),
        (lambda: ws.slot_of(-1), "block -1"),
        (lambda: ws.has_copy(3), "block 3"),
        (lambda: ws.is_resident(3), "block 3"),
        (lambda: ws.evict([7]), "block 7"),
        (lambda: ws.evict([0.5]), "blocks must be"),  # type: ignore[list-item]
        (lambda: ws.apply([2, 2]), "ascending"),
        (lambda: ws.apply([1, 0, 2]), "ascending"),
        (lambda: ws.apply([0, 3]), "block 3"),
        (lambda: ws.truncate(10), r"must be 0\.\.9"),
        (lambda: ws.truncate(-1), r"must be 0\.\.9"),
        (lambda: ws.make_room(-1, reply_from_block=0), "n_tokens=-1"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(StateError, match="block 0 has no host copy"):
        ws.record_address(0)
    for n_tokens in (2**31 - 1, 10**6):
        with pytest.raises(CapacityError, match="do not fit"):
            ws.prepare(n_tokens, reply=True)
        with pytest.raises(CapacityError, match="can leave"):
            ws.make_room(n_tokens, reply_from_block=0)
    driver.check()


def test_a_selection_above_budget_and_reserve_is_refused() -> None:
    driver = MemoryDriver(budget_blocks=2, reserve_blocks=1)
    driver.read(17)
    before = driver.ws.resident().tolist()
    with pytest.raises(CapacityError, match="4 blocks are selected, but budget and reserve have 3"):
        driver.ws.apply([0, 1, 2, 4])
    assert driver.ws.resident().tolist() == before
    driver.ws.apply([0, 1, 4])
    driver.check()


def test_sizes_break_rules_by_name() -> None:
    port = ArrayPort(4, 4, ROW_BYTES)
    good: dict[str, int] = {"block_tokens": 4, "budget_blocks": 2, "reserve_blocks": 1}
    for setting, value in (
        ("block_tokens", 8),
        ("budget_blocks", 1),
        ("reserve_blocks", 0),
        ("slack_blocks", -1),
        ("slack_blocks", 2),
        ("budget_blocks", 4),
    ):
        with pytest.raises(ConfigError, match=setting):
            WorkingSet(port, budget=HostBudget(1), **(good | {setting: value}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="slack_blocks"):
        WorkingSet(port, budget=HostBudget(1), ordered=True, **good)


def test_sealing_waits_for_whole_blocks_and_happens_once() -> None:
    driver = MemoryDriver()
    driver.decode(10)
    for _ in range(2):
        driver.ws.seal()
        assert [driver.ws.has_copy(block) for block in range(3)] == [True, True, False]
        assert driver.ws.counters.blocks_sealed == 2
    assert driver.ws.counters.bytes_out == 2 * driver.ws.payload_bytes
    driver.decode(2)
    driver.ws.seal()
    assert driver.ws.has_copy(2)
    driver.ws.evict([0, 1])
    assert driver.ws.counters.blocks_sealed == 3, "leaving costs no second copy"
    driver.check()


def test_the_host_limit_ends_sealing_and_nothing_else() -> None:
    driver = MemoryDriver(n_records=2)
    driver.decode(12)
    summaries = Charge(driver.budget, driver.budget.free - 2 * RECORD_BYTES, "summaries")
    with pytest.raises(CapacityError, match="raise the host limit or shorten the history"):
        driver.ws.seal()
    assert not driver.ws.has_copy(0), "all or none"
    driver.ws.evict([0])
    driver.check()
    driver.decode(4)
    with pytest.raises(CapacityError):
        driver.ws.apply([3])  # would need two records, where one is left
    assert driver.ws.resident().tolist() == [1, 2, 3]
    driver.ws.apply([0, 2, 3])
    driver.check()
    assert driver.budget.free < RECORD_BYTES
    summaries.release()
    driver.ws.apply([3])


def test_make_room_takes_only_the_reply() -> None:
    driver = MemoryDriver(budget_blocks=2, reserve_blocks=3)
    driver.decode(8)
    driver.decode(12, reply=True)
    assert driver.ws.make_room(0, reply_from_block=2) == 0
    assert driver.ws.make_room(8, reply_from_block=2) == 2
    assert driver.ws.resident().tolist() == [0, 1, 4]
    with pytest.raises(CapacityError, match=r"only 0 blocks from block 4 on can leave"):
        driver.ws.make_room(12, reply_from_block=4)
    assert driver.ws.resident().tolist() == [0, 1, 4]
    driver.check()


def test_a_reply_longer_than_the_reserve_goes_on() -> None:
    driver = MemoryDriver(budget_blocks=2, reserve_blocks=2)
    driver.decode(8)
    for _ in range(100):
        driver.ws.make_room(1, reply_from_block=2)
        driver.decode(1, reply=True)
    assert driver.ws.resident().tolist()[:2] == [0, 1], "what was selected stays"
    assert driver.ws.n_blocks == 27
    driver.check()


def test_truncating_in_a_block_opens_it_and_voids_its_copy() -> None:
    driver = MemoryDriver()
    driver.decode(12)
    driver.ws.seal()
    driver.ws.truncate(6)
    driver.twin.cut(6)
    assert [driver.ws.has_copy(block) for block in range(2)] == [True, False]
    assert driver.ws.n_sealed == 1
    driver.check()
    driver.decode(2)  # other tokens than before
    driver.ws.seal()
    assert driver.ws.has_copy(1)
    assert driver.ws.counters.blocks_sealed == 3 + 1
    driver.decode(1)
    driver.ws.evict([0, 1])
    driver.ws.apply([0, 1, 2])
    driver.check()


def test_truncating_at_a_border_keeps_the_copy() -> None:
    driver = MemoryDriver()
    driver.read(20)
    driver.ws.seal()
    driver.ws.evict([2])
    driver.ws.truncate(12)
    driver.twin.cut(12)
    assert driver.ws.has_copy(2)
    assert driver.ws.is_resident(2), "it holds the last token"
    driver.check()


@pytest.mark.parametrize(("is_sealed", "n_sealed"), [(False, 1), (True, 0)])
def test_what_is_forgotten_next_makes_way(is_sealed: bool, n_sealed: int) -> None:
    driver = MemoryDriver(budget_blocks=2, reserve_blocks=2)
    driver.read(15)
    driver.ws.apply([0, 1, 3])
    driver.decode(5, reply=True)  # 3 is complete, 4 sits in the last slot
    assert len(driver.ws.resident()) == driver.ws.n_slots
    if is_sealed:
        driver.ws.seal()
    transfer = driver.ws.truncate(10)
    driver.twin.cut(10)
    assert (transfer.n_in, transfer.n_out) == (1, 1)
    assert transfer.bytes_out == n_sealed * driver.ws.payload_bytes
    assert driver.ws.resident().tolist() == [0, 1, 2], "3 made way, and went"
    driver.check()


@pytest.mark.parametrize(
    ("kept", "leaves"), [([1, 2, 3], 1), ([0, 1, 2], 1), ([0, 2, 3], 2), ([0, 3], 3)]
)
def test_else_the_oldest_makes_way_and_the_sink_last(kept: list[int], leaves: int) -> None:
    driver = MemoryDriver(budget_blocks=len(kept), reserve_blocks=1)
    driver.read(22)
    driver.ws.apply([*kept, 5])
    assert len(driver.ws.resident()) == driver.ws.n_slots
    transfer = driver.ws.truncate(18)
    driver.twin.cut(18)
    assert (transfer.n_in, transfer.n_out) == (1, 1)
    assert driver.ws.resident().tolist() == sorted({*kept, 4} - {leaves})
    driver.check()


def test_clear_gives_everything_back() -> None:
    driver = MemoryDriver(budget_blocks=2)
    driver.read(40)
    driver.ws.evict(driver.ws.resident().tolist()[:-1])
    table_bytes = driver.ws.host_bytes - 9 * RECORD_BYTES
    driver.ws.prepare(4)
    driver.ws.clear()
    driver.twin.cut(0)
    assert driver.ws.n_tokens == driver.ws.n_blocks == driver.ws.n_sealed == 0
    assert driver.ws.host_bytes <= table_bytes
    assert driver.port.slab_bytes == 0
    assert driver.port.visible().tolist() == []
    assert driver.ws.highest_used_cell == -1
    driver.read(13)
    driver.ws.seal()
    assert driver.ws.n_sealed == 3
    driver.check()


def test_nothing_is_left_of_a_working_set() -> None:
    driver = MemoryDriver()
    driver.read(30)
    port, budget = driver.port, driver.budget
    del driver
    assert budget.used == port.slab_bytes == 0


def test_ordered_applies_in_position_order() -> None:
    driver = MemoryDriver(budget_blocks=4, slack_blocks=1, ordered=True)
    driver.read(30)
    for selection in ([0, 3, 7], [1, 3, 5, 7], [0, 1, 5, 7], [7]):
        driver.ws.apply(selection)
        assert [driver.ws.slot_of(block) for block in selection] == list(range(len(selection)))
        driver.check()


def test_decode_steps_reuse_their_buffer() -> None:
    driver = MemoryDriver(block_tokens=16)
    first = driver.ws.prepare(1)
    driver.ws.rollback()
    second = driver.ws.prepare(1)
    assert np.shares_memory(first, second)


def test_provided_memory_is_what_the_next_seal_takes() -> None:
    driver = MemoryDriver(budget_blocks=4, n_records=16)  # two records a slab
    driver.decode(9)
    driver.ws.provide()
    provided = driver.port.slab_bytes
    assert provided == 2 * RECORD_BYTES
    driver.ws.seal()
    assert driver.ws.n_sealed == 2
    driver.ws.provide()
    assert driver.port.slab_bytes == provided, "the open block needs none"
    driver.ws.prepare(3)
    driver.ws.provide()
    assert driver.port.slab_bytes == 2 * provided, "the pending tokens complete a third"
    driver.ws.rollback()
    assert driver.ws.trim() == provided, "no record is in it"
    assert driver.ws.trim() == 0
    driver.check()


def test_what_cannot_be_provided_changes_nothing() -> None:
    driver = MemoryDriver(budget_blocks=4, n_records=16)
    driver.decode(9)
    others = Charge(driver.budget, driver.budget.limit - driver.budget.used)
    with pytest.raises(CapacityError, match="a block's host record"):
        driver.ws.provide()
    assert driver.port.slab_bytes == 0
    others.release()
    driver.ws.provide()
    driver.ws.seal()
    assert driver.ws.n_sealed == 2
    driver.check()
