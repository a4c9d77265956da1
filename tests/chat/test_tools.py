"""Tools: how they are shown, what calls of them are held to, and what is told of the rest."""

import json
from typing import Any

import pytest
import tiny_vocab
from gbnf import read_grammar
from rendering import (
    LOOK,
    NEVER,
    OTHER,
    SHORT,
    WIDE,
    constraint,
    message,
    render,
    text_of,
    tool,
    user,
)

from kvmem.chat.fields import FieldError
from kvmem.chat.reply import ReplyMessage
from kvmem.engine.events import TokenEvent
from kvmem.errors import UnsupportedContentError
from kvmem.llama.vocab import Vocab


def test_spans_stay_exact_beside_tools_and_results(vocab: Vocab) -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": '{"place": "Oslo"}'}}
    said = [
        message("system", "be brief"),
        user("how warm is it in Oslo?"),
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "1", "content": '{"degrees": 21}'},
    ]
    rendered = render(vocab, *said, tools=[LOOK, OTHER] * 25, parallel_tool_calls=True)
    assert text_of(vocab, rendered, rendered.prompt.query_span) == "how warm is it in Oslo?"
    spans = [(s.role, text_of(vocab, rendered, s.span)) for s in rendered.prompt.spans]
    assert spans == [(m["role"], m["content"]) for m in said]


def fifty() -> list[dict[str, Any]]:
    """Tools with a name, arguments and demands of their own each."""
    kinds: list[Any] = [
        {"type": "integer", "minimum": 3, "maximum": 40}, {"enum": ["red", "blue"]},
        {"type": "boolean"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]},
    ]  # fmt: skip
    made = [tool(f"act_{i}", **{f"a{i}": kinds[i % 5], f"b{i}": {}}) for i in range(50)]
    for i, one in enumerate(made):
        one["function"]["parameters"]["required"] = [f"a{i}"]
    return made


VALUES = ["7", "red", "true", "[1,2]", '{"x":null}']
WRONG = ["2", "green", "1", "[1,2,3]", '{"x":1}']


@pytest.mark.parametrize("form", ["xml", "json"])
@pytest.mark.parametrize("choice", ["auto", "required", "act_49"])
def test_fifty_tools(vocab: Vocab, form: str, choice: str) -> None:
    """Each is shown; what a call of any may be is the grammar's, and the last one is read."""
    demanded = choice if choice != "act_49" else {"type": "function", "function": {"name": choice}}
    fields: dict[str, Any] = {
        "source": tiny_vocab.CHATML_TOOLS if form == "xml" else tiny_vocab.CHATML_JSON,
        "tools": fifty(), "tool_choice": demanded, "parallel_tool_calls": False,
        "enable_thinking": False,
    }  # fmt: skip
    rendered = render(vocab, **fields)
    assert rendered.notes == ()
    for i in range(50):
        assert f'"act_{i}"' in rendered.text and f'"a{i}"' in rendered.text
    grammar = read_grammar(constraint(rendered)["grammar"])
    # one that holds from the beginning begins with how the prompt ends
    before = "" if choice == "auto" else rendered.text[rendered.text.rindex("<|im_start|>") :]
    for i in (*range(45, 50), 0, 23):
        may_call = choice != "act_49" or i == 49
        for argument, value, fits in (
            (f"a{i}", VALUES[i % 5], may_call),
            (f"a{i}", WRONG[i % 5], False),
            (f"a{(i + 1) % 50}", VALUES[i % 5], False),
        ):
            said = before + call_of(form, f"act_{i}", argument, value)
            assert grammar.accepts(said) == fits, said
    reader = rendered.reader()
    message = ReplyMessage()
    for letter in call_of(form, "act_49", "a49", VALUES[4]).encode():
        message.add(reader.feed([TokenEvent(1000, bytes([letter]))]))
    message.add(reader.finish("stop"))
    [call] = message.calls
    assert (call.name, json.loads(call.arguments)) == ("act_49", {"a49": {"x": None}})


def call_of(form: str, name: str, argument: str, value: str) -> str:
    if form == "xml":
        said = f"<function={name}>\n<parameter={argument}>\n{value}\n</parameter>\n</function>"
    else:
        value = value if value[0] in "[{0123456789t" else json.dumps(value)
        said = f'{{"name": "{name}", "arguments": {{"{argument}": {value}}}}}'
    return f"<tool_call>\n{said}\n</tool_call>"


def test_tool_choices(vocab: Vocab) -> None:
    tools = [LOOK, OTHER]
    auto = render(vocab, tools=tools)
    assert constraint(auto)["lazy"]
    required = render(vocab, tools=tools, tool_choice="required")
    assert not constraint(required)["lazy"]
    named = {"type": "function", "function": {"name": "other"}}
    one = render(vocab, tools=tools, tool_choice=named)
    assert not constraint(one)["lazy"]
    assert "other" in constraint(one)["grammar"] and "look" not in constraint(one)["grammar"]
    assert one.text == auto.text == required.text  # the prompt's beginning stays cached
    none = render(vocab, tools=tools, tool_choice="none")
    assert "constraint" not in none.sampling.extra
    assert "look" in none.text


