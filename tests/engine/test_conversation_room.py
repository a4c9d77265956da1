"""Several conversations and one host limit: who leaves first, and what is never passed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chats import WHOLE, Chat, conversations_of, generate
from engines import Reply, random_tokens, record

from kvmem.engine.conversation import Conversation
from kvmem.engine.conversations import PARKED_CHECKPOINTS
from kvmem.engine.memory import TieredMemory
from kvmem.engine.room import with_room
from kvmem.engine.switching import branch
from kvmem.errors import CapacityError, HostCapacityError
from kvmem.kv.budget import Charge


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
        others = Charge(recorded.memory.host, recorded.memory.host.free, "others")
        assert many.n_evicted == 0
        while max(len(one.checkpoints) for one in many.parked) > PARKED_CHECKPOINTS:
            assert recorded.memory.make_room_on_host()
        assert many.n_evicted == 0
        assert recorded.memory.make_room_on_host()
        assert many.n_evicted == 1
        others.release()
        many.check()
        reply = chats[2].ask(session, random_tokens(20, 99))
        assert reply.stats.memory.conversation_use == "switched"
        assert reply.stats.cached_tokens > 200


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
                filler.put(block, 0, np.zeros(filler.slabs.payload_bytes, np.uint8))
        others = Charge(memory.host, memory.host.free, "others")
        seen = []

        def look() -> None:
            seen.append([(p.n_tokens, p.checkpoints.positions) for p in many.parked])

        many = conversations_of(session)
        recorded.context.on_decode = look
        reply = one.ask(session, random_tokens(20, 5))
        assert reply.stats.memory.conversation_use == "switched"
        assert all(positions[-1:] == [n] for n, positions in seen[0])
        others.release()


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


def test_states_that_nobody_needs_leave_before_conversations(tiny_qwen35: Path) -> None:
    """They are kept for the next state to be saved, and a history that was cut leaves many."""
    with record(tiny_qwen35, **WHOLE) as recorded:
        session, memory = recorded.session, recorded.memory
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 2))
        one.ask(session, random_tokens(40, 3))
        for seed in range(3):
            other.ask(session, random_tokens(40, 4 + seed))
        n_spare = len(memory.checkpoints)
        session.truncate(160)
        n_spare -= len(memory.checkpoints)
        assert n_spare > 2
        state = memory.checkpoints.n_bytes // (n_spare + len(memory.checkpoints))
        positions = memory.checkpoints.positions
        others = Charge(memory.host, memory.host.free, "others")
        block = with_room(memory, lambda: Charge(memory.host, n_spare * state, "blocks"))
        many = conversations_of(session)
        assert (many.n_evicted, len(many.parked)) == (0, 1)
        assert memory.checkpoints.positions == positions
        assert memory.notes == [], "no checkpoint gave way"
        others.release()
        block.release()
        many.check()
