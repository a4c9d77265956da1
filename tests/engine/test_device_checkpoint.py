"""With the state that a second pass begins from on the device as well: all is as without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from chats import Chat, conversations_of
from engines import Recorded, Reply, log_records, make_config, random_tokens, record
from interrupts import Interrupts

from kvmem.cli.plan import make_plan
from kvmem.engine import engine as engine_module
from kvmem.engine.checkpoint import Checkpoint, DeviceCopy
from kvmem.engine.draft import Worth
from kvmem.engine.engine import Engine
from kvmem.errors import CapacityError, DecodeError
from kvmem.llama import log
from kvmem.llama.context import Context, Share
from kvmem.llama.state import save_state, state_bytes

pytestmark = [
    pytest.mark.usefixtures("device"),
    # one that hits a generator while Python lets go of it is told, and raised nowhere
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SMALL: dict[str, Any] = {"conversations": 3, "type_k": "f32", "type_v": "f32"}
KINDS: dict[str, dict[str, Any]] = {"qwen35": {}, "qwen35_mtp": {"n_drafts": 3},
         "qwen3next_mtp": {"n_drafts": 3, "mtp_state": "replay"}}  # fmt: skip


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the histories whose state came back from the device. Each is, byte by byte, what
    the checkpoint has on the host.
    """
    found: list[int] = []
    plain = DeviceCopy.restore

    def restore(copy: DeviceCopy, checkpoint: Checkpoint) -> None:
        plain(copy, checkpoint)
        context = copy._context  # noqa: SLF001
        state = np.empty(state_bytes(context), np.uint8)
        save_state(context, state)
        np.testing.assert_array_equal(state, checkpoint.state[: len(state)])
        found.append(checkpoint.n_tokens)

    monkeypatch.setattr(DeviceCopy, "restore", restore)
    return found


def chats() -> list[Chat]:
    """Three, of which 0 and 1 have one system prompt."""
    return [Chat(random_tokens(70, 7 if i < 2 else 8)) for i in range(3)]


def told(reply: Reply) -> tuple[Any, ...]:
    memory = reply.stats.memory
    return (
        reply.tokens, reply.done.reason, memory.decision, reply.stats.cached_tokens,
        memory.blocks, memory.checkpoints, memory.checkpoint_bytes, memory.host_bytes,
    )  # fmt: skip


def talk(recorded: Recorded) -> Iterator[tuple[Any, ...]]:
    """One conversation: its last question is asked again, changed, and cancelled in either pass."""
    (chat, *_), session = chats(), recorded.session
    for i in range(6):
        yield told(chat.ask(session, random_tokens(150, i), max_tokens=9))
        recorded.memory.check()
        if i % 2:
            del chat.messages[-2:]
            yield told(chat.ask(session, random_tokens(140, 20 + i), max_tokens=9))
    for stop_at in (1, 2, 3, 4, 6):
        recorded.context.stop_at = stop_at
        yield told(chat.ask(session, random_tokens(120, 40 + stop_at)))
        recorded.context.stop_at = 0
        recorded.memory.check()
        del chat.messages[-2:]
        yield told(chat.ask(session, random_tokens(120, 40 + stop_at)))


@pytest.mark.parametrize("kind", KINDS)
def test_replies_and_reports_are_those_without_it(
    kind: str, put_back: list[int], tiny: Callable[..., Path]
) -> None:
    settings = SMALL | {"conversations": 1} | KINDS[kind]
    with record(tiny(kind), **settings) as recorded:
        expected = list(talk(recorded))
        assert put_back == []
    with record(tiny(kind), device_checkpoint=True, **settings) as recorded:
        assert list(talk(recorded)) == expected
    assert len(put_back) >= 5
    assert {one[2] for one in expected} >= {"query_replay"}


