"""Several conversations, and a cancel, a copy that fails, an interrupt: what is left is right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chats import MANY, WHOLE, Chat, conversations_of, generate
from engines import Recorded, random_tokens, record

from kvmem.engine.calibration import Calibration, Found
from kvmem.engine.memory import TieredMemory
from kvmem.errors import DecodeError, HostCapacityError, TransferError


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
@pytest.mark.parametrize("stop_at", [1, 3, 9])
@pytest.mark.parametrize("stop_behind", [False, True])
def test_after_a_cancel_every_conversation_is_right(
    tiny: Callable[..., Path], kind: str, stop_at: int, stop_behind: bool
) -> None:
    def play(recorded: Recorded, *, cancelled: bool) -> list[tuple[int, ...]]:
        session = recorded.session
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(session, random_tokens(200, 3))
        other.ask(session, random_tokens(200, 4))
        if cancelled:
            recorded.context.stop_at, recorded.context.stop_behind = stop_at, stop_behind
            broken = Chat(one.system, messages=list(one.messages))
            reply = broken.ask(session, random_tokens(400, 5))
            assert reply.done.reason == "cancelled"
            conversations_of(session).check()
        return [chat.ask(session, random_tokens(30, 6)).tokens for chat in (other, one, other)]

    with record(tiny(kind), **WHOLE) as recorded:
        expected = play(recorded, cancelled=False)
    with record(tiny(kind), **WHOLE) as recorded:
        assert play(recorded, cancelled=True) == expected


def test_a_switch_that_fails_loses_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working set's own tests let every copy fail; here the conversations are told."""
    with record(tiny_llama, **WHOLE) as recorded:
        session = recorded.session
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        first = one.ask(session, random_tokens(50, 3))
        other.ask(session, random_tokens(50, 4))

        def fail(*_: object) -> None:
            raise TransferError("by the test")

        with monkeypatch.context() as patch:
            patch.setattr("kvmem.engine.switching._switch_blocks", fail)
            with pytest.raises(TransferError):
                one.ask(session, random_tokens(20, 5))
        conversations_of(session).check()
        assert len(conversations_of(session)) == 2
        one.messages.pop()
        reply = one.ask(session, random_tokens(20, 5))
        assert reply.stats.memory.conversation_use == "switched"
        assert reply.stats.cached_tokens >= 200
        one.messages[1:] = []
        assert generate(session, one.prompt()).tokens == first.tokens


