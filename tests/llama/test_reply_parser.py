"""What a model answers, taken apart: the same at any cut, and nothing is ever taken back."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_vocab
from handset import SCRIPT
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.chat.reply import CallDelta, Delta, ReplyMessage
from kvmem.errors import RequestError, StateError
from kvmem.llama.model import Model
from kvmem.llama.reply_parser import ReplyParser
from kvmem.llama.template import ChatTemplate

USER = {"role": "user", "content": "hi"}
SAID = "".join(SCRIPT[1:])  # the template has opened the thought


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("look", place={"type": "string"}, n={"type": "integer"}, x={"type": ["string", "number"]}),
    tool("look_up", name={"type": "string"}, path={"type": "string"}),
    tool("stop"),
]
REQUEST: dict[str, Any] = {
    "messages": [USER], "tools": TOOLS, "enable_thinking": True, "parallel_tool_calls": True,
}  # fmt: skip


def call_text(name: str, /, **arguments: str) -> str:
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


TWO_CALLS = f"both\n</think>\n\n{call_text('look', place='Oslo')}\n{call_text('look_up', name='a')}"
REPLIES = [
    SAID,
    TWO_CALLS,
    "</think>\n\na < b, <b>, <tool_cal, </thin and <",
    "a </thin </ think> <",
    "hm</think>" + call_text("look_up", name="a_b", path="x"),
    "hm</think>" + call_text("look", n="42", x="42abc", place="🙂 日本 \\ \" '\n</param"),
    "hm</think>" + call_text("look", n="42", x="-1.5e3"),
    "hm</think>" + call_text("stop"),
    "no end of thinking",
    "<tool_call>\n<function=look>\n",
    # what does not fit the format
    "hm</think>Well " + call_text("unknown", a="b") + " and so on",
    "hm</think>Well " + call_text("look", n="seven"),
    call_text("look", place="x") + "and then",
    "</think>x</think>y<think>z",
]


class Read:
    """A reply read in pieces, joined as a client joins it."""

    def __init__(self, parser: ReplyParser, pieces: list[str], *, is_cut: bool) -> None:
        self.message = ReplyMessage()
        self.notes: list[str] = []
        self.deltas: list[dict[str, Any]] = []
        with parser:
            for piece in pieces:
                self._add(parser.feed(piece))
            self._add(parser.finish(is_cut=is_cut))

    def _add(self, parts: dict[str, Any]) -> None:
        self.deltas.append(parts)
        calls: list[CallDelta] = []
        for call in parts.get("calls", ()):
            n_calls = len(self.message.calls) + sum(c.name is not None for c in calls)
            if "name" in call:
                assert call["index"] == n_calls
            else:
                assert call["index"] < n_calls and call["arguments"]
            calls.append(CallDelta(**call))
        self.message.add(
            Delta(
                reasoning=parts.get("reasoning", ""),
                content=parts.get("content", ""),
                calls=tuple(calls),
            )
        )
        self.notes += parts.get("notes", ())

    @property
    def arguments(self) -> list[tuple[str | None, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.message.calls]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


@pytest.fixture(scope="module")
def template(model: Model) -> Iterator[ChatTemplate]:
    with ChatTemplate(model) as template:
        yield template


@pytest.fixture(scope="module")
def json_template(model: Model) -> Iterator[ChatTemplate]:
    with ChatTemplate(model, tiny_vocab.CHATML_JSON) as template:
        yield template


def read(
    template: ChatTemplate, model: Model, pieces: list[str], *, is_cut: bool = False, **fields: Any
) -> Read:
    parser = ReplyParser(template, model, {**REQUEST, **fields})
    return Read(parser, pieces, is_cut=is_cut)


def test_the_script_of_the_handset_model(template: ChatTemplate, model: Model) -> None:
    reply = read(template, model, [SAID])
    assert reply.message.reasoning == "I should look it up."
    assert reply.message.content == "Of course. One moment.\n"
    assert reply.arguments == [("look", {"place": "Oslo"})]
    assert reply.notes == []


def test_two_calls_have_indexes_and_names_of_their_own(
    template: ChatTemplate, model: Model
) -> None:
    """Case R10."""
    reply = read(template, model, list(TWO_CALLS))
    assert reply.arguments == [("look", {"place": "Oslo"}), ("look_up", {"name": "a"})]
    heads = [c for parts in reply.deltas for c in parts.get("calls", ()) if "name" in c]
    assert [(c["index"], c["name"]) for c in heads] == [(0, "look"), (1, "look_up")]
    assert reply.message.content == ""


def test_an_argument_called_name_at_every_cut(template: ChatTemplate, model: Model) -> None:
    """Case R11: two cuts at every pair of neighbouring places, and each place alone."""
    text = "hm</think>" + call_text("look_up", name="a_b", path="x")
    for place in range(1, len(text)):
        pieces = [text[:place], text[place : place + 1], text[place + 1 :]]
        reply = read(template, model, pieces)
        assert reply.arguments == [("look_up", {"name": "a_b", "path": "x"})], place


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("text", REPLIES, ids=range(len(REPLIES)))
def test_the_cut_makes_no_difference(
    template: ChatTemplate, model: Model, text: str, is_cut: bool
) -> None:
    whole = read(template, model, [text], is_cut=is_cut)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.sets(st.integers(0, len(text))))
    def check(cuts: set[int]) -> None:
        places = [0, *sorted(cuts), len(text)]
        reply = read(template, model, [text[a:b] for a, b in pairwise(places)], is_cut=is_cut)
        assert (reply.message, reply.notes) == (whole.message, whole.notes)

    check()
    letters = read(template, model, list(text), is_cut=is_cut)
    assert (letters.message, letters.notes) == (whole.message, whole.notes)


XML_PARTS = [
    "a", " ", "\n", "<", "🙂", "</think>", "<think>", "<tool_call>\n", "</tool_call>",
    "<function=look>\n", "<function=x>\n", "</function>\n", "<parameter=n>\n", "4",
    "<parameter=place>\n", "\n</parameter>\n", "<|im_end|>",
    call_text("look", n="4", place="b"), call_text("stop"),
]  # fmt: skip
JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Oslo \\n x"}}\n</tool_call>'
JSON_PARTS = [
    "a", " ", "\n", "<", "🙂", "</think>", "<think>", "<tool_call>\n", "</tool_call>",
    '{"name": "look", "arguments": ', '{"place": "Os', 'lo"}', '{"n": 4}', "}", '"', "\\",
    '{"name": "', "look_up", JSON_CALL,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["xml", "json"])
def test_any_text_is_read_alike_at_any_cut(
    template: ChatTemplate, json_template: ChatTemplate, model: Model, kind: str
) -> None:
    read_by, known = (template, XML_PARTS) if kind == "xml" else (json_template, JSON_PARTS)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        parts=st.lists(st.sampled_from(known), max_size=12),
        is_cut=st.booleans(),
        thinks=st.booleans(),
        parallel=st.booleans(),
    )
    def check(parts: list[str], is_cut: bool, thinks: bool, parallel: bool) -> None:
        fields = {"enable_thinking": thinks, "parallel_tool_calls": parallel}
        whole = read(read_by, model, ["".join(parts)], is_cut=is_cut, **fields)
        for pieces in (parts, list("".join(parts))):
            reply = read(read_by, model, pieces, is_cut=is_cut, **fields)
            assert (reply.message, reply.notes) == (whole.message, whole.notes)

    check()


def test_calls_as_json(json_template: ChatTemplate, model: Model) -> None:
    text = f"<think>\nhm\n</think>\n\nI look.\n{JSON_CALL}\n{JSON_CALL}"
    for pieces in ([text], list(text)):
        reply = read(json_template, model, pieces)
        assert (reply.message.reasoning, reply.message.content.strip()) == ("hm", "I look.")
        assert reply.arguments == [("look", {"place": "Oslo \n x"})] * 2
        assert reply.notes == []


def test_text_that_looks_like_a_tag_is_not_lost(template: ChatTemplate, model: Model) -> None:
    for is_cut in (False, True):
        reply = read(template, model, ["x</think>a < b <"], is_cut=is_cut)
        assert (reply.message.content, reply.notes) == ("a < b <", [])
        assert read(template, model, ["x </th"], is_cut=is_cut).message.reasoning == "x </th"


def test_what_does_not_fit_comes_out_as_text_with_a_note(
    template: ChatTemplate, model: Model
) -> None:
    text = call_text("unknown", a="b")
    reply = read(template, model, [f"hm</think>Well {text} and so on"])
    assert reply.message.reasoning == "hm"
    assert reply.message.content == f"Well {text} and so on"
    assert reply.message.calls == []
    assert ["passed on as text" in note for note in reply.notes] == [True]


def test_a_call_that_is_cut_short(template: ChatTemplate, model: Model) -> None:
    text = "hm</think>Well " + call_text("look", place="Oslo")
    begun = read(template, model, [text[: text.index("slo")]], is_cut=True)
    assert [(c.name, c.arguments) for c in begun.message.calls] == [("look", '{"place":"O')]
    barely = read(template, model, [text[: text.index("ook>")]], is_cut=True)
    assert (barely.message.content, barely.message.calls) == ("Well ", [])
    assert barely.notes == ["the reply was cut where a tool call began"]
    ended = read(template, model, [text[: text.index("ook>")]])
    assert ended.message.content == "Well <tool_call>\n<function=l"
    assert len(ended.notes) == 1


def test_without_tools_all_but_thinking_is_content(template: ChatTemplate, model: Model) -> None:
    reply = read(template, model, list("x</think>\n\n<tool_call>\n<b"), tools=[])
    assert (reply.message.reasoning, reply.message.content) == ("x", "<tool_call>\n<b")


def test_without_thinking_a_reply_is_content(template: ChatTemplate, model: Model) -> None:
    reply = read(template, model, list("plain</think>"), enable_thinking=False, tools=[])
    assert reply.message.content == "plain</think>"


def test_brackets_that_would_overflow_the_stack(template: ChatTemplate, model: Model) -> None:
    fields: dict[str, Any] = {"tools": [], "json_schema": {"type": "object"}}
    text = '{"a": ' + "[" * 20_000
    for pieces in ([text], [text[:300], text[300:]], [text[i : i + 7] for i in range(0, 2000, 7)]):
        reply = read(template, model, pieces, enable_thinking=False, **fields)
        assert reply.message.content == "".join(pieces)
        assert ["nested too deep" in note for note in reply.notes] == [True]


def test_a_message_that_is_continued_is_not_said_again(
    template: ChatTemplate, model: Model
) -> None:
    begun = {"role": "assistant", "reasoning_content": "hm", "content": "Once upon"}
    parser = ReplyParser(
        template, model, {**REQUEST, "messages": [USER, begun], "continue": "content"}
    )
    assert parser.rendered["prompt"].endswith("hm\n</think>\n\nOnce upon")
    reply = Read(parser, [" a", " time"], is_cut=False)
    assert (reply.message.reasoning, reply.message.content) == ("", " a time")


def test_the_result_names_triggers_and_tokens(template: ChatTemplate, model: Model) -> None:
    with ReplyParser(template, model, REQUEST) as parser:
        rendered = parser.rendered
    assert rendered["grammar"] and rendered["grammar_lazy"]
    assert [trigger["value"] for trigger in rendered["triggers"]] == ["<tool_call>"]
    assert len(rendered["preserved"]) == 4
    assert rendered["generation_prompt"].endswith("<think>\n")


def test_what_cannot_be_rendered_is_a_request_error(template: ChatTemplate, model: Model) -> None:
    with pytest.raises(RequestError, match="refuses the messages"):
        ReplyParser(template, model, {"messages": 3})
    with pytest.raises(RequestError, match="JSON"):
        ReplyParser(template, model, {"messages": [float("nan")]})


def test_an_end_is_final(template: ChatTemplate, model: Model) -> None:
    parser = ReplyParser(template, model, REQUEST)
    parser.finish()
    with pytest.raises(RequestError, match="the reply is finished"):
        parser.feed("x")
    with pytest.raises(RequestError, match="the reply is finished"):
        parser.finish()
    parser.close()
    parser.close()
    with pytest.raises(StateError, match="closed"):
        parser.feed("x")


@pytest.mark.parametrize("n_read", [0, 40])
def test_a_copy_reads_on_by_itself(template: ChatTemplate, model: Model, n_read: int) -> None:
    first = ReplyParser(template, model, REQUEST)
    before = first.feed(TWO_CALLS[:n_read])
    second = first.clone()
    assert second.rendered == first.rendered
    other = "hm</think>\n\nNo." if n_read == 0 else TWO_CALLS[n_read:].replace("Oslo", "Rome")
    said = [first.feed(TWO_CALLS[n_read:]), second.feed(other)]
    first_end = first.finish()
    first.close()
    ends = [first_end, second.finish()]
    for text, added, end in zip((TWO_CALLS, TWO_CALLS[:n_read] + other), said, ends, strict=True):
        alone = ReplyParser(template, model, REQUEST)
        assert [alone.feed(text[:n_read]), alone.feed(text[n_read:]), alone.finish()] == [
            before,
            added,
            end,
        ]
    with pytest.raises(StateError):
        first.clone()
