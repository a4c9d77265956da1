"""What a chain of requests costs: questions that are kept, wide, lost or always read twice."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import Message, generate, render
from engines import ask, random_tokens, record
from handset import fact

from kvmem.config import MemoryConfig
from kvmem.engine.events import PromptProgress
from kvmem.engine.passage import Passage
from kvmem.engine.reading import PromptReader
from kvmem.engine.retrieve import QueryTap
from kvmem.errors import ConfigError
from kvmem.kv.query import MAX_ROWS, Query

LONG = random_tokens(700, seed=1)
SPAN = (670, 695)

kinds = pytest.mark.parametrize("kind", ["llama", "qwen35"])


@kinds
def test_a_small_addition_keeps_the_window(kind: str, tiny: Callable[..., Path]) -> None:
    """Nothing is scored and nothing moves; the reserve has room beside half of itself."""
    with record(tiny(kind), reserve_tokens=256) as recorded:
        first = ask(recorded.session, LONG, span=SPAN)
        history = LONG + first.tokens
        for seed in range(2):
            history += random_tokens(20, seed)
            before = recorded.memory.working_set.resident().tolist()
            reply = ask(recorded.session, history, span=SPAN)
            report = reply.stats.memory
            assert report.decision == "keep_selected"
            assert report.reason == "the same question: its blocks are visible, with room"
            assert set(before) <= set(report.blocks)
            assert (report.blocks_in, report.blocks_out, report.replayed_tokens) == (0, 0, 0)
            assert report.times.score_s == 0
            history += reply.tokens
        # a large one has no room: it is chosen anew, down to the budget
        history += random_tokens(250, seed=9)
        report = ask(recorded.session, history, span=SPAN).stats.memory
        assert report.decision == "cached_query"
        assert len(report.blocks) <= 8
        recorded.memory.check()


def test_a_window_that_lost_a_block_is_chosen_anew(tiny_llama: Path) -> None:
    with record(tiny_llama, reserve_tokens=128) as recorded:
        first = ask(recorded.session, LONG, span=SPAN, max_tokens=200)  # drives out its own blocks
        assert first.stats.memory.reply_blocks_evicted > 0
        history = LONG + first.tokens + random_tokens(3)
        report = ask(recorded.session, history, span=SPAN).stats.memory
        assert report.decision == "cached_query"


@kinds
def test_a_tool_result_wider_than_the_pool_is_read_once(
    kind: str, tiny: Callable[..., Path]
) -> None:
    """Its question was read while everything fitted. Asked again, nearly all is there."""
    with record(tiny(kind)) as recorded:
        first = ask(recorded.session, LONG[:200], span=(150, 190))
        assert first.stats.memory.decision == "all_resident"
        history = LONG[:200] + first.tokens + random_tokens(2000, seed=5)
        replies = [ask(recorded.session, history, span=(150, 190)) for _ in range(3)]
        assert [reply.done.reason for reply in replies] == ["length"] * 3
        assert len({reply.tokens for reply in replies}) == 1
        decisions = [reply.stats.memory.decision for reply in replies]
        assert decisions[0] in ("cached_query", "query_replay")
        assert decisions[1:] == ["keep_selected", "keep_selected"]
        assert replies[0].stats.memory.read_tokens == 2001
        assert replies[0].stats.memory.replayed_tokens <= 64  # its end, not all of it
        for reply in replies[1:]:
            assert reply.stats.cached_tokens >= len(history) - 8
            assert reply.stats.memory.blocks == replies[0].stats.memory.blocks
        recorded.memory.check()


@pytest.mark.parametrize("has_end", [True, False], ids=["with its end", "question alone"])
def test_what_a_chain_of_tools_comes_to_is_asked_as_well(
    has_end: bool, handset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user asks for fact 1; the last of many tools needs fact 3, which the question did not."""
    if not has_end:
        monkeypatch.setattr(PromptReader, "_ask_with_end", ask_no_more)
    with record(handset, scorer="heads", budget_tokens=320, recent_tokens=32) as recorded:

        def tokens(text: str) -> tuple[int, ...]:
            return tuple(recorded.engine.vocab.tokenize(text))

        filler = " and the other thing" * 12
        facts = "".join(f"{fact(key, key + 5)}{filler}" for key in range(10))
        history = tokens(facts)
        span = (len(history), len(history) + len(tokens("tell me [q1] now")))
        history += tokens("tell me [q1] now")
        history += ask(recorded.session, history, span=span, max_tokens=2).tokens
        for _ in range(4):
            history += tokens(filler * 2)
            history += ask(recorded.session, history, span=span, max_tokens=2).tokens
        history += tokens(f"{filler} so we need it [q3]")
        reply = ask(recorded.session, history, span=span, max_tokens=1)
        said = recorded.engine.vocab.piece(reply.tokens[0]).decode()
        report = reply.stats.memory
        assert (said == "[a8]") == has_end
        if has_end:
            assert report.decision == "query_replay"
            assert report.reason == "query: the question and the last 64 tokens"
            assert report.replayed_tokens == 64
        recorded.memory.check()


