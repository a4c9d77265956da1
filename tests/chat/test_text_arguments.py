"""Arguments between tags: what the grammar lets a call say, read as the reply is read."""

import json
from typing import Any

import jsonschema
import pytest
import tiny_vocab
from gbnf import read_grammar
from zod import EMAIL

from kvmem.chat.fields import FieldError
from kvmem.chat.json_schema.normal import normal_schema
from kvmem.chat.json_schema.text_arguments import ANY_TEXT, text_rules
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import parse_chat_request
from kvmem.engine.events import TokenEvent
from kvmem.llama.grammar import check_grammar
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

Json = dict[str, Any]


def function(name: str, parameters: Json, *, strict: bool = False) -> Json:
    inner = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": inner}


def render(vocab: Vocab, *tools: Json, source: str = "", **fields: Any) -> RenderedChat:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": list(tools),
            "enable_thinking": False, "tool_choice": "required", **fields}  # fmt: skip
    with ChatTemplate(vocab.model, source) as template:
        return ChatRenderer(template, vocab).render(parse_chat_request(body))


def grammar_of(rendered: RenderedChat) -> str:
    found = rendered.sampling.extra["constraint"]
    assert isinstance(found, dict)
    return str(found["grammar"])


def calls_of(vocab: Vocab, *tools: Json, n: int = 12, **fields: Any) -> list[tuple[str, Json]]:
    """Name and arguments of random calls that the grammar allows."""
    grammar = read_grammar(grammar_of(render(vocab, *tools, **fields)))
    found = []
    for seed in range(n):
        text = grammar.text(seed, root="tool-call", most=2)
        reader = render(vocab, *tools, **fields).reader()
        delta = reader.feed([TokenEvent(1000, text.encode())])
        calls = [*delta.calls, *reader.finish("stop").calls]
        arguments = "".join(call.arguments for call in calls)
        assert calls[0].name is not None
        found.append((calls[0].name, json.loads(arguments)))
    return found


TEXT = {"type": "string"}
HELD: dict[str, Json] = {
    "enum": {"type": "string", "enum": ["yes", "no", 'a "b"\n', "</parameter>", "\\"]},
    "const": {"const": "only"},
    "enum with null": {"enum": ["a", "null", None, 3, "3", "true"]},
    "optional enum": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
    "enum or switch": {"anyOf": [{"enum": ["auto"]}, {"type": "boolean"}]},
    "types": {"type": ["string", "null"], "enum": ["a", None]},
    "pattern": {"type": "string", "pattern": r"^[a-z]\d{2}$"},
    "optional pattern": {
        "anyOf": [{"type": "string", "pattern": "^n?[a-z]{3}$"}, {"type": "null"}]
    },
    "date": {"type": "string", "format": "date"},
    "email": {"type": "string", "format": "email"},
    "not empty": {"type": "string", "minLength": 2},
    "pattern and format": {"type": "string", "format": "email", "pattern": EMAIL},
    "pattern and lengths": {
        "type": "string",
        "pattern": "^[a-z]+( [a-z]+)*$",
        "minLength": 3,
        "maxLength": 9,
    },
    "pattern ahead": {
        "anyOf": [{"type": "string", "pattern": "^(?!null$)[a-z]{4}$"}, {"type": "null"}]
    },
    "format and length": {"type": "string", "format": "hostname", "maxLength": 6},
    "integer": {"type": "integer", "minimum": 1, "maximum": 3},
    "object": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "numbers in lists": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 2}},
    "enum or number": {"anyOf": [{"enum": ["auto"]}, {"type": "number", "maximum": 1.5}]},
    "any text": TEXT,
    "text or number": {"type": ["string", "number", "boolean", "null"]},
}


@pytest.mark.parametrize("name", HELD)
def test_a_strict_argument_is_held_to_its_schema(vocab: Vocab, name: str) -> None:
    parameters = {"type": "object", "properties": {"x": HELD[name], "y": TEXT}, "required": ["x"]}
    strict = function("f", parameters, strict=True)
    validator = jsonschema.Draft202012Validator(parameters)
    check_grammar(vocab.model, grammar_of(render(vocab, strict)))
    seen = set()
    for called, arguments in calls_of(vocab, strict):
        assert called == "f"
        validator.validate(arguments)
        seen.add(json.dumps(arguments["x"]))
    if name == "enum":
        assert len(seen) >= 4


def test_each_tool_has_its_own_rules(vocab: Vocab) -> None:
    """Also under the same path: llama.cpp keeps one rule for the references of all tools."""
    tools = [
        function(f"f{n}", {"$defs": {"d": {"type": "object", "properties": {"a": {"const": n}},
                 "required": ["a"]}}, "type": "object", "required": ["x", "y"],
                 "properties": {"x": {"$ref": "#/$defs/d"}, "y": {"enum": [f"t{n}"]}}}, strict=True)
        for n in range(3)
    ]  # fmt: skip
    calls = calls_of(vocab, *tools)
    assert {name for name, _ in calls} == {"f0", "f1", "f2"}
    assert all(call == {"x": {"a": int(name[1])}, "y": f"t{name[1]}"} for name, call in calls)