def any_turn(recorded: Recorded, ours: list[Chat], random: np.random.Generator) -> None:
    """Of any conversation: the next question, or the last one anew; cancelled, or a batch fails."""
    chat = ours[int(random.integers(3))]
    if chat.messages and random.random() < 0.3:
        del chat.messages[-2:]
    recorded.context.stop_at = int(random.choice([0, 0, 1, 2, 3, 5]))
    recorded.context.stop_behind = bool(random.random() < 0.5)
    left = int(random.choice([0, 0, 0, 1, 2, 4]))

    def fail() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise DecodeError("by the test")

    recorded.context.on_decode = fail
    n_messages = len(chat.messages)
    try:
        chat.ask(recorded.session, random_tokens(int(random.integers(20, 200)), n_messages))
    except DecodeError:
        del chat.messages[n_messages:]
    recorded.context.stop_at = 0
    if sum(len(text) for _, text in chat.messages) > 1500:
        chat.messages.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_the_state_that_comes_back_is_the_one_that_was_saved(
    kind: str, put_back: list[int], tiny: Callable[..., Path]
) -> None:
    """Switches, branches, cancels, failures, and a host limit at which checkpoints give way."""
    settings = {**SMALL, **KINDS[kind], "device_checkpoint": True, "host_limit_bytes": 3 << 20}
    random, ours = np.random.default_rng(3), chats()
    with record(tiny(kind), **settings) as recorded:
        for _ in range(60):
            any_turn(recorded, ours, random)
            conversations_of(recorded.session).check()
    assert len(put_back) >= 10


def test_after_an_interrupt_anywhere_no_state_is_wrong(
    put_back: list[int], tiny_qwen35: Path
) -> None:
    """And again in the repair. What comes back afterwards is still what was saved."""
    with record(tiny_qwen35, device_checkpoint=True, **SMALL) as recorded:
        session, random = recorded.session, np.random.default_rng(4)

        def story(first: int, second: int) -> Interrupts:
            conversations_of(session).clear()
            ours = chats()
            for i in (0, 2, 0):
                ours[i].ask(session, random_tokens(150, i))
            with Interrupts(first, second) as interrupts:
                try:
                    ours[0].ask(session, random_tokens(160, 5), max_tokens=3)
                except KeyboardInterrupt:
                    assert interrupts.n_raised
            for i in (0, 2):
                ours[i].ask(session, random_tokens(30, 9), max_tokens=3)
                conversations_of(session).check()
            recorded.calls.clear()
            return interrupts

        n_lines = story(0, 0).n_lines
        n_twice = 0
        for first in random.integers(1, n_lines, 25).tolist():
            n_twice += story(first, int(random.choice([0, 1, 5, 20, 40]))).n_raised > 1
        assert n_twice > 2
    assert len(put_back) > 25


@pytest.mark.parametrize("kind", KINDS)
def test_its_memory_is_taken_at_the_start_and_a_plan_counts_it(
    kind: str, tiny: Callable[..., Path]
) -> None:
    settings = {**SMALL, **KINDS[kind], "device_checkpoint": True}
    plan = make_plan(make_config(tiny(kind), **settings))
    with log_records("kvmem.llama") as records:

        def taken() -> list[str]:
            log.drain()
            said = [one.getMessage() for one in records]
            return [line for line in said if "llama_io_write_device: allocated" in line]

        with record(tiny(kind), **settings) as recorded:
            at_start = taken()
            context, chat = recorded.memory.context, chats()[0]
            for i in range(4):
                reply = chat.ask(recorded.session, random_tokens(150, i), max_tokens=9)
            assert reply.stats.memory.decision in ("query_replay", "unchanged_selection")
            n_copied = state_bytes(context) - state_bytes(context, on_device=True)
            assert taken() == at_start
    assert len(at_start) == (2 if devices.current().name == "part" else 1)
    planned = sum(device.checkpoint_bytes for device in plan.facts.devices)
    assert n_copied <= planned < n_copied + 4096
    without = make_plan(make_config(tiny(kind), **settings | {"device_checkpoint": False}))
    assert all(device.checkpoint_bytes == 0 for device in without.facts.devices)
    for with_it, device in zip(plan.facts.devices, without.facts.devices, strict=True):
        more = with_it.bytes_beside(1024) - device.bytes_beside(1024)
        assert more == with_it.checkpoint_bytes


def test_attention_alone_has_no_use_for_it(tiny_llama: Path) -> None:
    settings = {**SMALL, "device_checkpoint": True}
    plan = make_plan(make_config(tiny_llama, **settings))
    assert all(device.checkpoint_bytes == 0 for device in plan.facts.devices)
    with record(tiny_llama, **settings) as recorded:
        assert recorded.memory.device_copy is None


def test_a_device_without_room_for_it_is_named(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would end the process."""

    class Full(Context):
        def shares(self) -> list[Share]:
            return [Share("GPU0", (64 << 20) + 1000, 1 << 30, 0, 0, 4096, 0)]

    monkeypatch.setattr(engine_module, "Context", Full)
    with pytest.raises(CapacityError, match=r"^GPU0 has 64 MiB left beside .* for a checkpoint"):
        Engine(make_config(tiny_qwen35, device_checkpoint=True, **SMALL))