def test_a_request_that_failed_is_not_in_the_report_of_the_next(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35, **WHOLE) as recorded:
        session, memory = recorded.session, recorded.memory
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(session, random_tokens(50, 3))
        n_tokens = session.n_tokens

        def fail() -> None:
            memory.note("of the one that failed")
            memory.store_s = memory.checkpoint_s = 1e6
            raise DecodeError("by the test")

        recorded.context.on_decode = fail
        with pytest.raises(DecodeError):
            other.ask(session, random_tokens(50, 4))
        recorded.context.on_decode = None
        told = conversations_of(session).infos
        assert [info.n_tokens for info in told if not info.is_on_device] == [n_tokens]
        reply = one.ask(session, random_tokens(20, 5)).stats.memory
        assert reply.notes == []
        assert max(reply.times.store_s, reply.times.checkpoint_s) < 1000


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_switch_that_fails_behind_the_blocks_leaves_no_state_of_another(
    tiny: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of one are on the device, the recurrent state is still that of the other."""

    def play(recorded: Recorded, *, fails: bool) -> tuple[int, ...]:
        session = recorded.session
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(session, random_tokens(50, 3))
        other.ask(session, random_tokens(50, 4))
        if fails:

            def fail() -> None:
                raise TransferError("by the test")

            with monkeypatch.context() as patch, pytest.raises(TransferError):
                patch.setattr(recorded.memory, "restore_order", fail)
                one.ask(session, random_tokens(20, 5))
            conversations_of(session).check()
            one.messages.pop()
        return one.ask(session, random_tokens(20, 5), max_tokens=40).tokens

    settings = {**WHOLE, "ordered": True}
    with record(tiny(kind), **settings) as recorded:
        expected = play(recorded, fails=False)
    with record(tiny(kind), **settings) as recorded:
        assert play(recorded, fails=True) == expected


def interrupt_a_switch(recorded: Recorded, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are on the device, the other one still counts as active; the repair is interrupted
    as well.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TieredMemory, "make_active", stop)
        chat.ask(recorded.session, random_tokens(20, 5))
    chat.messages.pop()


def test_other_pairs_after_an_interrupted_switch(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Calibration(fingerprint="", type_k="f32", type_v="f32", pairs=((1, 0),), slice_tokens=8)

    def play(recorded: Recorded, *, interrupted: bool) -> list[Any]:
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(recorded.session, random_tokens(300, 3))
        other.ask(recorded.session, random_tokens(400, 4))
        if interrupted:
            interrupt_a_switch(recorded, one, monkeypatch)
        recorded.engine.use_calibration(Found(pairs, "by the test"))
        conversations_of(recorded.session).check()
        replies = [chat.ask(recorded.session, random_tokens(60, 6)) for chat in (other, one)]
        return [(reply.tokens, reply.stats.memory.blocks) for reply in replies]

    with record(tiny_llama, **MANY) as recorded:
        expected = play(recorded, interrupted=False)
    with record(tiny_llama, **MANY) as recorded:
        assert play(recorded, interrupted=True) == expected


@pytest.mark.parametrize("share", [0.66, 0.72])
def test_a_conversation_whose_summaries_cannot_be_renewed_leaves(
    share: float, tiny_llama: Path
) -> None:
    """Old and new ones stand beside each other for a moment: later requests do not pay for it."""

    def found(pairs: tuple[tuple[int, int], ...], slice_tokens: int) -> Found:
        made = Calibration(
            fingerprint="", type_k="q8_0", type_v="q8_0", pairs=pairs, slice_tokens=slice_tokens
        )
        return Found(made, "by the test")

    few, many = found(((0, 0),), 32), found(((0, 0), (0, 1), (1, 0), (1, 1)), 1)
    settings = {"conversations": 2, "workspace_tokens": 8192, "type_k": "q8_0", "type_v": "q8_0"}
    with record(tiny_llama, **settings, host_limit_bytes=64 << 20) as recorded:
        recorded.engine.use_calibration(few)
        Chat(random_tokens(30, 1)).ask(recorded.session, random_tokens(6000, 4))
        used = recorded.memory.host.used
    with record(tiny_llama, **settings, host_limit_bytes=int(share * used)) as recorded:
        session = recorded.session
        long, short = Chat(random_tokens(30, 1)), Chat(random_tokens(30, 2))
        recorded.engine.use_calibration(few)
        long.ask(session, random_tokens(6000, 4))
        short.ask(session, random_tokens(40, 5))
        recorded.engine.use_calibration(many)
        for chat in (long, short, Chat(random_tokens(20, 3))):
            try:
                chat.ask(session, random_tokens(20, 6))
            except HostCapacityError:
                chat.messages.pop()
                assert chat is long  # it is too long for this host with these summaries
            conversations_of(session).check()
            assert recorded.memory.summaries.pairs == recorded.memory.scoring.pairs


def test_what_a_repair_has_to_say_is_in_the_report_of_the_request_that_needs_it(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(tiny_qwen35, **WHOLE) as recorded:
        memory = recorded.memory
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(recorded.session, random_tokens(50, 3))
        other.ask(recorded.session, random_tokens(50, 4))
        interrupt_a_switch(recorded, one, monkeypatch)
        go_back = memory.go_back

        def tell(n_tokens: int) -> None:
            memory.note(f"back to {n_tokens}")
            go_back(n_tokens)

        monkeypatch.setattr(memory, "go_back", tell)
        reply = one.ask(recorded.session, random_tokens(20, 5))
        assert any(note.startswith("back to ") for note in reply.stats.memory.notes)
        conversations_of(recorded.session).check()


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_logits_that_are_interrupted_in_their_repair_too_keep_nothing(
    kind: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(tiny(kind)) as recorded:
        session, memory = recorded.session, recorded.memory
        session.read(random_tokens(40, 1))
        expected = session.logits(random_tokens(200, 2), 1)
        settle = memory.settle
        recorded.calls.clear()

        def stop_once() -> None:
            monkeypatch.setattr(memory, "settle", settle)
            raise KeyboardInterrupt

        def stop() -> None:
            if recorded.calls:  # in front of the second batch
                monkeypatch.setattr(memory, "settle", stop_once)
                raise KeyboardInterrupt

        recorded.context.on_decode = stop
        with pytest.raises(KeyboardInterrupt):
            session.logits(random_tokens(200, 2), 1)
        recorded.context.on_decode = None
        assert session.n_tokens == 40
        memory.check()
        assert (session.logits(random_tokens(200, 2), 1) == expected).all()