def ask_no_more(
    reader: PromptReader, passage: Passage, question: Query, tail: int
) -> Iterator[PromptProgress]:
    del reader, question, tail
    yield from passage.read_to(len(passage.tokens))


@kinds
def test_a_question_wider_than_the_pool_asks_with_all_of_it(
    kind: str, tiny: Callable[..., Path]
) -> None:
    """1,500 tokens of question for a budget of 256: its Q comes from its whole length."""
    history = LONG[:100] + random_tokens(1500, seed=3)
    span = (100, 1600)
    with record(tiny(kind)) as recorded:
        report = ask(recorded.session, history, span=span).stats.memory
        assert report.decision in ("query_replay", "unchanged_selection")
        assert report.reason.endswith("query: the last user message")
        assert report.read_tokens == 1600
        assert report.replayed_tokens <= 128  # half of the budget
        recorded.memory.check()
        # the same Q, read by hand
        recorded.session.truncate(0)
        recorded.session.read(history[:100])
        expected = recorded.session.query(history[100:], range(1500))
        recorded.session.truncate(0)
        ask(recorded.session, history, span=span)
        question = recorded.session._reader._question  # type: ignore[union-attr]  # noqa: SLF001
        assert question is not None
        np.testing.assert_array_equal(question.query.tokens, expected.tokens)
        assert question.query.n_rows == 16


@kinds
def test_a_cancel_behind_the_question_keeps_its_q(kind: str, tiny: Callable[..., Path]) -> None:
    with record(tiny(kind), budget_tokens=512) as recorded:
        history = random_tokens(500, seed=1)
        recorded.context.stop_at = 3
        assert ask(recorded.session, history, span=(20, 60)).done.reason == "cancelled"
        history += random_tokens(600, seed=2)
        report = ask(recorded.session, history, span=(20, 60)).stats.memory
        assert report.decision == "cached_query"


@kinds
def test_a_reminder_in_the_place_of_the_question_costs_it_nothing(
    kind: str, tiny: Callable[..., Path]
) -> None:
    """A chain of tools, a user message behind it, and the chain again without that message."""
    with record(tiny(kind), conversations=4) as recorded:
        first = ask(recorded.session, LONG, span=SPAN)
        chain = LONG + first.tokens + random_tokens(60, seed=2)
        reminder = random_tokens(20, seed=3)
        ask(recorded.session, chain + reminder, span=(len(chain), len(chain) + 20))
        chain += random_tokens(100, seed=4)
        report = ask(recorded.session, chain, span=SPAN).stats.memory
        assert report.decision == "cached_query"
        assert report.replayed_tokens == 0
        recorded.memory.check(recorded.session.conversations.parked)  # type: ignore[union-attr]


@kinds
@pytest.mark.parametrize("n_before", [100, 600], ids=["all in sight", "beyond the budget"])
def test_a_question_that_a_reminder_stood_behind_is_known(
    n_before: int, kind: str, tiny: Callable[..., Path]
) -> None:
    """It was read as the last user message but one, and is the last once the reminder is gone."""
    with record(tiny(kind), conversations=4) as recorded:
        history = [Message("system", LONG[:n_before]), Message("user", random_tokens(30, 2))]
        reminder = Message("user", random_tokens(20, 3))
        reply = generate(recorded.session, render([*history, reminder]))
        assert reply.stats.memory.decision != "replay_skipped"
        for seed in range(3):
            history += [
                Message("assistant", reply.tokens),
                Message("tool", random_tokens(90, seed)),
            ]
            reply = generate(recorded.session, render(history))
            report = reply.stats.memory
            assert report.decision in ("all_resident", "cached_query"), report.reason
            assert report.replayed_tokens == 0
        assert report.decision == "cached_query"
        recorded.memory.check(recorded.session.conversations.parked)  # type: ignore[union-attr]


