"""Checkpoints on their own: which are kept, what they cost, and what they bring back."""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ask, random_tokens, record
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from stock import stock_context

from kvmem.engine import checkpoint as module
from kvmem.engine import memory as memory_module
from kvmem.engine.checkpoint import MAX_CHECKPOINTS, Checkpoint, Checkpoints, DeviceCopy
from kvmem.kv.budget import Charge, HostBudget
from kvmem.kv.port import ArrayPort
from kvmem.llama.state import restore_state, save_state, state_bytes

STATE_BYTES = 1000


@dataclass(slots=True)
class Device:
    """Stands in for a context: its state is one byte, many times. kept: the copy beside it."""

    value: int = 0
    kept: int = 0


def fake_bytes(device: Device, *, on_device: bool = False) -> int:
    return 10 if on_device else STATE_BYTES


@pytest.fixture(autouse=True)
def fake_state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are of a Device, but for the tests that have a model."""
    if "tiny_qwen35" in request.fixturenames:
        return

    def save(device: Device, out: np.ndarray, *, on_device: bool = False) -> None:
        if on_device:
            device.kept = device.value
        else:
            out[:] = device.value

    def restore(
        device: Device, state: np.ndarray, n_tokens: int, *, on_device: bool = False
    ) -> None:
        assert on_device or (state == state[0]).all()
        device.value = device.kept if on_device else int(state[0])

    monkeypatch.setattr(module, "state_bytes", fake_bytes)
    monkeypatch.setattr(module, "save_state", save)
    monkeypatch.setattr(module, "restore_state", restore)


def make(limit_bytes: int = 1 << 20, **settings: int) -> tuple[Checkpoints, Device, HostBudget]:
    device, budget = Device(), HostBudget(limit_bytes)
    port = ArrayPort(n_slots=1, block_tokens=1, row_bytes=[1])
    return Checkpoints(device, budget, port, **settings), device, budget  # type: ignore[arg-type]


def make_two() -> tuple[Checkpoints, Checkpoints, DeviceCopy, Device]:
    """Two histories over one device, which keeps a copy."""
    device, budget = Device(), HostBudget(1 << 20)
    port = ArrayPort(n_slots=1, block_tokens=1, row_bytes=[1])
    context: Any = device
    copy = DeviceCopy(context)
    first, second = (Checkpoints(context, budget, port, device=copy) for _ in range(2))
    return first, second, copy, device


def reread(positions: list[int], change: int, end: int) -> int:
    """Tokens between the end and the checkpoint that a change at this place goes back to."""
    return end - max((p for p in positions if p <= change), default=0)


def test_memory_that_the_machine_does_not_have_is_no_checkpoint() -> None:
    checkpoints, _, budget = make()
    assert checkpoints.save(10)
    port = checkpoints._port  # noqa: SLF001
    assert isinstance(port, ArrayPort)
    port.slab_limit_bytes = port.slab_bytes
    held = budget.used
    assert checkpoints.save(20), "the older one makes room"
    assert checkpoints.positions == [20]
    assert budget.used == held == checkpoints.n_bytes
    checkpoints.clear()
    port.slab_limit_bytes = 1
    assert not checkpoints.save(30)
    assert budget.used == port.slab_bytes == 0


def test_a_state_that_is_held_outlives_its_engine(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35) as recorded:
        memory = recorded.engine.tiered
        memory.decode(np.array(random_tokens(40, 1), np.int32))
        memory.save_checkpoint()
        checkpoint = memory.checkpoints.nearest(40)
        assert checkpoint is not None
        state, port, host = checkpoint.state, memory.port, memory.host
        before = state.copy()
        del checkpoint
    np.testing.assert_array_equal(state, before)
    n_bytes, used = len(state), host.used
    assert sum(port.host_bytes()) == n_bytes
    del state
    assert sum(port.host_bytes()) == 0
    assert host.used == used - n_bytes


def test_a_state_comes_back_and_later_ones_are_forgotten() -> None:
    checkpoints, device, _ = make()
    for n_tokens in (10, 20, 30):
        device.value = n_tokens
        assert checkpoints.save(n_tokens)
    assert checkpoints.nearest(9) is None
    for n_tokens, expected in ((10, 10), (19, 10), (20, 20), (99, 30)):
        found = checkpoints.nearest(n_tokens)
        assert found is not None
        assert found.n_tokens == expected
    found = checkpoints.nearest(25)
    assert found is not None
    checkpoints.restore(found)
    assert device.value == 20
    assert checkpoints.positions == [10, 20]


@pytest.mark.parametrize("name", [None, "needed", "asked"])
def test_the_one_that_a_second_pass_or_the_next_question_begins_from_stays(
    name: str | None,
) -> None:
    """Close to the end and to the one before, it would be the first to go."""
    checkpoints, _, _ = make(limit=4)
    for n_tokens in (100, 800, 960, 970):
        checkpoints.save(n_tokens)
    if name is not None:
        setattr(checkpoints, name, 970)
    checkpoints.save(1050)
    assert checkpoints.positions == [100, 800, 960 if name is None else 970, 1050]


def test_the_same_point_is_saved_once() -> None:
    checkpoints, _, budget = make()
    assert checkpoints.save(10)
    assert checkpoints.save(10)
    assert (len(checkpoints), budget.used) == (1, STATE_BYTES)


def test_points_behind_the_newest_are_refused() -> None:
    checkpoints, _, _ = make()
    checkpoints.save(10)
    with pytest.raises(AssertionError, match="ascend"):
        checkpoints.save(9)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80), st.integers(3, 9))
def test_they_ascend_within_the_limit_and_keep_both_ends(steps: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "state_bytes", fake_bytes)
        patch.setattr(module, "save_state", lambda device, out: None)
        checkpoints, _, budget = make(limit=limit)
        for n_tokens in accumulate(steps):
            assert checkpoints.save(n_tokens)
            positions = checkpoints.positions
            assert positions == sorted(set(positions))
            assert len(positions) <= limit
            assert (positions[0], positions[-1]) == (steps[0], n_tokens)
            assert budget.used == checkpoints.n_bytes <= (limit + 1) * STATE_BYTES


def live_long(checkpoints: Checkpoints) -> tuple[list[int], float]:
    """400 turns, a million tokens. What a change of each turn's reply reads beside the reply, and
    the most that a change anywhere costs, in multiples of what lies behind it and is read anyway.
    """
    random = np.random.default_rng(1)
    points: list[int] = []
    beside = []
    worst = 0.0
    end = 0
    for _ in range(400):
        for step in (random.choice([50, 200, 1000, 8000]), random.choice([20, 100, 400])):
            end += int(step)
            checkpoints.save(end)
            points.append(end)
        kept = checkpoints.positions
        beside.append(reread(kept, points[-2], end) - (end - points[-2]))
        worst = max(worst, *(reread(kept, point, end) / (end - point) for point in points[:-1]))
    assert len(checkpoints) == MAX_CHECKPOINTS
    return beside, worst


def test_a_long_life_stays_cheap_to_change() -> None:
    """Agents change the last reply, or something further behind."""
    beside, worst = live_long(make()[0])
    assert np.mean(beside) < 20
    assert max(beside) <= 300
    assert worst < 20


def test_even_gaps_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last turns are close together."""

    def closest(checkpoints: Checkpoints) -> list[int]:
        positions = np.array(checkpoints.positions)
        return [1 + int((positions[2:] - positions[:-2]).argmin())]

    monkeypatch.setattr(Checkpoints, "_by_loss", closest)
    beside, worst = live_long(make()[0])
    assert np.mean(beside) > 50_000
    assert worst > 1000


