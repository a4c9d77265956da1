"""What agents' clients send to a hybrid, with tools, thinking and drafts: what is read for it.

The model plays a turn by script: thinking, text, a call. Excess is what is read beside the tokens
that no history before began with.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handset import LINE_BREAK, write_handset
from serving import Served, letters, served
from tiny_vocab import CHATML_TOOLS

from kvmem.chat.request import parse_chat_request
from kvmem.engine.conversations import common_prefix
from kvmem.engine.draft import Worth

ASKED = """\
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
"""
DROPS = ASKED + CHATML_TOOLS.replace(
    "if message.reasoning_content %}",
    "if message.reasoning_content and (preserve_thinking or loop.index0 > ns.asked) %}",
).replace("elif enable_thinking is defined", "else")
"""Thinking is always on, and stays behind the last user message alone, unless it is preserved."""
FORGETS = DROPS.replace("preserve_thinking or ", "")

SCRIPT = (
    "I should ", "look it up.\n", "</think>", "\n\nOf course. ", "One ", "moment.\n\n",
    "<tool_call>", "\n<function=look>\n", "<parameter=place>\n", "Oslo", "\n</parameter>\n",
    "</function>\n", "</tool_call>",
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {
        "name": name, "description": letters(60, seed),
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    }}
    for seed, name in enumerate(("look", "edit"))
]  # fmt: skip
SYSTEM = {"role": "system", "content": "You are an agent." + letters(400, 3)}
FEW = 16
"""Tokens that stand around messages: what opens a reply, and where a tokenizer joins."""


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


Message = dict[str, Any]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


class Client:
    """Sends requests, and knows what the server has read for each."""

    def __init__(self, server: Served, keeps_thinking: bool) -> None:
        self.server = server
        self.keeps_thinking = keeps_thinking
        self.seen: list[np.ndarray] = []
        self.n_accepted = 0
        self.report: dict[str, Any] = {}

    def ask(self, messages: list[Message], **fields: Any) -> tuple[Message, int]:
        """The reply as it comes back in the next request, and the excess."""
        body: dict[str, Any] = {
            "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 40,
            "kvmem": True, **fields,
        }  # fmt: skip
        rendered = self.server.backend.render(parse_chat_request(body))
        tokens = np.array(rendered.prompt.tokens, np.int32)
        shared = max((common_prefix(one, tokens) for one in self.seen), default=0)
        response = self.server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        whole = response.json()
        self.report = whole["kvmem"]
        n_read = len(tokens) - whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.n_accepted += whole["timings"].get("draft_n_accepted", 0)
        self.seen.append(self.server.memory.tokens.copy())
        reply = {k: v for k, v in whole["choices"][0]["message"].items() if v is not None}
        if not self.keeps_thinking:
            reply.pop("reasoning_content", None)
            reply["content"] = reply.get("content", "").strip()
        return reply, n_read - (len(tokens) - min(shared, len(tokens) - 1))

    def step(self, history: list[Message], result: str, **fields: Any) -> int:
        """A reply, and what its call has come to: both join the history."""
        reply, excess = self.ask(history, **fields)
        assert reply["tool_calls"], "the model plays its script"
        called = reply["tool_calls"][0]["id"]
        history += [reply, {"role": "tool", "tool_call_id": called, "content": result}]
        return excess


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traffic")
    return {
        name: write_handset(
            folder / f"{name}.gguf", script=SCRIPT, start=LINE_BREAK, wrong_drafts=(3, 7),
            template=template,
        )
        for name, template in (("drops", DROPS), ("forgets", FORGETS))
    }  # fmt: skip


QUICK = ("forgets", True), ("drops", False)
ALL = [
    pytest.param((name, keeps), marks=[] if (name, keeps) in QUICK else pytest.mark.slow)
    for name in ("drops", "forgets") for keeps in (True, False)
]  # fmt: skip


@pytest.fixture(params=ALL, ids=str)
def client(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Client]:
    """With this template, and keeping what was thought or not."""
    template, keeps_thinking = request.param
    with served(
        models[template], workspace_tokens=16384, budget_tokens=512, reserve_tokens=128,
        conversations=8, n_drafts=3,
    ) as server:  # fmt: skip
        made = Client(server, keeps_thinking)
        yield made
        made.server.memory.check(made.server.backend._session.conversations.parked)  # type: ignore[union-attr]  # noqa: SLF001
        assert made.n_accepted > 0


def test_a_chain_of_tools_and_what_comes_beside_it(client: Client) -> None:
    """Two questions with eight tools each. A template that drops their thinking writes the first
    chain anew when the second question comes: from the question's end on, and no earlier.
    """
    history = [SYSTEM, user("Do this." + letters(500, 5))]
    client.ask(history)
    _, excess = client.ask([SYSTEM, user("A title of: this")], max_tokens=8)
    assert excess <= FEW, "a title below the same system prompt"
    for question in range(2):
        excesses = [client.step(history, f"{i}" + letters(150, i)) for i in range(8)]
        assert max(excesses) <= FEW, f"question {question}: {excesses}"
        reply, excess = client.ask(history)
        history += [reply, user(f"And this?{letters(60, question)}")]
    _, excess = client.ask([*history, user("Summarise all of it.")])
    assert excess <= FEW, "a compaction request"
    summary = [SYSTEM, user("Summary:" + letters(200, 7))]
    assert client.step(summary, "and so on") <= FEW
    assert client.step(summary, "and on") <= FEW


@pytest.mark.parametrize("where", ["message", "part", "tags"])
def test_a_reminder_that_is_another_one_each_turn(where: str, client: Client) -> None:
    """As a user message, as the last part of one, or in tags at the end of a tool's result."""
    history = [SYSTEM, user("Do this." + letters(300, 5))]
    client.step(history, letters(200, 1))
    excesses = []
    for turn in range(3):
        text = f"<reminder>{turn}{letters(40, turn)}</reminder>"
        if where == "message":
            shown = [*history, user(text)]
        elif where == "part":
            history.append(user(f"Go on: {turn}{letters(150, turn)}"))
            parts = [{"type": "text", "text": one} for one in (history[-1]["content"], text)]
            shown = [*history[:-1], user(parts)]
        else:
            last = history[-1]
            shown = [*history[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
        reply, excess = client.ask(shown)
        called = reply["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": called, "content": letters(200, turn)}
        history += [reply, result]
        excesses.append(excess)
    assert max(excesses) <= FEW, excesses


def test_system_prompts_whose_end_is_another_one(client: Client) -> None:
    """The date, a folder: from the third on, what they begin with is not read again."""
    excesses = []
    for day in range(4):
        system = {"role": "system", "content": f"{SYSTEM['content']} Day {day}{letters(40, day)}"}
        _, excess = client.ask([system, user(f"hello{letters(100, day)}")])
        excesses.append(excess)
    assert excesses[1] > 300, "the first has no state there"
    assert max(excesses[2:]) <= FEW, excesses
