"""Several conversations on one device: whose history a reply sees, what is kept, what it costs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chats import MANY, OPEN, WHOLE, Chat, conversations_of, generate
from engines import Recorded, Reply, make_config, random_tokens, record

from kvmem.engine.calibration import Calibration
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt
from kvmem.engine.session import Session
from kvmem.errors import ConfigError

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


def test_one_that_begins_like_none_is_new(tiny_llama: Path) -> None:
    """Also where it takes the place of one that is empty, or so short that anything goes on it."""
    with record(tiny_llama, **WHOLE) as recorded:
        session = recorded.session
        chat, other = Chat(random_tokens(99, 1)), Chat(random_tokens(99, 2))
        short = Prompt(tokens=(60, 61, 62), conversation_id="theirs")
        stats = [
            chat.ask(session, random_tokens(60, 3)).stats,
            generate(session, short).stats,
            other.ask(session, random_tokens(60, 4)).stats,
            generate(session, Prompt(tokens=(70, 71, 72))).stats,
            generate(session, Prompt(tokens=(70, 71, 72, 73))).stats,
            chat.ask(session, random_tokens(20, 5)).stats,
        ]
        found = [(one.memory.conversation_use, one.memory.conversation) for one in stats]
        assert found == [
            ("new", 1), ("new", 2), ("new", 3), ("new", 4), ("same", 4), ("switched", 1),
        ]  # fmt: skip
        assert [one.cached_tokens for one in stats[:4]] == [0] * 4
        assert [one.memory.n_conversations for one in stats] == [1, 2, 2, 3, 3, 3]
        assert {info.client_id for info in conversations_of(session).infos} == {None}
        conversations_of(session).check()


def test_a_single_history_that_is_left_is_new(tiny_llama: Path) -> None:
    with record(tiny_llama, **{**WHOLE, "conversations": 1}) as recorded:
        found = [
            generate(recorded.session, Prompt(tokens=tokens)).stats.memory
            for tokens in ((60,) * 40, (60,) * 50, (70,) * 40)
        ]
        assert [(one.conversation_use, one.conversation) for one in found] == [
            ("new", 1), ("same", 1), ("new", 2),
        ]  # fmt: skip


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


def test_settings_that_contradict_each_other_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="conversations is 0"):
        make_config(tiny_llama, conversations=0)
    with pytest.raises(ConfigError, match="conversations_bytes is 5, but must be given with"):
        make_config(tiny_llama, conversations_bytes=5)
    with pytest.raises(ConfigError, match="of which it is a part"):
        make_config(tiny_llama, conversations=2, conversations_bytes=1 << 40)