def test_the_host_limit_is_never_passed_and_older_ones_go() -> None:
    checkpoints, _, budget = make(limit_bytes=3 * STATE_BYTES + 999)
    for n_tokens in range(100, 1100, 100):
        assert checkpoints.save(n_tokens)
        assert budget.used <= 3 * STATE_BYTES
    assert checkpoints.positions == [100, 900, 1000]


def test_what_does_not_fit_at_all_is_not_kept() -> None:
    checkpoints, device, budget = make(limit_bytes=STATE_BYTES - 1)
    device.value = 7
    assert not checkpoints.save(10)
    assert (len(checkpoints), budget.used, device.value) == (0, 0, 7)


def test_they_give_way_to_what_cannot_be_read_again() -> None:
    checkpoints, _, budget = make(limit_bytes=4 * STATE_BYTES)
    for n_tokens in (100, 900, 1000):
        checkpoints.save(n_tokens)
    records = Charge(budget, STATE_BYTES, "records")
    sizes = [len(checkpoints)]
    while checkpoints.give_way():
        sizes.append(len(checkpoints))
        assert budget.used == STATE_BYTES + checkpoints.n_bytes
    assert sizes == [3, 2, 1, 0]
    assert budget.used == records.n_bytes


def test_what_another_history_holds_too_does_not_give_way() -> None:
    """It would give nothing back: what goes is the least missed of one's own."""
    checkpoints, _, budget = make()
    for n_tokens in (100, 800, 960):
        checkpoints.save(n_tokens)
    other = checkpoints.branch(960)
    for n_tokens in (1000, 1100):
        checkpoints.save(n_tokens)
    assert budget.used == 5 * STATE_BYTES
    assert checkpoints.give_way(least=1)
    assert (checkpoints.positions, budget.used) == ([100, 800, 960, 1100], 4 * STATE_BYTES)
    assert not checkpoints.give_way(least=1), "the newest is what a parked history ends with"
    assert checkpoints.give_way()
    assert not checkpoints.give_way()
    assert (checkpoints.positions, other.positions) == ([100, 800, 960], [100, 800, 960])
    assert budget.used == 3 * STATE_BYTES
    other.drop_after(100)
    assert checkpoints.give_way()
    assert (checkpoints.positions, budget.used) == ([100, 960], 2 * STATE_BYTES)