def test_the_q_of_several_messages_is_that_of_each(tiny_llama: Path) -> None:
    """Read in one pass, and each on its own."""
    spans = [(100, 130), (300, 304), (600, 640)]
    with record(tiny_llama, budget_tokens=2048) as recorded:
        memory = recorded.memory
        tokens = np.array(LONG, np.int32)
        with QueryTap(memory, tokens, *(range(*span) for span in spans)) as tap:
            memory.read(tokens)
            together = tap.finish()
        recorded.session.truncate(0)
        for query, span in zip(together, spans, strict=True):
            with QueryTap(memory, tokens, range(*span)) as tap:
                memory.read(tokens)
                [alone] = tap.finish()
            recorded.session.truncate(0)
            np.testing.assert_array_equal(query.tokens, tokens[slice(*span)])
            assert query.layers.keys() == alone.layers.keys()
            for layer, rows in alone.layers.items():
                assert len(rows) == min(16, span[1] - span[0])
                np.testing.assert_array_equal(query.layers[layer], rows)


@kinds
def test_legacy_replay_never_skips(kind: str, tiny: Callable[..., Path]) -> None:
    """A chain below one question, short and long: each request reads what is new twice."""
    with record(tiny(kind), query_replay="legacy") as recorded:
        history: tuple[int, ...] = ()
        for seed, n_tokens in enumerate((120, 60, 300, 40)):
            n_held = recorded.session.n_tokens
            history += random_tokens(n_tokens, seed)
            reply = ask(recorded.session, history, span=(50, 90))
            report = reply.stats.memory
            assert report.decision == "query_replay"
            n_new = len(history) - n_held
            assert report.read_tokens == n_new
            assert report.replayed_tokens == min(n_new - (50 if seed == 0 else 0), 128)
            history += reply.tokens
        recorded.memory.check()


def test_legacy_replay_says_the_same_where_all_is_in_sight(tiny_llama: Path) -> None:
    prompt, span = LONG[:200], (150, 190)
    replies = []
    for replay in ("auto", "legacy"):
        with record(tiny_llama, query_replay=replay, type_k="f16", type_v="f16") as recorded:
            replies.append(ask(recorded.session, prompt, span=span, max_tokens=20).tokens)
    assert replies[0] == replies[1]


@kinds
def test_legacy_policy_asks_with_all_that_is_new(kind: str, tiny: Callable[..., Path]) -> None:
    with record(tiny(kind), query_policy="legacy") as recorded:
        first = ask(recorded.session, LONG, span=SPAN)
        report = first.stats.memory
        assert report.reason == "query: all from the last user message on"
        history = LONG + first.tokens + random_tokens(90, seed=2)
        report = ask(recorded.session, history, span=SPAN).stats.memory
        assert report.decision in ("query_replay", "unchanged_selection")
        assert "the last 64 tokens" in report.reason


@pytest.mark.parametrize("name", ["query_replay", "query_policy"])
def test_other_words_are_refused(name: str) -> None:
    words: dict[str, Any] = {name: "sometimes"}
    with pytest.raises(ConfigError, match=name):
        MemoryConfig(**words)


def test_a_question_of_which_the_end_was_replaced_asks_with_all_of_it(tiny_llama: Path) -> None:
    history, text = random_tokens(600, seed=7), random_tokens(40, seed=8)
    first, second, third = (random_tokens(20, seed=seed) for seed in (9, 10, 11))
    span = (600, 660)
    with record(tiny_llama, budget_tokens=256) as recorded:
        known = recorded.memory.active
        ask(recorded.session, history + text + first, span=span)
        assert known.question is not None
        before = known.question
        ask(recorded.session, history + text + second, span=span)
        asked = known.question
        assert asked is not None and asked is not before
        assert asked.query.tokens.tolist() == [*text, *second]
        assert 600 == asked.rows[0] < 640 < asked.rows[-1] == 659
        assert (np.diff(asked.rows) > 0).all()
        assert asked.query.n_rows == len(asked.rows) == MAX_ROWS
        for index, rows in asked.query.layers.items():
            np.testing.assert_array_equal(rows[0], before.query.layers[index][0])
        reply = ask(recorded.session, history + text + second + random_tokens(50, 12), span=span)
        assert reply.stats.memory.decision in {"cached_query", "keep_selected"}
        # where its beginning is not known its end asks alone, and is no question to go on from
        recorded.memory.active.known = ()
        ask(recorded.session, history + text + third, span=span)
        assert known.question is not None and not known.question.is_whole
        assert known.question.query.tokens.tolist() == list(third)
        assert known.known == ()
