"""Replies that are bound to something, sampled on real weights: schemas, calls, thinking budgets.

The tiny model's weights are random: what it says well-formed, it was held to.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handset import LINE_BREAK, SCRIPT, write_handset

from kvmem.chat.render import ChatRenderer
from kvmem.chat.reply import ReplyMessage
from kvmem.chat.request import parse_chat_request
from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.llama.template import ChatTemplate

MEMORY = MemoryConfig(workspace_tokens=2048, budget_tokens=1024, reserve_tokens=64, block_tokens=32)


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LOOK = tool("look", place={"type": "string"})


class Reply:
    """What was said, taken apart and raw."""

    def __init__(self, chat: "Chat", fields: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, **fields}
        rendered = chat.renderer.render(parse_chat_request(body))
        reader = rendered.reader()
        self.message = ReplyMessage()
        self.events: list[TokenEvent] = []
        for event in chat.session.generate(rendered.prompt, rendered.params()):
            if isinstance(event, TokenEvent):
                self.events.append(event)
                self.message.add(reader.feed([event]))
            elif isinstance(event, Done):
                self.message.add(reader.finish(event.reason))
                self.reason = reader.finish_reason(event.reason)
        self.reasoning_tokens = reader.reasoning_tokens
        self.notes = reader.notes

    @property
    def raw(self) -> bytes:
        return b"".join(event.piece for event in self.events)


class Chat:
    def __init__(self, path: Path, n_drafts: int = 0) -> None:
        model = ModelConfig(path=path, n_threads=1)
        draft = DraftConfig(spec_type="draft-mtp", n_max=n_drafts) if n_drafts else DraftConfig()
        self.engine = Engine(EngineConfig(model=model, memory=MEMORY, draft=draft))
        self.template = ChatTemplate(self.engine.model)
        self.renderer = ChatRenderer(self.template, self.engine.vocab)
        self.session = self.engine.session()

    def ask(self, **fields: Any) -> Reply:
        return Reply(self, fields)

    def close(self) -> None:
        self.template.close()
        self.engine.close()


@pytest.fixture(scope="module")
def chat(tiny_llama: Path) -> Iterator[Chat]:
    chat = Chat(tiny_llama)
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says the script at the end of a prompt that has opened the thought."""
    path = tmp_path_factory.mktemp("handset") / "chat.gguf"
    return write_handset(path, script=SCRIPT[1:], start=LINE_BREAK, wrong_drafts=(5, 9))


@pytest.fixture(scope="module", params=[0, 1, 3, 5], ids="drafts={}".format)
def scripted(script_model: Path, request: pytest.FixtureRequest) -> Iterator[Chat]:
    """The script, with so many drafts at a time."""
    chat = Chat(script_model, request.param)
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def drafting(tiny_qwen35_mtp: Path) -> Iterator[tuple[Chat, Chat]]:
    """Random words of a hybrid model, without drafts and with them."""
    chats = Chat(tiny_qwen35_mtp), Chat(tiny_qwen35_mtp, 3)
    yield chats
    for chat in chats:
        chat.close()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 3, "maximum": 9},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "q", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("thinking", [{"enable_thinking": False}, {"reasoning_budget_tokens": 9}])
def test_a_schema_holds(chat: Chat, seed: int, thinking: dict[str, Any]) -> None:
    reply = chat.ask(response_format=FORM, seed=seed, **thinking)
    assert reply.reason == "stop"
    value = json.loads(reply.message.content)
    assert set(value) == {"a", "b", "c"}
    assert 3 <= value["a"] <= 9 and value["b"] in ("x", "y") and len(value["c"]) <= 3
    assert all(isinstance(item, bool) for item in value["c"])


def test_json_object(chat: Chat) -> None:
    bias = {str(token): -100 for token in range(256) if chr(token) not in '{}":, abc012'}
    reply = chat.ask(
        response_format={"type": "json_object"}, enable_thinking=False, seed=1, logit_bias=bias
    )
    assert reply.message.content.startswith("{")
    if reply.reason == "stop":
        assert isinstance(json.loads(reply.message.content), dict)


def test_a_grammar_holds(chat: Chat) -> None:
    said = {chat.ask(grammar='root ::= "yes" | "no"', seed=seed).message.content for seed in (1, 2)}
    assert said <= {"yes", "no"}


NUMBERS = tool("count", n={"type": "integer"}, on={"type": "boolean"})
OTHER = tool("other", q={"type": "integer"})


def towards(chat: Chat, text: str) -> dict[str, float]:
    """A bias that makes this token come soon."""
    [token] = chat.engine.vocab.tokenize(text)
    return {str(token): 100}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"count", "other"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_must_be_made(chat: Chat, choice: Any, names: set[str], seed: int) -> None:
    bias = towards(chat, "<tool_call>")
    reply = chat.ask(
        tools=[NUMBERS, OTHER], tool_choice=choice, parallel_tool_calls=False, seed=seed,
        enable_thinking=False, logit_bias=bias,
    )  # fmt: skip
    assert reply.reason == "tool_calls"
    [call] = reply.message.calls
    assert call.name in names
    arguments = json.loads(call.arguments)
    assert all(isinstance(value, int) for value in arguments.values())


def test_a_call_that_may_be_made_is_well_formed_once_it_begins(chat: Chat) -> None:
    bias = towards(chat, "<tool_call>")
    reply = chat.ask(
        tools=[NUMBERS], parallel_tool_calls=False, enable_thinking=False, seed=5, logit_bias=bias
    )
    assert reply.reason == "tool_calls"
    assert set(json.loads(reply.message.calls[0].arguments)) == {"n", "on"}