def test_parallel_calls_as_asked_or_as_the_template_has_them(vocab: Vocab) -> None:
    several = constraint(render(vocab, tools=[LOOK]))["grammar"]
    assert several == constraint(render(vocab, tools=[LOOK], parallel_tool_calls=True))["grammar"]
    assert several != constraint(render(vocab, tools=[LOOK], parallel_tool_calls=False))["grammar"]


def test_tools_of_other_types_are_left_out_with_a_note(vocab: Vocab) -> None:
    rendered = render(vocab, tools=[{"type": "web_search"}, LOOK])
    assert "look" in rendered.text and "web_search" not in rendered.text
    assert rendered.notes == (
        "tools[0] has the type 'web_search' and is left out: only functions are known",
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"anyOf": [SHORT, {"type": "string"}]},
        {"$ref": "#/properties/b"},
        {"type": "array", "items": SHORT},
        {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]},
        {"enum": [1, 2]},
    ],
)
def test_a_strict_function_that_demands_nothing_of_a_text(vocab: Vocab, schema: Any) -> None:
    """Any text is right, or none is and JSON is enforced."""
    assert render(vocab, tools=[tool("f", strict=True, a=schema, b={"type": "string"})]).notes == ()


def test_demands_on_loose_tools_are_told(vocab: Vocab) -> None:
    """A schema that is not strict guides the model; what it is not held to, the report says."""
    rendered = render(
        vocab,
        tools=[tool("f", a={"type": "string", "maxLength": 3}, b={"not": {}, "type": "null"})],
    )
    assert rendered.notes == (
        "tools[0].function.parameters of f: not at #/properties/b has no grammar",
        "tools[0].function.parameters of f: maxLength at #/properties/a is not enforced in this "
        "template's calls",
    )


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (NEVER, "minLength 5 at #/properties/a contradicts maxLength 3"),
        ({"$ref": "#/$defs/gone"}, "$ref at #/properties/a points to #/$defs/gone, which is"),
        ({"type": "colour"}, "the schema at #/properties/a is not enforced: JSON schema error"),
        ({"anyOf": []}, "anyOf at #/properties/a/anyOf must be a list of schemas"),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "const at #/properties/a 1 contradicts 2"),
        (WIDE, "the schema at #/properties/a is not enforced: "),
        (5, "the schema at #/properties/a must be an object"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_broken_schema_costs_a_loose_tool_no_more_than_that_argument(
    vocab: Vocab, broken: Any, reason: str, choice: str
) -> None:
    """The rest is enforced, and the report says what is not."""
    loose = tool("f", a=broken, b={"type": "integer"})
    loose["function"]["parameters"]["required"] = ["a", "b"]
    rendered = render(vocab, tools=[LOOK, loose], tool_choice=choice)
    assert any(
        note.startswith(f"tools[1].function.parameters of f: {reason}") for note in rendered.notes
    ), rendered.notes
    grammar = constraint(rendered)["grammar"]
    sound = tool("f", a={}, b={"type": "integer"})
    sound["function"]["parameters"]["required"] = ["a", "b"]
    assert grammar == constraint(render(vocab, tools=[LOOK, sound], tool_choice=choice))["grammar"]
    loose["function"]["strict"] = True
    with pytest.raises(FieldError, match="of the strict function f"):
        render(vocab, tools=[LOOK, loose], tool_choice=choice)


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_an_all_of_that_leads_back_to_itself(vocab: Vocab, choice: str) -> None:
    """llama.cpp would follow it until its stack ends, and the process with it."""
    for parts in ([True, {"$ref": "#"}], [{"$ref": "#"}, {"minProperties": 1}]):
        rendered = render(vocab, tools=[tool("f", a={"allOf": parts})], tool_choice=choice)
        assert '"allOf"' in rendered.text
    assert choice == "none" or any("comes back to itself" in note for note in rendered.notes)


def test_a_template_without_tools_says_so(vocab: Vocab) -> None:
    rendered = render(vocab, source=tiny_vocab.CHATML, tools=[LOOK])
    assert rendered.text == render(vocab, source=tiny_vocab.CHATML).text
    assert rendered.notes == (
        "the chat template has no place for tools: the model is not told of them",
    )
    with pytest.raises(UnsupportedContentError, match="no place for tools"):
        render(vocab, source=tiny_vocab.CHATML, tools=[LOOK], tool_choice="required")


def test_a_strict_function_is_held_to_its_schema_where_tools_are_not_shown(vocab: Vocab) -> None:
    strict = tool("f", strict=True, a={"type": "string", "pattern": "unanchored"})
    with pytest.raises(FieldError, match="of the strict function f: pattern at #/properties/a"):
        render(vocab, source=tiny_vocab.CHATML, tools=[strict])
