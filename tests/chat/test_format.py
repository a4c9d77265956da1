"""What a template can do, and what it is asked for in vain."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_vocab
from gbnf import read_grammar

from kvmem.chat.fields import FieldError
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.reply import ReplyMessage
from kvmem.chat.request import parse_chat_request
from kvmem.engine.events import TokenEvent
from kvmem.engine.prompt import Span
from kvmem.errors import RequestError, UnsupportedContentError
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

SYSTEM_FIRST = (
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DROPS_LATE_SYSTEM = (
    "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
    "{{- m.role + ': ' + m.content + '\\n' }}{%- endif %}{%- endfor %}"
)
ALTERNATES = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first %}{{- '[S]' + m.content + '[/S]' }}"
    "{%- elif (m.role == 'user') != (ns.n % 2 == 0) or m.role == 'system' %}"
    "{{- raise_exception('roles must alternate') }}"
    "{%- else %}{%- set ns.n = ns.n + 1 %}{{- '[' + m.role + ']' + m.content + '[/]' }}{%- endif %}"
    "{%- endfor %}"
)
NO_LONG_WORDS = (
    "{%- for m in messages %}{%- if m.content | length > 30 %}"
    "{{- raise_exception('too long for me') }}{%- endif %}{{- m.content }};{%- endfor %}"
)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def user(content: Any) -> dict[str, Any]:
    return message("user", content)


def tool(name: str, /, strict: bool = False, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


SHORT = {"type": "string", "maxLength": 3}
WIDE = {"type": "integer", "minimum": 2**63 - 808, "maximum": 2**63 - 1}
LOOP = {"$ref": "#/properties/b"}
NEVER = {"type": "string", "minLength": 5, "maxLength": 3}
LOOK = tool("look", place={"type": "string"})
OTHER = tool("other", n={"type": "integer"})


@pytest.fixture(scope="module")
def vocab(tiny_llama: Path) -> Iterator[Vocab]:
    with Model(tiny_llama) as model:
        yield Vocab(model)


def render(vocab: Vocab, *messages: Any, source: str = "", **fields: Any) -> RenderedChat:
    with ChatTemplate(vocab.model, source) as template:
        request = parse_chat_request({"messages": list(messages) or [user("hi")], **fields})
        return ChatRenderer(template, vocab).render(request)


def text_of(vocab: Vocab, rendered: RenderedChat, span: Span | None) -> str:
    assert span is not None, rendered.prompt.query_fallback
    return vocab.detokenize(rendered.prompt.tokens[span.start : span.stop])


@pytest.mark.parametrize("source", [SYSTEM_FIRST, DROPS_LATE_SYSTEM, tiny_vocab.CHATML_TOOLS])
@pytest.mark.parametrize("first", ["system", "developer"])
def test_instructions_anywhere(vocab: Vocab, source: str, first: str) -> None:
    """Case R12: each text once, in order, and the next turn begins with the same tokens."""
    for roles in (
        [first, "user"],
        [first, "user", "assistant", first, "user"],
        [first, first, "user"],
        ["user", first],
    ):
        said = [message(role, f"text number {i}") for i, role in enumerate(roles)]
        rendered = render(vocab, *said, source=source)
        places = [rendered.text.index(m["content"]) for m in said]
        assert places == sorted(places)
        assert [rendered.text.count(m["content"]) for m in said] == [1] * len(said)
        last_user = max(i for i, role in enumerate(roles) if role == "user")
        assert text_of(vocab, rendered, rendered.prompt.query_span) == f"text number {last_user}"
        more = (message("assistant", "an answer"), user("next"))
        grown = render(vocab, *said, *more, source=source).text
        plain = render(vocab, *said, source=source, add_generation_prompt=False).text
        assert grown.startswith(plain)


@pytest.mark.parametrize("content", ["who?", [{"type": "text", "text": "who?"}]])
def test_instructions_where_roles_must_alternate(vocab: Vocab, content: Any) -> None:
    said = [
        message("developer", "one"), message("system", "two"), user("hi"),
        message("assistant", "yes"), message("system", "three"), message("system", "four"),
        user(content),
    ]  # fmt: skip
    rendered = render(vocab, *said, source=ALTERNATES)
    assert rendered.text.replace("\n\n\n", "\n\n") == (
        "[S]one\n\ntwo[/S][user]hi[/][assistant]yes[/][user]three\n\nfour\n\nwho?[/]"
    )
    assert text_of(vocab, rendered, rendered.prompt.query_span) == "who?"
    with pytest.raises(FieldError, match="roles must alternate"):
        render(vocab, user("a"), user("b"), source=ALTERNATES)


def test_a_refused_message_is_named(vocab: Vocab) -> None:
    said = [user("short"), message("assistant", "also"), user("x" * 40)]
    with pytest.raises(FieldError) as caught:
        render(vocab, *said, source=NO_LONG_WORDS)
    assert caught.value.field == "messages[2]"
    assert str(caught.value) == (
        "messages[2] (user) is refused by the chat template: too long for me"
    )


def test_the_message_is_named_by_its_place_in_the_request(vocab: Vocab) -> None:
    said = [message("system", "a"), message("system", "b"), user("x" * 40)]
    with pytest.raises(FieldError) as caught:
        render(vocab, *said, source=NO_LONG_WORDS)
    assert caught.value.field == "messages[2]"


@pytest.mark.parametrize(
    "said",
    [
        [message("assistant", None), user("hi")],
        [{"role": "assistant"}, user("hi")],
        [user([{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}])],
        [message("assistant", [{"type": "refusal", "refusal": "no"}]), user("hi")],
        [user(["h", "i"])],
        [
            {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
                {"id": "3", "type": "custom", "custom": {"name": "g", "input": "text"}},
            ]},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "2", "content": None, "cache_control": {}},
            user("hi"),
        ],
    ],
)  # fmt: skip
def test_histories_as_agents_send_them(vocab: Vocab, said: list[Any]) -> None:
    rendered = render(vocab, *said, tools=[LOOK])
    shown = text_of(vocab, rendered, rendered.prompt.query_span)
    assert shown.replace("\n", "") == "hi"


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


def constraint(rendered: RenderedChat) -> dict[str, Any]:
    found = rendered.sampling.extra["constraint"]
    assert isinstance(found, dict)
    return found


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
    ("fields", "field", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there is no function in tools"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice.function.name",
            "must be the name of one of the tools",
        ),
        ({"tools": [LOOK], "tool_choice": {"type": "x"}}, "tool_choice.type", '"function"'),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be given",
        ),
        (
            {"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"},
            "response_format, grammar",
            "exclude each other",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {
                "type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)$"}}}}}},
            "response_format",
            "has no value: pattern at #/properties/a fits no text",
        ),
        (
            {"json_schema": {"type": "string", "pattern": "^(?<=a)b$"}},
            "response_format",
            "cannot be enforced: pattern at # .* looks around",
        ),
        (
            {"json_schema": {"type": "object", "properties": {"a": 5}}},
            "response_format",
            "cannot be enforced: the schema at #/properties/a must be an object",
        ),
        ({"grammar": "root ::= ("}, "grammar", "does not parse"),
        (
            {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
            "grammar",
            "nested deeper than 64",
        ),
        (
            {"json_schema": {"type": "array", "maxItems": 1999, "items": {
                "type": "array", "maxItems": 1999, "items": {"maxLength": 1999}}}},
            "response_format",
            "cannot be enforced",
        ),
        (
            {"tools": [tool("f", strict=False, **{"x" * 300: {}})]},
            "tools[0].function.parameters",
            "of f cannot be used: a name at #/properties is longer than 256",
        ),
        (
            {"grammar": "root ::= [a]", "enable_thinking": True},
            "grammar",
            "this template has the model think first",
        ),
        (
            {"tools": [tool("f", strict=True, a={"type": "integer", "multipleOf": 3})]},
            "tools[0].function.parameters",
            "of the strict function f: multipleOf at #/properties/a has no grammar",
        ),
        (
            {"tools": [tool("f", strict=True, a={"type": "string", "maxLength": 3})]},
            "tools[0].function.parameters",
            "of the strict function f: maxLength at #/properties/a is not enforced in this",
        ),
        (
            {"tools": [tool("f", strict=True, a={"$ref": "#/properties/b"}, b=SHORT)]},
            "tools[0].function.parameters",
            "f: maxLength at #/properties/a is not enforced in this template's calls; leave it",
        ),
        (
            {"tools": [tool("f", strict=True, a={"anyOf": [SHORT, {"type": "null"}]})]},
            "tools[0].function.parameters",
            "of the strict function f: maxLength at #/properties/a is not enforced in this",
        ),
        (
            {"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(10_000))},
            "grammar",
            "has more than 4096 rules",
        ),
        ({"grammar": "root ::= " + "[a]" * 100_000}, "grammar", "is longer than 262144 characters"),
        (
            {"tools": [LOOK, tool("f", strict=True, a={"$ref": "#/$defs/gone"})]},
            "tools[1].function.parameters",
            "of the strict function f: .ref at #/properties/a points to #/.defs/gone",
        ),
        (
            {"tools": [LOOK, {"type": "function", "function": {"name": "f", "strict": True,
             "parameters": {"type": "object", "properties": {"a": NEVER}, "required": ["a"]}}}]},
            "tools[1].function.parameters",
            "of the strict function f: minLength 5 at #/properties/a contradicts maxLength 3",
        ),
        (
            {"tools": [tool("f", strict=True, a=WIDE)]},
            "tools[0].function.parameters",
            "of the strict function f: maximum at #/properties/a has no grammar beyond",
        ),
        (
            {"json_schema": {"type": "array", "minItems": 5, "maxItems": 3}},
            "response_format",
            "has no value: minItems 5 at # contradicts maxItems 3",
        ),
        (
            {"tools": [tool("f", a={"allOf": [{"$ref": "#/properties/b"}, {}]}, b=LOOP)]},
            "tools[0].function.parameters",
            "of f cannot be used: .ref at #/properties/b comes back to itself",
        ),
        ({"json_schema": WIDE}, "response_format", "maximum at # has no grammar beyond"),
        (
            {"json_schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
            "response_format",
            "uniqueItems at # has no grammar; leave it out, or give its items an enum of few",
        ),
        (
            {"json_schema": {"not": {"type": "null"}}},
            "response_format",
            "not at # has no grammar; leave it out$",
        ),
        (
            {"json_schema": {"type": "string", "pattern": "^a{5,3}$"}},
            "response_format",
            "cannot be enforced: pattern at # .*5,3., whose minimum is above its maximum",
        ),
        ({"grammar": 'root ::= "a"{5,3}'}, "grammar", "5,3. has a minimum above its maximum"),
        (
            {"json_schema": {"allOf": [{"type": "integer"}, {"type": "string"}]}},
            "response_format",
            'has no value: type at # "integer" contradicts "string"',
        ),
        ({"continue_final_message": True}, "continue_final_message", "needs an assistant message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(
    vocab: Vocab, fields: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(FieldError, match=reason) as caught:
        render(vocab, **fields)
    assert caught.value.field == field


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


def test_calls_that_a_template_does_not_show_are_told(vocab: Vocab) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [user("hi"), said, {"role": "tool", "tool_call_id": "1", "content": "so"}]
    rendered = render(vocab, *messages, source=tiny_vocab.CHATML)
    assert "look" not in rendered.text
    (note,) = rendered.notes
    assert note == "the chat template has no place for calls: those of the messages are left out"
    assert render(vocab, *messages, source=tiny_vocab.CHATML_TOOLS).notes == ()
    assert render(vocab, *messages[::2], source=tiny_vocab.CHATML).notes == ()


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


def test_an_empty_schema_is_any_value(vocab: Vocab) -> None:
    titled = constraint(render(vocab, json_schema={"title": "anything"}))
    assert constraint(render(vocab, json_schema={})) == titled
    assert "value ::=" in titled["grammar"]
    form = {"type": "json_schema", "json_schema": {"schema": {}}}
    assert constraint(render(vocab, response_format=form)) == titled


def test_one_part_of_all_of_is_the_schema(vocab: Vocab) -> None:
    wrapped = render(vocab, json_schema={"allOf": [{"type": "integer"}]})
    assert constraint(wrapped) == constraint(render(vocab, json_schema={"type": "integer"}))


def test_a_grammar_keeps_the_model_from_thinking(vocab: Vocab) -> None:
    rendered = render(vocab, grammar='root ::= "yes"')
    assert rendered.text.endswith("</think>\n\n")
    assert rendered.sampling.extra["grammar"] == 'root ::= "yes"'


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
        {"response_format": {"type": "json_schema", "schema": {"const": 5}}},
        {"response_format": {"type": "json_object", "schema": {"const": 5}}},
        {"json_schema": {"const": 5}},
    ],
)
def test_a_schema_in_each_form(vocab: Vocab, form: dict[str, Any]) -> None:
    found = constraint(render(vocab, **form))
    assert '"5"' in found["grammar"] and not found["lazy"]


def test_a_reply_that_is_continued(vocab: Vocab) -> None:
    said = [user("hi"), message("assistant", "Once upon")]
    rendered = render(vocab, *said, continue_final_message=True, enable_thinking=False)
    assert rendered.text.endswith("Once upon")
    assert render(vocab, *said, enable_thinking=False).text == rendered.text
    assert render(vocab, *said, continue_final_message=False).text.count("assistant\n") == 2
    assert render(vocab, *said, add_generation_prompt=True).text.count("assistant\n") == 2


def test_messages_that_no_template_can_read_are_a_request_error(vocab: Vocab) -> None:
    with pytest.raises(RequestError):
        render(vocab, user("\ud800"))
