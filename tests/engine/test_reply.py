"""Replies: when they end, how long they may be, what stays of a dropped one; and the report."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from chats import WHOLE, Chat
from engines import ENDLESS, ask, make_config, random_tokens, record

from kvmem.engine import decode, memory, session
from kvmem.engine.checkpoint import Checkpoints
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, PromptProgress, TokenEvent
from kvmem.engine.index import BlockIndex
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import ContextLengthError, RequestError
from kvmem.llama.context import CancelToken

LONG = random_tokens(700, seed=1)


@pytest.mark.parametrize("n_tokens", [40, 700])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 33])
def test_max_tokens_is_exact(max_tokens: int, n_tokens: int, tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        reply = ask(recorded.session, LONG[:n_tokens], max_tokens=max_tokens)
        assert (reply.done.reason, len(reply.tokens)) == ("length", max_tokens)
        assert reply.stats.completion_tokens == max_tokens
        # the last token is not decoded: nobody has asked what follows it
        assert recorded.session.n_tokens == n_tokens + max(0, max_tokens - 1)
        recorded.memory.check()


@pytest.mark.parametrize("enabled", [True, False])
def test_without_max_tokens_the_workspace_ends_a_reply(enabled: bool, tiny_llama: Path) -> None:
    with record(
        tiny_llama, workspace_tokens=1000, enabled=enabled, type_k="f16", type_v="f16"
    ) as recorded:
        reply = ask(recorded.session, LONG, max_tokens=None)
        assert reply.done.reason == "length"
        assert len(reply.tokens) == 300
        assert recorded.session.n_tokens == 999


def test_a_prompt_beyond_the_workspace_is_refused_and_loses_nothing(tiny_llama: Path) -> None:
    with record(tiny_llama, workspace_tokens=512) as recorded:
        session = recorded.session
        ask(session, LONG[:300])
        kept = session.tokens
        for n_tokens in (512, 600):
            with pytest.raises(ContextLengthError) as caught:
                ask(session, LONG[:n_tokens])
            assert caught.value.prompt_tokens == n_tokens
            assert caught.value.limit_tokens == 512
        with pytest.raises(ContextLengthError):
            session.read(LONG[:300])
        with pytest.raises(RequestError, match="empty"):
            ask(session, ())
        np.testing.assert_array_equal(session.tokens, kept)
        assert ask(session, LONG[:511], max_tokens=None).stats.completion_tokens == 1


def test_stop_tokens_end_a_reply(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        free = ask(recorded.session, LONG, max_tokens=12).tokens
        stop = next(token for token in free[2:] if token not in free[:2])
        params = GenerateParams(sampling=ENDLESS, max_tokens=12, stop_tokens=frozenset({stop}))
        events = list(recorded.session.generate(Prompt(tokens=LONG), params))
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        assert tuple(event.token for event in tokens) == free[: free.index(stop) + 1]
        assert tokens[-1].piece == b""  # it is no text
        assert all(event.piece for event in tokens[:-1])
        done = events[-1]
        assert isinstance(done, Done)
        assert done.reason == "stop"


def test_a_reply_may_be_many_times_the_reserve(tiny_llama: Path) -> None:
    with record(tiny_llama, reserve_tokens=32) as recorded:
        reply = ask(recorded.session, LONG, span=(670, 695), max_tokens=800)
        assert (reply.done.reason, len(reply.tokens)) == ("length", 800)
        memory = reply.stats.memory
        assert memory.reply_blocks_evicted >= 800 // 32 - 2
        kept = set(memory.blocks) & set(recorded.memory.working_set.resident().tolist())
        assert len(kept) >= 7  # what was chosen stays; the reply's own blocks leave
        recorded.memory.check()
        again = ask(
            recorded.session, LONG + reply.tokens + random_tokens(40, seed=3), span=(1500, 1535)
        )
        assert again.stats.cached_tokens == 700 + 799
        assert max(again.stats.memory.blocks) == (1500 + 39) // 32


@pytest.mark.parametrize("scorer", ["lexical", "recency"])
def test_what_left_of_a_reply_comes_back_where_it_is_asked_for(
    scorer: str, tiny_llama: Path
) -> None:
    """A question that repeats a block of the reply. By recency, the control, nothing comes back."""
    with record(tiny_llama, reserve_tokens=32, scorer=scorer) as recorded:
        session = recorded.session
        reply = ask(session, LONG, span=(670, 695), max_tokens=400)
        assert reply.stats.memory.reply_blocks_evicted >= 8
        history = LONG + reply.tokens
        gone = set(range(23, 33)) - set(recorded.memory.working_set.resident().tolist())
        left = min(gone)  # written by the reply alone, and sealed
        asked = history[32 * left : 32 * (left + 1)]
        start = len(history)
        again = ask(session, history + asked, span=(start, start + len(asked)))
        report = again.stats.memory
        assert (left in report.blocks) == (scorer == "lexical")
        assert (report.blocks_in > 0) == (scorer == "lexical")
        recorded.memory.check()


def test_free_budget_is_used_before_anything_leaves(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:  # 8 + 2 blocks
        reply = ask(recorded.session, LONG[:32], max_tokens=9 * 32)
        assert reply.stats.memory.reply_blocks_evicted == 0
        assert recorded.memory.working_set.resident().tolist() == list(range(10))
        reply = ask(recorded.session, LONG[:33], max_tokens=9 * 32 + 1)
        assert reply.stats.memory.reply_blocks_evicted == 1


def test_a_dropped_generator_leaves_what_was_said(tiny_llama: Path) -> None:
    params = GenerateParams(sampling=ENDLESS, max_tokens=30)
    with record(tiny_llama) as recorded:
        session = recorded.session
        for n_events in range(1, 14):
            generation = session.generate(Prompt(tokens=LONG), params)
            events = [next(generation) for _ in range(n_events)]
            generation.close()
            n_said = sum(isinstance(event, TokenEvent) for event in events)
            assert session.n_tokens <= len(LONG) + n_said
            recorded.memory.check()
        whole = ask(session, LONG, max_tokens=30)  # and the next request finds the engine free
        assert whole.stats.cached_tokens == len(LONG) - 1


def test_progress_grows_to_the_whole_prompt(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        for span_tokens in (LONG, LONG + random_tokens(300, seed=2)):
            events = recorded.session.generate(
                Prompt(tokens=span_tokens), GenerateParams(max_tokens=1)
            )
            seen = [event for event in events if isinstance(event, PromptProgress)]
            done = [event.n_done for event in seen]
            assert done == sorted(done)
            assert done[-1] == len(span_tokens) == seen[0].n_total


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_phases_add_up_to_the_wall_time(
    kind: str, enabled: bool, tiny: Callable[..., Path]
) -> None:
    with Engine(make_config(tiny(kind), enabled=enabled, type_k="f16", type_v="f16")) as engine:
        session = engine.session()
        history: tuple[int, ...] = ()
        for turn, n_tokens in enumerate((700, 60, 400)):
            history += random_tokens(n_tokens, seed=turn)
            span = (len(history) - 30, len(history) - 5)
            started = perf_counter()
            reply = ask(session, history, span=span, max_tokens=40)
            wall_s = perf_counter() - started
            history += reply.tokens
            stats = reply.stats
            phases = asdict(stats.memory.times)
            assert all(seconds >= 0 for seconds in phases.values())
            total_s = stats.prompt_s + stats.decode_s
            assert sum(phases.values()) == pytest.approx(total_s, abs=1e-9)
            assert total_s <= wall_s
            # the rest is bookkeeping: no phase is forgotten
            assert stats.memory.times.other_s < 0.2 * total_s + 0.01
            assert stats.decode_s >= stats.memory.times.decode_s


def test_what_a_switch_stores_is_counted_once(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on only while blocks or states are stored, a second each time."""
    now_s = 0.0

    def slow(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **others: Any) -> Any:
            nonlocal now_s
            now_s += 1
            return action(*args, **others)

        return act

    for module in (decode, memory, session):
        monkeypatch.setattr(module, "perf_counter", lambda: now_s)
    monkeypatch.setattr(Checkpoints, "save", slow(Checkpoints.save))
    monkeypatch.setattr(BlockIndex, "add_sealed", slow(BlockIndex.add_sealed))
    with record(tiny_qwen35, **WHOLE) as recorded:
        one, other = Chat(random_tokens(150, 1)), Chat(random_tokens(150, 1))
        one.ask(recorded.session, random_tokens(50, 2))
        for chat, use in ((other, "branched"), (one, "switched")):
            stats = chat.ask(recorded.session, random_tokens(50, 3)).stats
            times = stats.memory.times
            assert stats.memory.conversation_use == use
            assert (times.switch_s, times.other_s) == (0, 0)
            assert times.store_s + times.checkpoint_s == stats.prompt_s + stats.decode_s > 2


def test_a_cancelled_reply_reports_both_parts(tiny_llama: Path) -> None:
    cancel = CancelToken()
    with record(tiny_llama) as recorded:
        done = None
        params = GenerateParams(sampling=ENDLESS, max_tokens=200)
        for event in recorded.session.generate(Prompt(tokens=LONG), params, cancel=cancel):
            if isinstance(event, TokenEvent) and recorded.session.n_tokens >= 720:
                cancel.set()
            done = event
        assert isinstance(done, Done)
        assert done.reason == "cancelled"
        stats = done.stats
        assert stats.completion_tokens == 21
        assert stats.prompt_s > stats.memory.times.read_s > 0
        assert stats.decode_s >= stats.memory.times.decode_s > 0
        phases = asdict(stats.memory.times)
        assert sum(phases.values()) == pytest.approx(stats.prompt_s + stats.decode_s, abs=1e-9)
