"""Several conversations on one device: whose history a reply sees, what is kept, what it costs."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from chats import MANY, OPEN, WHOLE, Chat, conversations_of, generate
from engines import Recorded, Reply, make_config, random_tokens, record
from stock import require_tie

from kvmem.engine.calibration import Calibration
from kvmem.engine.conversation import Conversation
from kvmem.engine.conversations import PARKED_CHECKPOINTS
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.session import Session
from kvmem.engine.switching import branch
from kvmem.errors import (
    CapacityError,
    ConfigError,
    DecodeError,
    HostCapacityError,
    TransferError,
)

KINDS = ["llama", "qwen3", "qwen35", "qwen35moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_title_request_leaves_the_session_whole(tiny: Callable[..., Path], kind: str) -> None:
    """It begins with the same system prompt, and the session goes on as if it had not been."""
    system, story = random_tokens(150, 1), random_tokens(400, 2)
    with record(tiny(kind), **WHOLE) as recorded:
        session = recorded.session
        chat, title = Chat(system), Chat(system)
        chat.ask(session, story)
        n_tokens = session.n_tokens
        reply = title.ask(session, random_tokens(40, 3))
        assert reply.stats.memory.conversation_use == "branched"
        assert reply.stats.cached_tokens >= 150, "the system prompt is not read again"
        assert [info.n_tokens for info in conversations_of(session).infos][1:] == [n_tokens]
        again = chat.ask(session, random_tokens(30, 4))
        assert again.stats.memory.conversation_use == "switched"
        # what opens a reply is read again where a state cannot be rewound
        assert again.stats.cached_tokens >= n_tokens - 8 - len(OPEN)
        conversations_of(session).check()
    with record(tiny(kind), **WHOLE) as recorded:
        twin = Chat(system)
        twin.ask(recorded.session, story)
        assert twin.ask(recorded.session, random_tokens(30, 4)).tokens == again.tokens


@pytest.mark.parametrize(
    ("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 0), ("qwen35_mtp", 3)]
)
def test_a_small_window_comes_back_as_it_was(
    tiny: Callable[..., Path], kind: str, n_drafts: int
) -> None:
    """Far beyond the budget each conversation is that of its twin: same decisions, same window."""
    path = tiny(kind)
    settings = {**MANY, "n_drafts": n_drafts}
    turns = [random_tokens(90 + 40 * i, 50 + i) for i in range(6)]

    def play(sessions: list[Session]) -> list[list[Reply]]:
        chats = [Chat(random_tokens(120, i)) for i in range(3)]
        replies: list[list[Reply]] = [[], [], []]
        for turn in turns:
            for i, chat in enumerate(chats):
                text = tuple(np.roll(turn, i).tolist())
                replies[i].append(chat.ask(sessions[i], text))
        return replies

    with Engine(make_config(path, **settings)) as engine:
        session = engine.session()
        together = play([session] * 3)
        conversations_of(session).check()
        assert len(conversations_of(session)) == 3
    engines = [Engine(make_config(path, **settings)) for _ in range(3)]
    alone = play([engine.session() for engine in engines])
    for engine in engines:
        engine.close()
    for ours, theirs in zip(together, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.stats.memory.decision == other.stats.memory.decision
            assert one.stats.memory.blocks == other.stats.memory.blocks
            assert one.stats.cached_tokens == other.stats.cached_tokens
            assert one.tokens == other.tokens
    assert any(len(reply.stats.memory.blocks) < reply.stats.memory.n_blocks for reply in alone[0])


def test_a_common_beginning_is_stored_once_and_stays_in_its_slots(tiny_llama: Path) -> None:
    system = random_tokens(32 * 12, 1)
    with record(tiny_llama, **WHOLE) as recorded:
        session, memory = recorded.session, recorded.memory
        chats = [Chat(system) for _ in range(4)]
        for i, chat in enumerate(chats):
            chat.ask(session, random_tokens(40, 10 + i))
        infos = conversations_of(session).infos
        assert [info.n_shared for info in infos] == [12] * 4
        records = {
            a for one in conversations_of(session).parked for a in one.history.store.addresses()
        }
        records |= set(memory.working_set.history.store.addresses())
        assert memory.working_set.history.store.slabs.n_used == len(records) <= 12 + 4 * 3
        slots = [memory.working_set.slot_of(block) for block in range(12)]
        before = memory.working_set.counters
        reply = chats[0].ask(session, random_tokens(40, 20))
        moved = memory.working_set.counters.blocks_in - before.blocks_in
        assert reply.stats.memory.conversation_use == "switched"
        assert moved <= 3, "only what differs"
        assert [memory.working_set.slot_of(block) for block in range(12)] == slots
        summaries = {id(one.summaries) for one in conversations_of(session).parked}
        assert len(summaries) == 3
        conversations_of(session).check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_that_changes_its_last_message_stays_one_conversation(
    tiny: Callable[..., Path], kind: str
) -> None:
    """The reply comes back trimmed; the same prompt comes again; a reminder is replaced."""
    with record(tiny(kind), **WHOLE) as recorded:
        session = recorded.session
        chat = Chat(random_tokens(100, 1))
        chat.ask(session, random_tokens(200, 2))
        chat.messages[-1] = ("assistant", chat.messages[-1][1][:5])
        reply = chat.ask(session, random_tokens(50, 3))
        assert reply.stats.memory.conversation_use == "same"
        assert len(conversations_of(session)) == 1
        chat.messages.pop()
        again = generate(session, chat.prompt())
        assert again.stats.memory.conversation_use == "same"
        assert again.tokens == reply.tokens
        # the last message differs: nothing is cut short, and the old end is the first to leave
        chat.messages[-1] = ("user", random_tokens(50, 4))
        other = generate(session, chat.prompt())
        assert other.stats.memory.conversation_use == "branched"
        assert other.stats.cached_tokens >= 300
        superseded = [one.is_superseded for one in conversations_of(session).parked]
        assert superseded == [True]


def test_client_ids_keep_equal_beginnings_apart(tiny_llama: Path) -> None:
    with record(tiny_llama, **WHOLE) as recorded:
        session = recorded.session
        one, other = Chat(random_tokens(99, 1), "one"), Chat(random_tokens(99, 1), "other")
        one.ask(session, random_tokens(60, 2))
        reply = other.ask(session, random_tokens(60, 2))
        assert reply.stats.memory.conversation_use == "branched"
        assert reply.tokens == one.messages[-1][1]
        for i, chat in enumerate((one, other, one)):
            reply = chat.ask(session, random_tokens(20, 3 + i))
            assert reply.stats.memory.conversation_use == "switched"
        assert {info.client_id for info in conversations_of(session).infos} == {"one", "other"}


def test_the_least_recently_used_leaves(tiny_llama: Path) -> None:
    with record(tiny_llama, **{**WHOLE, "conversations": 3}) as recorded:
        session = recorded.session
        chats = [Chat(random_tokens(100, i)) for i in range(4)]
        for i in (0, 1, 2, 0, 3):  # 1 is the oldest when 3 comes
            chats[i].ask(session, random_tokens(40, 9))
        uses = [chats[i].ask(session, random_tokens(20, 8)).stats for i in (0, 2, 3, 1)]
        assert [stats.memory.conversation_use for stats in uses] == ["switched"] * 3 + ["new"]
        assert uses[-1].cached_tokens == 0
        assert conversations_of(session).n_evicted == 2
        conversations_of(session).check()


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_the_byte_limit_holds_at_every_moment(tiny: Callable[..., Path], kind: str) -> None:
    """Sampled before each decode call; what is alone may take all of the host limit."""
    limit = 3 << 20
    settings = {**WHOLE, "conversations_bytes": limit, "host_limit_bytes": 32 << 20}
    with record(tiny(kind), **settings) as recorded:
        session, memory = recorded.session, recorded.memory
        many = conversations_of(session)
        seen: list[tuple[int, int]] = []

        def sample() -> None:
            seen.append((len(many), memory.host.used))

        recorded.context.on_decode = sample
        chats = [Chat(random_tokens(150, i)) for i in range(8)]
        for i in np.random.default_rng(1).integers(0, 8, 30).tolist():
            chats[i].ask(session, random_tokens(60, 100 + i))
            many.check()
            if len(chats[i].messages) > 12:
                chats[i].messages.clear()
        assert max(n for n, _ in seen) > 1
        assert many.n_evicted > 0
        assert all(used <= limit for n, used in seen if n > 1)
        big = Chat(random_tokens(1900, 77))
        recorded.context.on_decode = None
        big.ask(session, random_tokens(50, 78), max_tokens=2)
        assert big.ask(session, random_tokens(5, 79), max_tokens=2).stats.cached_tokens > 1800


def test_checkpoints_leave_before_conversations(tiny_qwen35: Path) -> None:
    """Where room is short, those on the host keep a few, the last among them."""
    settings = {**WHOLE, "conversations_bytes": 6 << 20}
    with record(tiny_qwen35, **settings) as recorded:
        session, many = recorded.session, conversations_of(recorded.session)
        chats = [Chat(random_tokens(100, i)) for i in range(4)]
        for turn in range(4):
            for i, chat in enumerate(chats):
                chat.ask(session, random_tokens(30, 10 * turn + i))
                many.check()
        n_kept = [len(one.checkpoints) for one in many.parked]
        assert max(n_kept) > PARKED_CHECKPOINTS
        free = recorded.memory.host.free
        recorded.memory.host.charge(free, "others")
        assert many.n_evicted == 0
        while max(len(one.checkpoints) for one in many.parked) > PARKED_CHECKPOINTS:
            assert recorded.memory.make_room_on_host()
        assert many.n_evicted == 0
        assert recorded.memory.make_room_on_host()
        assert many.n_evicted == 1
        recorded.memory.host.release(free)
        many.check()
        reply = chats[2].ask(session, random_tokens(20, 99))
        assert reply.stats.memory.conversation_use == "switched"
        assert reply.stats.cached_tokens > 200


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


def test_a_conversation_leaves_with_a_state_or_not_at_all(tiny_qwen35: Path) -> None:
    """Its last checkpoint is what the host has left to give to its own open block."""
    with record(tiny_qwen35, **{**WHOLE, "host_limit_bytes": 16 << 20}) as recorded:
        session, memory = recorded.session, recorded.memory
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(session, random_tokens(50, 3))
        other.ask(session, random_tokens(50, 4))
        while len(memory.checkpoints) > 1:
            assert memory.checkpoints.give_way(least=1)
        filler = memory.working_set.new_history().store
        with pytest.raises(CapacityError):
            for block in range(1 << 20):
                filler.put(block, 0, np.zeros(filler.payload_bytes, np.uint8))
        memory.host.charge(memory.host.free, "others")
        seen = []

        def look() -> None:
            seen.append([(p.n_tokens, p.checkpoints.positions) for p in many.parked])

        many = conversations_of(session)
        recorded.context.on_decode = look
        reply = one.ask(session, random_tokens(20, 5))
        assert reply.stats.memory.conversation_use == "switched"
        assert all(positions[-1:] == [n] for n, positions in seen[0])


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_branch_of_one_beyond_the_limit_of_several_is_alone(
    tiny: Callable[..., Path], kind: str
) -> None:
    settings = {**WHOLE, "conversations_bytes": 2 << 20, "host_limit_bytes": 32 << 20}
    with record(tiny(kind), **settings) as recorded:
        session, memory = recorded.session, recorded.memory
        chat = Chat(random_tokens(100, 1))
        chat.ask(session, random_tokens(1700, 2), max_tokens=2)
        chat.ask(session, random_tokens(5, 3), max_tokens=2)
        assert memory.host.used > 2 << 20
        chat.messages[2:] = [("user", random_tokens(30, 4))]
        reply = generate(session, chat.prompt())
        assert reply.stats.memory.conversation_use == "branched"
        assert reply.stats.cached_tokens > 1700
        assert len(conversations_of(session)) == 1
        conversations_of(session).check()
        conversations_of(session).clear()
        n_kept = memory.working_set.history.table_bytes + memory.scratch.n_bytes
        assert memory.host.used == n_kept, "all else is given back"


def test_a_new_session_knows_nothing_of_the_last_one(tiny_llama: Path) -> None:
    with record(tiny_llama, **WHOLE) as recorded:
        Chat(random_tokens(99, 1), "theirs").ask(recorded.session, random_tokens(60, 2))
        session = recorded.engine.session()
        Chat(random_tokens(99, 3)).ask(session, random_tokens(60, 4))
        assert [info.client_id for info in conversations_of(session).infos] == [None]


def test_other_pairs_reach_a_conversation_when_it_comes_back(tiny_llama: Path) -> None:
    """Its summaries are made from its records; the reply is that of an engine that had them."""
    pairs = Calibration(fingerprint="", type_k="f32", type_v="f32", pairs=((1, 0),), slice_tokens=8)

    def play(recorded: Recorded, calibrate_at: int) -> list[tuple[int, ...]]:
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        replies = []
        for i, chat in enumerate((one, other, one, other)):
            if i == calibrate_at:
                recorded.memory.use_calibration(pairs)
            replies.append(chat.ask(recorded.session, random_tokens(300, 3 + i)).tokens)
            conversations_of(recorded.session).check()
            assert recorded.memory.summaries.slice_tokens == (8 if i >= calibrate_at else 4)
        return replies

    with record(tiny_llama, **MANY) as recorded:
        late = play(recorded, 2)
    with record(tiny_llama, **MANY) as recorded:
        assert play(recorded, 0)[2:] == late[2:]


@pytest.mark.parametrize("source", [0, 1])
def test_a_branch_for_which_there_is_no_room(
    tiny_llama: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered all the same: the one on the device leaves, or is cut back to the branch."""
    tries: list[int] = []

    def full(memory: TieredMemory, one: Conversation, n_tokens: int) -> Conversation:
        tries.append(n_tokens)
        if len(tries) == 1 and is_full:
            raise HostCapacityError("nothing is free")
        return branch(memory, one, n_tokens)

    def play() -> list[Reply]:
        chats = [Chat(random_tokens(150, number)) for number in range(2)]
        with record(tiny_llama, **WHOLE) as recorded:
            for number, chat in enumerate(chats):  # the second one is on the device then
                chat.ask(recorded.session, random_tokens(400, 10 + number))
            title = Chat(chats[source].system)
            replies = [title.ask(recorded.session, random_tokens(40, 20))]
            many = conversations_of(recorded.session)
            many.check()
            assert len(many) == 2 if is_full else 3
            return [*replies, *(chat.ask(recorded.session, (5, 6, 7)) for chat in chats)]

    monkeypatch.setattr("kvmem.engine.conversations.branch", full)
    is_full = False
    expected = play()
    tries.clear()
    is_full = True
    replies = play()
    assert tries[0] > 100 and (source or tries[1] == tries[0])
    assert any("could not be kept" in note for note in replies[0].stats.memory.notes)
    assert replies[0].stats.cached_tokens == expected[0].stats.cached_tokens > 100
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in expected]