def test_a_save_where_only_shared_ones_are_left_drops_none() -> None:
    checkpoints, _, _ = make(limit_bytes=2 * STATE_BYTES)
    for n_tokens in (100, 800):
        checkpoints.save(n_tokens)
    other = checkpoints.branch(800)
    assert not checkpoints.save(900)
    assert checkpoints.positions == other.positions == [100, 800]


def test_those_of_a_history_that_is_lost_are_given_back() -> None:
    checkpoints, _, budget = make()
    checkpoints.save(100)
    other = checkpoints.branch(100)
    other.save(200)
    del other
    assert (budget.used, checkpoints.give_way(), budget.used) == (STATE_BYTES, True, 0)


def test_buffers_are_used_again_and_given_back() -> None:
    checkpoints, _, budget = make()
    for n_tokens in (10, 20, 30):
        checkpoints.save(n_tokens)
    checkpoints.drop_after(10)
    assert (checkpoints.positions, budget.used) == ([10], 3 * STATE_BYTES)
    checkpoints.save(11)
    assert budget.used == 3 * STATE_BYTES
    checkpoints.clear()
    assert (len(checkpoints), checkpoints.n_bytes, budget.used) == (0, 0, 0)


def test_a_save_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _, budget = make()

    def fail(device: Device, out: np.ndarray) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(module, "save_state", fail)
    with pytest.raises(RuntimeError, match="no"):
        checkpoints.save(10)
    assert len(checkpoints) == 0
    assert budget.used == checkpoints.n_bytes == STATE_BYTES
    checkpoints.clear()
    assert budget.used == 0


def newest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.nearest(checkpoints.positions[-1])
    assert found is not None
    return found


def test_the_copy_on_the_device_is_of_one_among_all_histories() -> None:
    """It is put back while it is this one's. Once another is written over it, the host has both."""
    first, second, copy, device = make_two()
    device.value = 1
    assert first.save(10, is_needed=True)
    held = newest(first)
    device.kept = 7  # what is on the device from here on is not what the host has
    first.branch(10).restore(held)
    assert device.value == 7
    device.value = 2
    assert second.save(20, is_needed=True)
    assert copy.holds(newest(second)) and not copy.holds(held)
    device.kept = 8
    first.restore(held)
    assert device.value == 1
    second.restore(newest(second))
    assert device.value == 8


def test_what_is_saved_already_is_copied_where_it_is_needed() -> None:
    first, second, copy, device = make_two()
    device.value = 3
    assert first.save(10)
    assert second.save(5, is_needed=True)
    assert not copy.holds(newest(first))
    assert first.save(10, is_needed=True)
    assert copy.holds(newest(first))
    device.kept = 7
    assert first.save(10, is_needed=True)
    assert device.kept == 7, "it is there"


