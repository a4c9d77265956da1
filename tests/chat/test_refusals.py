"""What is asked for in vain is refused, by field and reason."""

from typing import Any

import pytest
from rendering import LOOK, NEVER, SHORT, WIDE, render, tool

from kvmem.chat.fields import FieldError
from kvmem.llama.vocab import Vocab

LOOP = {"$ref": "#/properties/b"}


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