def test_settings_that_contradict_each_other_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="conversations is 0"):
        make_config(tiny_llama, conversations=0)
    with pytest.raises(ConfigError, match="conversations_bytes is 5, but must be given with"):
        make_config(tiny_llama, conversations_bytes=5)
    with pytest.raises(ConfigError, match="of which it is a part"):
        make_config(tiny_llama, conversations=2, conversations_bytes=1 << 40)


@dataclass
class Player:
    """A client of the random trial: its turns are drawn, and depend on its own replies alone."""

    number: int
    chat: Chat
    random: np.random.Generator
    lock: threading.Lock = field(default_factory=threading.Lock)
    replies: list[tuple[int, ...]] = field(default_factory=list)

    def play(self, session: Session) -> Reply:
        n = int(self.random.integers(5, 60))
        text = tuple(self.random.integers(0, 256, n).tolist())
        if len(self.chat.messages) > 14:
            self.chat.messages.clear()  # a compaction: the system prompt alone stays
        elif self.chat.messages and self.random.random() < 0.2:
            del self.chat.messages[-2:]  # the last turn is asked anew
        reply = self.chat.ask(session, text, max_tokens=16)
        self.replies.append(reply.tokens)
        return reply


def players() -> list[Player]:
    """Six, of which 0, 1 and 2 have one system prompt."""
    return [
        Player(i, Chat(random_tokens(130, 7 if i < 3 else 100 + i)), np.random.default_rng(i))
        for i in range(6)
    ]