def test_a_state_that_the_host_does_not_hold_is_not_copied() -> None:
    first, second, copy, _ = make_two()
    assert second.save(5, is_needed=True)
    first._budget.set_limit(first._budget.used)  # noqa: SLF001
    assert not first.save(10, is_needed=True)
    assert copy.holds(newest(second))


def test_a_copy_that_failed_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may hold half of it: the states come back from the host."""
    first, second, copy, device = make_two()
    device.value = 1
    assert first.save(10, is_needed=True)

    def save(device: Device, out: np.ndarray, *, on_device: bool = False) -> None:
        if on_device:
            device.kept = 99
            raise RuntimeError("no")
        out[:] = device.value

    device.value = 2
    monkeypatch.setattr(module, "save_state", save)
    with pytest.raises(RuntimeError, match="no"):
        second.save(20, is_needed=True)
    assert not copy.holds(newest(first)) and not copy.holds(newest(second))
    for one, value in ((first, 1), (second, 2)):
        one.restore(newest(one))
        assert device.value == value


def test_a_real_state_goes_back_to_the_same_logits(tiny_qwen35: Path) -> None:
    tokens = random_tokens(200, seed=1)
    with record(tiny_qwen35, budget_tokens=1024) as recorded:
        session, memory = recorded.session, recorded.memory
        session.read(tokens[:128])
        memory.save_checkpoint()
        assert memory.host.used >= memory.checkpoints.n_bytes == state_bytes(memory.context)
        before = session.logits(tokens[128:], 3)
        session.read(random_tokens(60, seed=2))
        session.truncate(128)
        assert session.n_tokens == 128
        memory.check()
        np.testing.assert_array_equal(session.logits(tokens[128:], 3), before)


@pytest.mark.parametrize("gap", [256, 10**9])
def test_a_change_in_the_middle_of_a_long_message_reads_on_from_a_gap_before(
    gap: int, tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mark stands in it. Without the points on the way all of it is read again."""
    monkeypatch.setattr(memory_module, "CHECKPOINT_GAP_TOKENS", gap)
    prompt = random_tokens(1500)
    with record(tiny_qwen35, budget_tokens=2048) as recorded:
        ask(recorded.session, prompt, span=(0, 1490))
        changed = (*prompt[:700], *random_tokens(800, seed=1))
        reply = ask(recorded.session, changed, span=(0, 1490))
        n_cached = reply.stats.cached_tokens
        assert n_cached == 0 if gap > len(prompt) else 700 - gap <= n_cached <= 700
        recorded.memory.check()


def test_a_message_of_9000_tokens_has_a_point_inside(tiny_qwen35: Path) -> None:
    """The other points stand where the second pass begins, half a budget before the end."""
    with record(tiny_qwen35, workspace_tokens=12288) as recorded:
        reply = ask(recorded.session, random_tokens(9000), span=(0, 8990), max_tokens=1)
        points = reply.stats.memory.checkpoints
        gap, chunk = memory_module.CHECKPOINT_GAP_TOKENS, recorded.memory.chunk_tokens
        assert gap <= points[0] < gap + chunk, points


def test_a_state_that_stays_on_its_device_brings_back_the_same(tiny_qwen35: Path) -> None:
    tokens = np.array(random_tokens(150, seed=1), np.int32)
    pos = np.arange(150, dtype=np.int32)
    with stock_context(tiny_qwen35) as context:

        def read(start: int, stop: int) -> NDArray[np.float32]:
            context.decode(tokens[start:stop], pos[start:stop])
            return context.logits()

        read(0, 100)
        states = {}
        for on_device in (False, True):
            states[on_device] = np.empty(state_bytes(context, on_device=on_device), np.uint8)
            save_state(context, states[on_device], on_device=on_device)
        assert len(states[True]) < len(states[False]) // 8
        expected = read(100, 150)
        for on_device, state in states.items():
            restore_state(context, state, 100, on_device=on_device)
            assert context.seq_rm(0, 100, -1)
            np.testing.assert_array_equal(read(100, 150), expected)
