"""The host limit on a hybrid model: blocks, tables, summaries and states together never pass it."""

from pathlib import Path

import pytest
from engines import Recorded, ask, random_tokens, record

from kvmem.errors import CapacityError
from kvmem.kv.budget import Charge
from kvmem.llama.state import state_bytes

LIMIT = 1100 << 10


def watch(recorded: Recorded, limit: int) -> list[int]:
    """From now on, the accounted bytes at each decode call; never above the limit."""
    seen: list[int] = []

    def sample() -> None:
        seen.append(recorded.memory.host.used)
        assert seen[-1] <= limit

    recorded.context.on_decode = sample
    return seen


def test_forty_unrelated_prompts_then_one_that_is_too_large(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35, host_limit_bytes=LIMIT) as recorded:
        memory = recorded.memory
        seen = watch(recorded, LIMIT)
        for seed in range(40):
            prompt = random_tokens(1000 + 13 * seed, seed)
            reply = ask(recorded.session, prompt, span=(len(prompt) - 30, len(prompt)))
            assert reply.stats.memory.host_bytes == memory.host.used <= LIMIT
            memory.check()
        assert max(seen) > LIMIT * 3 // 4  # the limit was near
        with pytest.raises(CapacityError, match="host limit"):
            ask(recorded.session, random_tokens(3500, seed=99), span=(3470, 3500))
        assert memory.host.used <= LIMIT
        memory.check()
        after = ask(recorded.session, random_tokens(600, seed=50), span=(560, 590))
        assert after.stats.memory.notes == []
    with record(tiny_qwen35, host_limit_bytes=LIMIT) as recorded:
        fresh = ask(recorded.session, random_tokens(600, seed=50), span=(560, 590))
    assert after.tokens == fresh.tokens
    assert after.stats.memory.blocks == fresh.stats.memory.blocks


def test_what_fits_on_the_device_is_answered_and_said_not_to_be_kept(tiny_qwen35: Path) -> None:
    """The host has no room for its blocks, and the device has: nothing has to leave."""
    limit = 600 << 10
    prompt = random_tokens(1200, seed=1)
    with record(tiny_qwen35, budget_tokens=2048) as recorded:
        plain = ask(recorded.session, prompt)
        assert plain.stats.memory.notes == []
        assert plain.stats.memory.host_bytes > limit
    with record(tiny_qwen35, budget_tokens=2048, host_limit_bytes=limit) as recorded:
        watch(recorded, limit)
        reply = ask(recorded.session, prompt)
        assert reply.tokens == plain.tokens
        said = " ".join(reply.stats.memory.notes)
        assert "no checkpoint was kept" in said
        assert "not all blocks have a copy on the host" in said
        assert recorded.memory.working_set.n_sealed < 1200 // 32
        recorded.memory.check()
        again = ask(recorded.session, random_tokens(100, seed=2))
        assert again.stats.memory.notes == []


def test_a_state_that_is_too_large_is_answered_and_said_not_to_be_kept(tiny_qwen35: Path) -> None:
    prompt = random_tokens(700, seed=1)
    with record(tiny_qwen35) as recorded:
        memory = recorded.memory
        recorded.session.read(prompt[:60])
        state = state_bytes(memory.context)  # of an empty history it is smaller
        ballast = Charge(memory.host, memory.host.free - state + 1, "ballast")
        watch(recorded, memory.host.limit)
        reply = ask(recorded.session, prompt[:90], span=(70, 85))
        assert reply.done.reason == "length"
        assert reply.stats.memory.checkpoints == []
        assert any(
            f"the state of {state} bytes does not fit" in note for note in reply.stats.memory.notes
        )
        # the history goes on, and a change in it reads all of it again
        more = ask(recorded.session, prompt[:90] + reply.tokens)
        assert more.stats.cached_tokens == 97
        changed = ask(recorded.session, prompt[:80] + reply.tokens)
        assert changed.stats.cached_tokens == 0
        memory.check()
        ballast.release()
        ask(recorded.session, prompt[:90])
        assert len(memory.checkpoints) > 0


def test_without_a_state_to_go_back_to_the_first_pass_stands(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(700, seed=1)
    with record(tiny_qwen35) as recorded:
        memory = recorded.memory
        monkeypatch.setattr(memory.checkpoints, "save", lambda *_, **__: False)
        report = ask(recorded.session, prompt, span=(660, 690)).stats.memory
        assert report.decision == "replay_skipped"
        assert report.reason == (
            "the host limit holds no state to go back to; query: the last user message"
        )
        assert (report.read_tokens, report.replayed_tokens) == (700, 0)
        assert {20, 21} <= set(report.blocks)  # what was read last is in sight
        assert report.checkpoints == []
        memory.check()


def test_what_fits_on_the_device_goes_on_there(tiny_qwen35: Path) -> None:
    """As above, at the turns behind the first one."""
    replies = []
    for limit in (None, 600 << 10):
        with record(tiny_qwen35, budget_tokens=2048, host_limit_bytes=limit) as recorded:
            tokens = random_tokens(1200, seed=1)
            for turn in range(3):
                reply = ask(recorded.session, tokens)
                recorded.memory.check()
                replies.append(reply.tokens)
                tokens = (*tokens, *reply.tokens, *random_tokens(40, seed=2 + turn))
    assert replies[:3] == replies[3:]
