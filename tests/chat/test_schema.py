"""Which demands of a schema a grammar keeps, and which one is named because it would be lost."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmem.chat.schema import find_oversized, find_unenforced
from kvmem.errors import RequestError
from kvmem.llama.grammar import check_grammar, schema_grammar
from kvmem.llama.model import Model

Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


def obj(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def lost(model: Model, schema: Json) -> list[tuple[str, str]]:
    return [(f.path, f.keyword) for f in find_unenforced(schema, partial(check_grammar, model))]


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}, "required": []},
        {**obj(a={"type": "integer", "minimum": 1, "exclusiveMaximum": 9}), "required": ["a"]},
        obj(a={"type": "string", "pattern": "^[a-z]{2}-[0-9]+$", "description": "x", "title": "A"}),
        obj(a={"type": "string", "format": "date-time"}, b={"type": "string", "maxLength": 5}),
        obj(a={"enum": ["x", 3, None]}, b={"const": 4}, c={"type": "string", "enum": ["x"]}),
        obj(a={"type": ["string", "null"], "minLength": 2}),
        obj(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        obj(a={"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
        {"$defs": {"n": obj(next={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"allOf": [obj(a={"type": "string"}), obj(b={"type": "string"})]},
    ],
)  # fmt: skip
def test_what_a_grammar_keeps(model: Model, schema: Json) -> None:
    assert lost(model, schema) == []


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        (obj(a={"type": "string", "pattern": "^a\\!$"}), "#/properties/a", "pattern"),  # case R23
        (obj(a={"type": "string", "pattern": "abc"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "pattern": "^\\d$"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "pattern": "^(?=a)b$"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "pattern": "^(a$"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "format": "email"}), "#/properties/a", "format"),
        (obj(a={"type": "number", "minimum": 1}), "#/properties/a", "minimum"),
        (obj(a={"minimum": 1}), "#/properties/a", "minimum"),
        (obj(a={"type": "integer", "multipleOf": 3}), "#/properties/a", "multipleOf"),
        (obj(a={"type": "array", "uniqueItems": True}), "#/properties/a", "uniqueItems"),
        (obj(a={"type": "array", "items": {"not": {}}}), "#/properties/a/items", "not"),
        (obj(a={"type": "string", "pattern": "^a+$", "maxLength": 3}), "#/properties/a",
         "maxLength"),
        ({"type": "object", "required": ["b"]}, "#", "required"),
        ({"type": "object", "patternProperties": {}}, "#", "patternProperties"),
        ({"type": "object", "minProperties": 1}, "#", "minProperties"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "#", "maxLength"),
        ({"anyOf": [{"type": "string", "if": {}}]}, "#/anyOf/0", "if"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}, "type": "array"}}}, "#/$defs/a",
         "contains"),
        ({"$ref": "#/$defs/b"}, "#", "$ref"),
        ({"$ref": "https://example.com/x"}, "#", "$ref"),
        ({"type": "colour"}, "#", "type"),
        ({"anyOf": []}, "#/anyOf", "anyOf"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 0}, "#", "exclusiveMinimum"),
        ({"type": "array", "items": [{"type": "string"}], "maxItems": 5}, "#", "maxItems"),
        ({"type": "string", "minLength": -1}, "#", "minLength"),
        (obj(a=5), "#/properties/a", "the schema"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_would_be_lost_is_named(model: Model, schema: Json, path: str, keyword: str) -> None:
    assert (path, keyword) in lost(model, schema)


def test_a_grammar_is_what_it_says(model: Model) -> None:
    text = schema_grammar({"enum": ["yes", "no"]})
    assert "yes" in text
    check_grammar(model, text)
    with pytest.raises(RequestError, match="does not parse"):
        check_grammar(model, "root ::= (")
    with pytest.raises(RequestError, match="JSON"):
        schema_grammar({"const": float("nan")})
    with pytest.raises(RequestError, match="unrecognized type"):
        schema_grammar({"type": "colour"})


def nested(depth: int) -> Json:
    schema: Json = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (obj(**{"é" * 300: {"type": "integer"}}), "a name at #/properties is longer than 256"),
        ({"enum": [str(i) for i in range(1001)]}, "a list at #/enum has more than 1000 values"),
        (nested(100), "the schema at # is nested deeper than 64"),
        ({"const": "x" * 300_000}, "the schema at # is longer than 262144 characters"),
    ],
)
def test_what_is_too_large_for_llamacpp(schema: Json, reason: str) -> None:
    assert [str(fault) for fault in find_oversized(schema)] == [reason]
    assert list(find_oversized(nested(20))) == []


def test_what_is_lost_is_not_written_to_stderr(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pattern is a part of the prompt."""
    schema_grammar({"type": "string", "pattern": "a secret of the user"})
    assert lost(model, {"type": "string", "pattern": "another secret"})
    assert capfd.readouterr().err == ""
