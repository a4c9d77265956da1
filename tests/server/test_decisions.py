"""Each way to find the working set of a request, over HTTP: its name, its reason and its cost, in
the reply and in /slots. tests/engine/test_decisions.py looks closer, without a server.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from serving import Answer, Served, letters, said, served, user

from kvmem.engine.checkpoint import Checkpoints
from kvmem.engine.stats import Decision

Message = dict[str, Any]
Story = Callable[[Served], list[Answer]]

FORCED = {"recent_tokens": 192}
"""Sink and recent blocks are all of the budget: there is nothing to choose."""
ROOMY = {"reserve_tokens": 256}


def call() -> Message:
    """What an agent does between two results."""
    function = {"name": "look", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def result(n_tokens: int, seed: int = 5) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": letters(n_tokens, seed)}


def alone(*messages: Message) -> Story:
    return lambda server: [server.chat(*messages)]


def below(question: int, *results: int) -> Story:
    """A question behind a long text, and below it what tools say, request by request."""

    def play(server: Served) -> list[Answer]:
        history: list[Message] = [user(letters(question, 1))]
        answers = [server.chat(*history)]
        for seed, n_tokens in enumerate(results):
            history += [said(answers[-1].text), result(n_tokens, seed)]
            answers.append(server.chat(*history))
        return answers

    return play


def again(server: Served) -> list[Answer]:
    return [server.chat(user(letters(700, 1))) for _ in range(2)]


@dataclass(frozen=True)
class Case:
    """What the last answer of a story says of itself.

    replayed: tokens that were read twice, at least and at most. scored, moved: whether blocks were
    scored, and whether any came to the device for it; None for either.
    """

    decision: Decision
    reason: str
    story: Story
    settings: dict[str, Any] = field(default_factory=dict)
    replayed: tuple[int, int] = (0, 0)
    scored: bool = True
    moved: bool | None = None


CASES = {
    "plain": Case(
        "off", "", alone(user(letters(700))), {"enabled": False}, scored=False, moved=False
    ),
    "short": Case(
        "all_resident", "the whole history fits in the budget", alone(user(letters(100))),
        scored=False, moved=False,
    ),
    "the same again": Case(
        "keep_selected", "the prompt before, once more: its selection stands", again,
        scored=False,
    ),
    "a small result": Case(
        "keep_selected", "the same question: its blocks are visible, with room", below(700, 20),
        ROOMY, scored=False, moved=False,
    ),
    "newest": Case(
        "recency", "the scorer that was asked for", alone(user(letters(700))),
        {"scorer": "recency"}, scored=False, moved=False,
    ),
    "a result": Case(
        "cached_query", "new tokens below a question that was read before", below(700, 90)
    ),
    "a long chain that asks for nothing else": Case(
        "cached_query", "its end asked for nothing that the question had not",
        below(700, 200, 200, 90), FORCED, moved=False,
    ),
    "a long chain": Case(
        "query_replay", "query: the question and the last 64 tokens", below(700, 200, 200, 90),
        replayed=(32, 64), moved=True,
    ),
    "a chain that is read whole": Case(
        "early_query", "the question was read on the way, before the part below it",
        alone(user(letters(40, 1)), call(), result(600)),
    ),
    "a new question that sees all": Case(
        "unchanged_selection",
        "the first pass had seen the chosen blocks; query: the last user message",
        alone(user(letters(700)), said("yes"), user(letters(30, 2))), FORCED, moved=False,
    ),
    "a new question": Case(
        "query_replay", "query: the last user message",
        alone(user(letters(700)), said("yes"), user(letters(30, 2))),
        replayed=(30, 128), moved=True,
    ),
    "no state to go back to": Case(
        "replay_skipped",
        "the host limit holds no state to go back to; query: the last user message",
        alone(user(letters(700)), said("yes"), user(letters(30, 2))), moved=True,
    ),
}  # fmt: skip


def test_there_is_a_case_for_each() -> None:
    assert {case.decision for case in CASES.values()} == set(get_args(Decision))


@pytest.mark.parametrize("kind", ["qwen35"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_named_with_its_reason_and_cost(
    name: str, kind: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if case.decision == "replay_skipped":
        monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: False)
    settings = {"recent_tokens": 0, "type_k": "f16", "type_v": "f16", **case.settings}
    with served(tiny(kind), **settings) as server:
        answer = case.story(server)[-1]
        report = answer.memory
        assert (report["decision"], report["reason"]) == (case.decision, case.reason)
        assert report["reused_tokens"] == answer.n_cached
        assert report["read_tokens"] == answer.read
        least, most = case.replayed
        assert least <= report["replayed_tokens"] <= most
        times = report["times"]
        assert (times["score_s"] > 0) == case.scored
        assert (times["replay_s"] > 0) == (most > 0)
        if case.moved is not None:
            assert (report["blocks_in"] > 0) == case.moved
        assert all(seconds >= 0 for seconds in times.values())
        if case.decision != "off":
            assert answer.n_prompt // 32 in report["blocks"], "the newest is always visible"
            assert len(report["blocks"]) <= report["n_blocks"]
        shown = server.client.get("/slots").json()[0]["kvmem"]["last"]
        assert shown == report