def random_trial(path: Path, n_requests: int, n_drafts: int = 0) -> None:
    """Case R05: each reply is that of the client alone, and what was read is what is said."""
    settings = {
        **WHOLE, "conversations": 4, "conversations_bytes": 3 << 20, "n_drafts": n_drafts
    }  # fmt: skip
    ours = players()
    order = iter(np.random.default_rng(5).integers(0, 6, n_requests).tolist())
    taking = threading.Lock()
    stats: list[tuple[int, int, int]] = []
    faults: list[BaseException] = []

    def work(session: Session) -> None:
        while True:
            with taking:
                picked = next(order, None)
                if picked is None or faults:
                    return
                ours[picked].lock.acquire()
            try:
                reply = ours[picked].play(session)
                told = reply.stats
                stats.append((told.prompt_tokens, told.cached_tokens, told.completion_tokens))
            except BaseException as fault:
                faults.append(fault)
                raise
            finally:
                ours[picked].lock.release()

    with record(path, **settings) as recorded, ThreadPoolExecutor(4) as pool:
        recorded.context.on_decode = lambda: None
        for result in [pool.submit(work, recorded.session) for _ in range(4)]:
            result.result()
        many = conversations_of(recorded.session)
        many.check()
        assert many.n_evicted > 0
        n_decoded = sum(len(call.tokens) for call in recorded.calls)
    assert len(stats) == n_requests
    n_told = sum(prompt - cached + reply - 1 for prompt, cached, reply in stats)
    assert n_decoded == n_told or (n_drafts and n_decoded > n_told), "drafts are decoded too"
    assert any(cached for _, cached, _ in stats) and any(not cached for _, cached, _ in stats)
    for player, twin in zip(ours, players(), strict=True):
        with Engine(make_config(path, **WHOLE)) as engine:
            session = engine.session()
            n_ties = 0
            for expected in player.replies:
                reply = twin.play(session).tokens
                if reply != expected:
                    twin.chat.messages.pop()
                    require_tie(path, tuple(twin.chat.prompt().tokens), reply, expected)
                    twin.chat.messages.append(("assistant", expected))
                    n_ties += 1
            assert n_ties <= 1 + len(player.replies) // 20, f"player {player.number}"


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_no_reply_contains_another_conversation(tiny: Callable[..., Path], kind: str) -> None:
    random_trial(tiny(kind), 40)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 3)])
def test_no_reply_of_two_hundred_contains_another(
    tiny: Callable[..., Path], kind: str, n_drafts: int
) -> None:
    random_trial(tiny(kind), 200, n_drafts)