def test_without_a_choice_no_call_is_read(chat: Chat) -> None:
    bias = towards(chat, "<tool_call>")
    reply = chat.ask(
        tools=[NUMBERS], tool_choice="none", enable_thinking=False, logit_bias=bias, max_tokens=5
    )
    assert reply.message.calls == [] and "<tool_call>" in reply.message.content


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("tools", [[], [LOOK]])
def test_the_budget_ends_a_thought_that_the_template_has_opened(
    chat: Chat, budget: int, tools: list[Any]
) -> None:
    reply = chat.ask(reasoning_budget_tokens=budget, tools=tools, seed=3, max_tokens=60)
    raw = reply.raw.decode("utf-8", "replace")
    assert "</think>" in raw
    # a character that the budget would have cut is finished, and the end has two tokens
    assert budget < reply.reasoning_tokens <= budget + 5
    assert reply.message.content


def test_the_message_of_the_budget_is_said(chat: Chat) -> None:
    reply = chat.ask(
        reasoning_budget_tokens=5, reasoning_budget_message="\nEnough.", seed=3, max_tokens=60
    )
    assert b"\nEnough.\n</think>" in reply.raw
    assert reply.message.reasoning.endswith("\nEnough.")


def test_without_a_budget_thinking_goes_on(chat: Chat) -> None:
    ends = ("</think>", "<tool_call>")
    never = {str(chat.engine.vocab.tokenize(end)[0]): -100 for end in ends}
    reply = chat.ask(seed=3, max_tokens=60, ignore_eos=True, logit_bias=never)
    assert reply.reasoning_tokens == 60 and reply.message.content == ""


def test_the_script_is_read(scripted: Chat) -> None:
    reply = scripted.ask(tools=[LOOK], temperature=0)
    assert (reply.message.reasoning, reply.message.content) == (
        "I should look it up.",
        "Of course. One moment.\n",
    )
    [call] = reply.message.calls
    assert (call.name, call.arguments) == ("look", '{"place":"Oslo"}')
    assert (reply.reason, reply.notes) == ("tool_calls", [])


def test_a_budget_cuts_the_script(scripted: Chat) -> None:
    reply = scripted.ask(tools=[LOOK], temperature=0, reasoning_budget_tokens=1)
    assert reply.message.reasoning == "I should"
    assert reply.message.content
    assert reply.reasoning_tokens == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORM, "enable_thinking": False},
        {"response_format": FORM, "reasoning_budget_tokens": 5},
        {"reasoning_budget_tokens": 3, "reasoning_budget_message": "\nSo.", "max_tokens": 40},
        {"tools": [NUMBERS], "tool_choice": "required", "enable_thinking": False,
         "parallel_tool_calls": False, "logit_bias": [["<tool_call>", 100]]},
        {"grammar": 'root ::= [a-c]{3,9} "!"'},
        {"max_tokens": 40, "ignore_eos": True, "presence_penalty": 1, "logprobs": True},
    ],
    ids=range(6),
)  # fmt: skip
def test_drafts_change_nothing(drafting: tuple[Chat, Chat], fields: dict[str, Any]) -> None:
    plain, drafted = (chat.ask(temperature=0, **fields) for chat in drafting)
    assert drafted.raw == plain.raw
    assert (drafted.message.content, drafted.reason) == (plain.message.content, plain.reason)
    if "response_format" in fields:
        assert set(json.loads(drafted.message.content)) == {"a", "b", "c"}
    for one, other in zip(plain.events, drafted.events, strict=True):
        if one.logprobs is not None and other.logprobs is not None:
            assert other.logprobs.chosen.logprob == pytest.approx(
                one.logprobs.chosen.logprob, abs=0.01
            )


def test_logprobs_are_of_the_models_own_softmax(chat: Chat) -> None:
    reply = chat.ask(
        logprobs=True, top_logprobs=3, temperature=0, enable_thinking=False, max_tokens=4
    )
    for event in reply.events:
        assert event.logprobs is not None
        chosen, top = event.logprobs.chosen, event.logprobs.top
        assert chosen.token == event.token == top[0].token  # greedy
        values = [entry.logprob for entry in top]
        assert values == sorted(values, reverse=True) and max(values) < 0
        assert np.exp(values).sum() <= 1
    none = chat.ask(temperature=0, enable_thinking=False, max_tokens=2)
    assert all(event.logprobs is None for event in none.events)


def test_equal_seeds_say_the_same(chat: Chat) -> None:
    texts = [chat.ask(seed=seed, max_tokens=20).raw for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.3}, {"top_n_sigma": 1}, {"xtc_probability": 1, "xtc_threshold": 0.01},
        {"repeat_penalty": 5}, {"frequency_penalty": 2}, {"presence_penalty": 2}, {"top_k": 1},
        {"top_p": 0.01}, {"min_p": 0.9}, {"mirostat": 2}, {"dynatemp_range": 0.9},
        {"samplers": ["top_k", "temperature"], "top_k": 1}, {"temperature": 3},
        {"adaptive_target": 0.1, "samplers": ["adaptive_p"]},
    ],
    ids=str,
)  # fmt: skip
def test_each_sampling_field_changes_the_choice(chat: Chat, fields: dict[str, Any]) -> None:
    base = {"seed": 11, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 60,
            "ignore_eos": True, "enable_thinking": False, "presence_penalty": 0}  # fmt: skip
    assert chat.ask(**base).raw != chat.ask(**{**base, **fields}).raw


def test_dry_breaks_a_repetition(chat: Chat) -> None:
    base = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, "enable_thinking": False}
    plain = chat.ask(**base).raw
    assert chat.ask(**base, dry_multiplier=5, dry_penalty_last_n=-1).raw != plain
    breakers = [chr(letter) for letter in range(32, 127)]
    assert chat.ask(**base, dry_multiplier=1e-6, dry_sequence_breakers=breakers).raw == plain