def test_one_named_function_keeps_its_rules(vocab: Vocab) -> None:
    tools = [function("f", {"type": "object", "properties": {"x": {"enum": ["a"]}}}),
             function("g", {"type": "object", "properties": {"x": {"enum": ["b"]}},
                            "required": ["x"]})]  # fmt: skip
    named = {"type": "function", "function": {"name": "g"}}
    calls = calls_of(vocab, *tools, tool_choice=named, n=5)
    assert calls == [("g", {"x": "b"})] * 5


def test_the_prompt_shows_the_tools_as_they_came(vocab: Vocab) -> None:
    parameters = {"type": "object", "properties": {"a": True, "b": {"$ref": "#"}}, "title": "T"}
    tool = function("f", parameters)
    for choice in ("auto", "required", "none"):
        shown = render(vocab, tool, tool_choice=choice).text
        assert '"a": true' in shown and '{"$ref": "#"}' in shown
    assert render(vocab, tool).text == render(vocab, tool, tool_choice="none").text


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "maxLength": 5}, "maxLength"),
        ({"type": "string", "pattern": "b"}, "pattern"),
        ({"type": "string", "pattern": "^a|b$", "maxLength": 3}, "pattern"),
        ({"type": ["string", "integer"]}, "type"),
        ({"anyOf": [TEXT, {"const": 5}]}, "const"),
        ({"anyOf": [TEXT, {"type": "number", "minimum": 0}]}, "the range"),
        ({"anyOf": [TEXT, {"type": "object", "required": ["a"]}]}, "required"),
        ({"anyOf": [{"enum": ["a"]}, {"type": "number"}]}, "enum"),
        ({"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"enum": [True]}]}, "pattern"),
    ],
)
def test_what_does_not_hold_is_told(vocab: Vocab, schema: Json, keyword: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    notes = render(vocab, function("f", parameters)).notes
    assert any(f"{keyword} at #/properties/x" in note for note in notes), notes
    with pytest.raises(FieldError, match="of the strict function f: "):
        render(vocab, function("f", parameters, strict=True))


def test_arguments_of_alternatives_can_be_given(vocab: Vocab) -> None:
    """To llama.cpp a function whose schema is no plain object has no arguments."""
    a, b = {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
            "required": ["kind", "n"]}, {"type": "object", "properties": {"kind": {"const": "b"}},
                                         "required": ["kind"]}  # fmt: skip
    tool = function("f", {"anyOf": [a, b]})
    notes = render(vocab, tool).notes
    assert any("anyOf at # is not enforced in this template's calls" in note for note in notes)
    calls = [arguments for _, arguments in calls_of(vocab, tool)]
    assert {call["kind"] for call in calls} == {"a", "b"}
    assert any("n" in call for call in calls)
    with pytest.raises(FieldError, match="anyOf at # is not enforced"):
        render(vocab, function("f", {"anyOf": [a, b]}, strict=True))


def test_a_reference_at_the_root_is_an_object(vocab: Vocab) -> None:
    tool = function("f", {"$defs": {"p": {"type": "object", "properties": {"x": {"enum": ["a"]}},
                    "required": ["x"]}}, "$ref": "#/$defs/p"}, strict=True)  # fmt: skip
    assert calls_of(vocab, tool, n=3) == [("f", {"x": "a"})] * 3


def test_calls_in_json_are_held_by_llamacpp(vocab: Vocab) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 5}}}
    strict = function("f", parameters, strict=True)
    assert "char{0,5}" in grammar_of(render(vocab, strict, source=tiny_vocab.CHATML_JSON))


@pytest.mark.parametrize("source", ["", tiny_vocab.CHATML_JSON])
def test_a_demanded_call_comes_in_every_reply_and_text_may_stand_before_it(
    vocab: Vocab, source: str
) -> None:
    tool = function("f", {"type": "object", "properties": {"x": {"enum": ["a"]}}})
    rendered = render(vocab, tool, source=source, enable_thinking=True)
    grammar = read_grammar(grammar_of(rendered))
    said = set()
    for seed in range(40):
        reply = grammar.text(seed, most=3)
        start = str(rendered.sampling.extra["generation_prompt"])
        if not reply.startswith(start):  # it thinks without the line break of the prompt
            continue
        reader = render(vocab, tool, source=source, enable_thinking=True).reader()
        first = reader.feed([TokenEvent(1000, reply.removeprefix(start).encode())])
        last = reader.finish("stop")
        calls = [call for call in (*first.calls, *last.calls) if call.name is not None]
        assert calls and {call.name for call in calls} == {"f"}
        assert reader.finish_reason("stop") == "tool_calls"
        said.add(bool((first.content + last.content).strip()))
    assert said == {False, True}


def test_a_least_length_of_nothing_demands_nothing() -> None:
    """It is told as one that has no grammar, and costs a tool that is not strict no request."""
    for least in (-5, -0.5):
        argument = {"type": "string", "minLength": least}
        normal = normal_schema({"type": "object", "properties": {"a": argument}})
        assert text_rules(normal) == (ANY_TEXT,)
