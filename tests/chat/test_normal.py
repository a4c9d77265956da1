"""Schemas as llama.cpp is to get them: what its grammar allows, the client's schema does too."""

import json
import re
from enum import Enum
from functools import partial
from itertools import permutations
from typing import Any, Literal

import jsonschema
import pytest
from gbnf import FAR, read_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from zod import DATE_TIME, EMAIL, UUID

from kvmem.chat.json_schema import formats
from kvmem.chat.json_schema.language import TextDemands, length_range, write_rules
from kvmem.chat.json_schema.normal import NormalSchema, normal_schema
from kvmem.chat.json_schema.ranges import put_rules
from kvmem.chat.json_schema.schema import find_oversized, find_unenforced
from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.llama.grammar import check_grammar, schema_grammar
from kvmem.llama.model import Model

Json = dict[str, Any]


def obj(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def grammar_of(normal: NormalSchema) -> str:
    return put_rules(schema_grammar(normal.schema or {"title": "any"}), normal.ranges)


def values_of(schema: Json, n: int = 40) -> list[Any]:
    """Random values that the grammar of a schema allows, all of them valid."""
    normal = normal_schema(schema)
    grammar = read_grammar(grammar_of(normal))
    values = [json.loads(grammar.text(seed, most=2)) for seed in range(n)]
    is_old = "additionalItems" in schema
    validator = (jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator)(schema)
    for value in values:
        validator.validate(value)
    return values


def lost(model: Model, schema: Json) -> list[tuple[str, str]]:
    faults = find_unenforced(normal_schema(schema), partial(check_grammar, model))
    return [(fault.path, fault.keyword) for fault in faults]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = Field(None, max_length=10)


class Tree(BaseModel):
    label: str = Field(pattern=r"^[a-z]{1,5}\d*$")
    children: list["Tree"] = []


class Everything(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")
    tree: Tree
    pair: tuple[int, str]
    table: dict[str, float]
    choice: dict[Literal["a", "b"], int]
    level: int = Field(multiple_of=5, ge=0, le=50)
    share: float = Field(ge=0, le=1)
    when: Literal["now", "later"] | None = None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Sets(BaseModel):
    colours: set[Colour]
    words: frozenset[Literal["to", "be", "or", "not"]] = Field(min_length=1, max_length=2)
    maybe: set[bool] | None


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
CONDECIMAL = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
"""What pydantic writes for a Decimal, and for one with max_digits=5 and decimal_places=2."""

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
ENFORCED: dict[str, Json] = {
    "pydantic": Everything.model_json_schema(),
    "recursive at the root": Tree.model_json_schema(),
    "true": obj(a=True, b={"type": "null"}),
    "false": {**obj(b={"type": "null"}), "properties": {"a": False, "b": {"type": "null"}}},
    "root": {**obj(n={"type": "null"}), "properties": {"n": {"type": "null"},
             "next": {"$ref": "#"}}},
    "escaped": {"$defs": {"a/b~c": {"type": "null"}}, **obj(x={"$ref": "#/$defs/a~1b~0c"})},
    "alike": {"$defs": {"a_b": {"const": 1}, "a-b": {"const": 2}},
              **obj(x={"$ref": "#/$defs/a_b"}, y={"$ref": "#/$defs/a-b"})},
    "oneOf of types": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "oneOf of constants": {"oneOf": [{"const": 1}, {"const": "1"}, {"const": True}]},
    "oneOf of ranges": {"oneOf": [{"type": "integer", "maximum": 3},
                                  {"type": "integer", "minimum": 4, "maximum": 9}]},
    "oneOf told apart": {"oneOf": [CAT, DOG]},
    "oneOf of references": {"$defs": {"c": CAT, "d": DOG},
                            "oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]},
    "oneOf by what is there": {"oneOf": [obj(a={"type": "null"}), obj(b={"type": "null"})]},
    "one of two required": {"type": "object", "properties": {"path": {"type": "null"},
                            "url": {"type": "null"}, "n": {"type": "integer"}},
                            "oneOf": [{"required": ["path"]}, {"required": ["url"]}]},
    "any of two required": {"type": "object", "properties": {"a": {"type": "null"},
                            "b": {"type": "null"}}, "additionalProperties": False,
                            "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "beside a reference": {"$defs": {"s": {"type": "string"}},
                           "anyOf": [{"$ref": "#/$defs/s"}], "maxLength": 3},
    "never": {"anyOf": [{"not": {}}, {"type": "string", "maxLength": 2}]},
    "required but not named": {"type": "object", "required": ["a", "b"]},
    "record of names": {"type": "object", "propertyNames": {"enum": ["x", "y"]},
                        "additionalProperties": {"type": "integer"}},
    "record of patterns": {"type": "object", "patternProperties": {"^(.*)$": {"type": "null"}}},
    "old tuple": {"type": "array", "items": [{"type": "null"}, {"type": "boolean"}],
                  "additionalItems": False},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "maxItems": 9},
    "unique": {"type": "array", "items": {"type": "null"}, "maxItems": 1, "uniqueItems": True},
    "sets": obj(
        a={"type": "array", "items": {"enum": ["x", 1, 1.0, None]}, "uniqueItems": True},
        b={"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
        c={"type": "array", "items": {"type": "string", "enum": [*"abcdefgh", 9]},
           "uniqueItems": True, "maxItems": 9},
        d={"type": "array", "items": {"const": {"k": [1]}}, "uniqueItems": True}),
    "pydantic's sets": Sets.model_json_schema(),
    "no items": {"type": "array", "items": False},
    "one bound": obj(a={"type": "integer", "minimum": 1024}, b={"type": "integer", "maximum": -100},
                     c={"type": "integer", "exclusiveMaximum": 0},
                     d={"type": ["integer", "null"], "minimum": 2000},
                     e={"type": "number", "minimum": 1000}),
    "multiples": {"type": "integer", "minimum": 3, "maximum": 20, "multipleOf": 4},
    "whole numbers": {"type": "number", "multipleOf": 1},
    "tight bounds": {"type": "integer", "minimum": 1.5, "exclusiveMinimum": 2, "maximum": 9.9,
                     "exclusiveMaximum": 9},
    "numbers": obj(a={"type": "number", "minimum": 0, "maximum": 1},
                   b={"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 0},
                   c={"anyOf": [{"type": "number", "minimum": 0.5}, {"type": "null"}]},
                   d={"type": ["integer", "number", "null"], "maximum": 1.25}),
    "oneOf of numbers": {"oneOf": [{"type": "number", "maximum": 1},
                                   {"type": "number", "minimum": 1.5}]},
    "enum of a type": {"type": ["string", "null"], "enum": ["a", 1, None]},
    "const of a type": {"type": "integer", "const": 3, "enum": [1, 3]},
    "counted": {**obj(a={"type": "null"}), "minProperties": 1, "maxProperties": 3},
    "shut": {**obj(a={"type": "null"}), "unevaluatedProperties": False},
    "joined": {"allOf": [obj(a={"minimum": 1, "type": "integer"}),
                         obj(a={"type": "integer", "minimum": 5, "maximum": 8})]},
    "annotations": {"type": "string", "maxLength": 3, "x-order": 1, "markdownDescription": "m",
                    "format": "password", "enumNames": ["A"], "nullable": True, "default": 1},
    "formats": obj(a={"type": "string", "format": "email"}, b={"type": "string", "format": "uri"},
                   c={"type": "string", "format": "ipv4"}, d={"format": "hostname"},
                   e={"type": "integer", "format": "int32"}, f={"format": "duration"}),
    "patterns": obj(a={"type": "string", "pattern": "b"}, b={"type": "string", "pattern": "^.x"},
                    c={"type": "string", "pattern": r"^\d\D$"}),
    "a format beside a pattern": obj(
        a={"type": "string", "format": "email", "pattern": EMAIL},
        b={"type": "string", "format": "uuid", "pattern": UUID},
        c={"type": "string", "format": "date-time", "pattern": DATE_TIME},
        d={"type": ["string", "null"], "pattern": "^(?=.*[0-9])[a-z0-9]+$"}),
    "a pattern that its format does not know": obj(
        a={"type": "string", "format": "time", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}),
    "lengths beside them": obj(
        a={"type": "string", "format": "date", "minLength": 1, "maxLength": 10},
        b={"type": "string", "format": "email", "minLength": 1, "maxLength": 12},
        c={"type": "string", "pattern": "^[a-z]+( [a-z]+)*$", "minLength": 2, "maxLength": 7},
        d={"type": "string", "format": "json-pointer", "minLength": 1}),
    "HttpUrl": obj(a={"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
                   b={"type": "string", "format": "uri", "maxLength": 255},
                   c={"type": "string", "format": "email", "minLength": 3, "maxLength": 60}),
    "zod's email of a length": obj(a={"type": "string", "format": "email", "pattern": EMAIL,
                                      "maxLength": 255}),
    "Decimal": obj(a={"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
                   b={"anyOf": [{"type": "null"}, {"type": "string", "pattern": CONDECIMAL}]}),
    "values beside bounds": obj(
        a={"type": "integer", "enum": [1, 2, 3], "minimum": 2, "maximum": 3, "pattern": "x"},
        b={"type": "string", "enum": ["a", "b", "abc"], "minLength": 1, "maxLength": 2},
        c={"const": 0.75, "multipleOf": 0.25, "exclusiveMinimum": 0},
        d={"enum": ["x", 4, 5, [1]], "minimum": 4, "exclusiveMaximum": 5,
           "maxItems": 1, "required": ["q"]}),
    "several patterns": obj(
        a={"type": "string", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*b$"}]},
        b={"type": "string", "pattern": "^[a-z]+$", "allOf": [{"pattern": "x"}], "maxLength": 4}),
    "names by reference": {"$defs": {"n": {"allOf": [{"enum": ["x", "y"]}, {"type": "string"}]}},
                           "type": "object", "propertyNames": {"$ref": "#/$defs/n"},
                           "additionalProperties": {"type": "null"}},
    "one name": {"type": "object", "propertyNames": {"const": "x"}},
    "allOf behind a reference": {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}, {"minLength": 2}]},
                  "b": {"type": "string"}},
        "allOf": [{"$ref": "#/$defs/a"}, {"maxLength": 4}]},
    "recursive beside anyOf": {"$defs": {"n": {"type": "object", "additionalProperties": False,
        "properties": {"v": {"type": "integer"}, "next": {"type": ["object", "null"],
            "anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "next"]}},
        "$ref": "#/$defs/n"},
    "recursive alternatives": {"$defs": {
        "not": {"type": "object", "properties": {"op": {"const": "not"},
                "of": {"$ref": "#/$defs/any"}}, "required": ["op", "of"]},
        "is": {"type": "object", "properties": {"op": {"const": "is"}, "name": {"type": "null"}},
               "required": ["op"]},
        "any": {"type": "object", "required": ["op"],
                "anyOf": [{"$ref": "#/$defs/not"}, {"$ref": "#/$defs/is"}]}},
        "$ref": "#/$defs/any"},
    "never in one of two": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 2},
                                      {"type": "null"}]},
    "null keywords": {"type": "string", "maxLength": 4, "enum": None, "minLength": None},
    "named as keywords": obj(enum={"allOf": [{"type": "integer"}]}, default={"oneOf": [
        {"type": "null"}, {"type": "boolean"}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_what_a_grammar_allows_is_valid(model: Model, name: str) -> None:
    schema = ENFORCED[name]
    written = {k: v for k, v in schema.items() if v is not None}
    assert lost(model, schema) == []
    values_of(written)
    normal = normal_schema(schema).schema
    assert list(find_oversized(normal)) == []


REFUSED: tuple[tuple[Json, str, str], ...] = (
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "#", "oneOf"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "#", "oneOf"),
    ({"oneOf": [{}, {"type": "null"}]}, "#", "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "#", "oneOf"),
    ({"oneOf": [{"type": "number", "maximum": 1}, {"type": "number", "minimum": 0.5}]}, "#",
     "oneOf"),
    ({"oneOf": [CAT, {**DOG, "properties": {"kind": {"type": "string"}}}]}, "#", "oneOf"),
    ({"oneOf": [{**CAT, "additionalProperties": True},
                {"type": "object", "required": ["x"]}]}, "#", "oneOf"),
    ({"$defs": {"a": {"oneOf": [{}, {}]}}, "$ref": "#/$defs/a"}, "#", "oneOf"),
    (obj(a={"$ref": "#/properties/b"}, b={"oneOf": [{}, {}]}), "#/properties/b", "oneOf"),
    ({"type": "string", "format": "idn-email"}, "#", "format"),
    ({"type": "string", "pattern": "^(?<=a)"}, "#", "pattern"),
    ({"type": "array", "prefixItems": [{}], "items": {}}, "#", "prefixItems"),
    ({"type": "array", "items": {}, "uniqueItems": True}, "#", "uniqueItems"),
    ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "#", "uniqueItems"),
    ({"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}, "#",
     "uniqueItems"),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "enum": [[1, 2], [1, 1]]},
     "#", "uniqueItems"),
    ({"allOf": [{"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
                {"const": [True, True]}]}, "#", "uniqueItems"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "#", "multipleOf"),
    ({"type": "number", "minimum": 0, "multipleOf": 0.5}, "#", "multipleOf"),
    ({"type": "number", "minimum": 1e20}, "#", "minimum"),
    ({"type": "object", "patternProperties": {"^a": {}}}, "#", "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "#", "propertyNames"),
    ({**obj(a={}), "required": ["b"], "additionalProperties": False}, "#", "required"),
    ({"type": "object", "if": {}, "then": {}}, "#", "if"),
    ({**obj(), "dependentRequired": {"a": ["b"]}}, "#", "dependentRequired"),
    ({"not": {"type": "null"}}, "#", "not"),
    ({"type": "object", "propertyNames": {"$ref": "#/nope"}}, "#", "propertyNames"),
    ({"type": "string", "format": "email", "pattern": r"\ba"}, "#", "pattern"),
    (obj(a=False), "#/properties/a", "not"),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "keyword"), REFUSED)
def test_what_cannot_be_written_is_named(
    model: Model, schema: Json, path: str, keyword: str
) -> None:
    assert (path, keyword) in lost(model, schema)


def test_sets_come_in_any_order_where_these_can_be_counted() -> None:
    def sets(n_values: int) -> NormalSchema:
        items = {"enum": [*range(n_values)]}
        return normal_schema({"type": "array", "items": items, "uniqueItems": True})

    grammar = read_grammar(grammar_of(sets(5)))
    for values in permutations(range(5), 4):
        assert grammar.accepts(json.dumps(values, separators=(",", ":")))
    assert not grammar.accepts("[1,1]") and grammar.accepts("[]") and not sets(5).narrowed
    grammar = read_grammar(grammar_of(sets(6)))
    assert grammar.accepts("[0,3,5]") and not grammar.accepts("[3,0]")
    assert sets(6).narrowed == {("#", "uniqueItems"): "is written in the order of the values alone"}


def test_many_sets_do_not_cost_the_rest_of_a_schema(model: Model) -> None:
    sets = {"type": "array", "items": {"enum": [*range(5)]}, "uniqueItems": True}
    some = normal_schema(obj(**{f"s{i}": sets for i in range(14)}, n={"const": 1}))
    assert not list(find_unenforced(some, partial(check_grammar, model)))
    assert [path for path, _ in some.narrowed] == ["#/properties/s12", "#/properties/s13"]
    read_grammar(grammar_of(some))
    many = obj(**{f"s{i}": sets for i in range(60)}, n={"const": 1})
    assert {keyword for _, keyword in lost(model, many)} == {"uniqueItems"}
    assert normal_schema(many).schema["required"] == many["required"]


def test_a_branch_is_narrowed_to_what_tells_it_apart() -> None:
    """Without its kind, a cat would be a dog too: pydantic has no required field with a default."""
    values = values_of({"oneOf": [CAT, {**DOG, "required": []}]})
    assert {value.get("kind") for value in values} == {"cat", "dog", "wolf"}
    values = values_of(ENFORCED["one of two required"])
    assert {next(iter(value)) for value in values} == {"path", "url"}


def test_references_have_names_of_their_own() -> None:
    """llama.cpp keeps one rule for all paths of the same letters, in all tools of a request."""
    one = normal_schema({"$defs": {"x": {"const": 1}}, **obj(a={"$ref": "#/$defs/x"})})
    two = normal_schema({"$defs": {"x": {"const": 2}}, **obj(a={"$ref": "#/$defs/x"})})
    assert one.origins.keys().isdisjoint(two.origins)
    assert list(one.origins.values()) == ["#/$defs/x"]


def test_a_long_chain_of_references_is_no_recursion() -> None:
    defs = {f"d{i}": obj(a={"$ref": f"#/$defs/d{i + 1}"}) for i in range(900)}
    chain = {"$defs": {**defs, "d900": {"type": "null"}}, "$ref": "#/$defs/d0"}
    assert len(normal_schema(chain).origins) == 900
    assert list(find_unenforced(normal_schema(chain))) == []


def test_alternatives_within_alternatives_come_to_an_end(model: Model) -> None:
    wide = [{"maxLength": n} for n in range(300)]
    schema = {"type": "string", "anyOf": wide, "oneOf": [{"minLength": n} for n in range(300)]}
    assert ("#", "anyOf") in lost(model, schema)
    circle = {"$defs": {"x": {"type": "object", "anyOf": [{"$ref": "#/$defs/x"}]}},
              "$ref": "#/$defs/x"}  # fmt: skip
    normal_schema(circle)


def test_rules_of_many_texts_come_to_an_end(model: Model) -> None:
    texts = {
        f"p{i}": {"type": "string", "pattern": f"^(?!x)[a-z]{{1,{900 + i}}}$"} for i in range(20)
    }
    faults = lost(model, obj(**texts))
    assert ("#/properties/p19", "pattern") in faults and (
        "#/properties/p0",
        "pattern",
    ) not in faults


def test_what_is_narrowed_is_said() -> None:
    fields = {"a": ENFORCED["HttpUrl"]["properties"]["a"],
              "b": ENFORCED["Decimal"]["properties"]["b"]}  # fmt: skip
    said = {place: how[:40] for place, how in normal_schema(obj(**fields)).narrowed.items()}
    assert said == {
        ("#/properties/a", "format"): "'uri' is written up to 881 letters",
        ("#/properties/b/anyOf/1", "pattern"): f"is left out: {CONDECIMAL!r}"[:40],
    }
    assert values_of(obj(b=fields["b"]))[0] == {"b": None}
    assert not normal_schema(obj(a={"type": "string", "format": "uri"})).narrowed


def test_a_format_is_not_lost_where_its_short_form_has_no_text() -> None:
    """Short paths have no escapes; what the client's pattern asks for, the whole format has."""
    uri = {"type": "string", "format": "uri", "pattern": "^x:y%20+[^a]?$", "maxLength": 300}
    texts = {value["a"] for value in values_of(obj(a=uri))}
    assert texts and all(re.search(formats.PATTERNS["uri"], text) for text in texts)


def test_a_branch_that_others_exclude_is_not_left_out(model: Model) -> None:
    """What one of a oneOf refuses, another may be right for."""
    text = {"type": "string", "pattern": CONDECIMAL}
    assert ("#/oneOf/1", "pattern") in lost(model, {"oneOf": [{"type": "number"}, text]})
    assert ("#/anyOf/0", "pattern") in lost(model, {"anyOf": [text]})
    assert ("#/anyOf/1", "pattern") in lost(model, {"anyOf": [False, text]})


@pytest.mark.parametrize("name", ["email", "uri"])
def test_short_formats_are_some_of_the_format(name: str) -> None:
    for pattern in formats.SHORT[name]:
        rule, _, named = write_rules(TextDemands((pattern,))).partition("\n")
        grammar = read_grammar(f"root ::= {rule}\n{named}")
        longest = length_range(pattern)[1]
        for seed in range(100):
            text = json.loads(f'"{grammar.text(seed)}"')
            assert re.search(formats.PATTERNS[name], text) and longest and len(text) <= longest
    right = {"email": "ada.lovelace@mail.example.org", "uri": "https://example.com/a/b?c=%20d#e"}
    assert all(re.search(pattern, right[name]) for pattern in formats.SHORT[name][:2])


NAMES = st.sampled_from(["a", "b", "kind"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, "", "a", "b", "12"])
SMALL = st.integers(0, 3)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.just({}),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(
        ["null", "boolean", "integer", "number", "string", "array", "object",
         ["string", "null"], ["integer", "string"]])),
    st.builds(lambda value: {"const": value}, SCALARS),
    st.builds(lambda values, a, b: {"enum": values, "minimum": a, "maxLength": b},
              st.lists(SCALARS, min_size=1, max_size=3), SMALL, SMALL),
    st.builds(lambda a, b: {"allOf": [{"type": "string", "pattern": a}, {"pattern": b}]},
              st.sampled_from(["^a", "b$"]), st.sampled_from(["a", "^[ab]{2}$"])),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, SMALL, SMALL),
    st.builds(lambda a, b: {"type": "integer", "exclusiveMinimum": a, "multipleOf": 2,
                            "maximum": a + 5 + b}, SMALL, SMALL),
    st.builds(lambda a, b: {"type": "number", "minimum": a / 2, "exclusiveMaximum": a + b},
              SMALL, SMALL),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, SMALL, SMALL),
    st.builds(lambda p: {"type": "string", "pattern": p},
              st.sampled_from(["a", "^b", r"^\d$", "^[ab]+$", r"\s", "^(?!a)", "^(?=.*b)[ab]+$"])),
    st.builds(lambda p, a, b: {"type": "string", "pattern": p, "minLength": a, "maxLength": b},
              st.sampled_from(["a", "^b", "^[ab]+$"]), SMALL, SMALL),
    st.builds(lambda n: {"type": "string", "format": "date", "maxLength": 8 + n}, SMALL),
    st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": b}, SMALL, SMALL),
    st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/d"}, {"not": {}}]),
)  # fmt: skip


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of schemas, with keywords beside each other that speak of the same."""
    optional = {
        "type": st.sampled_from(["object", "array", "string", ["object", "null"]]),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "propertyNames": st.sampled_from(
            [{"type": "string"}, {"enum": ["a", "b"]}, {"$ref": "#/$defs/d"}]
        ),
        "patternProperties": st.builds(lambda s: {"^.*$": s}, inner),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 3),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(1, 3),
        "uniqueItems": st.booleans(),
        "unevaluatedProperties": st.just(False),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.just("#/$defs/d"),
    }
    return st.integers(1, 4).flatmap(
        lambda n: st.lists(st.sampled_from(sorted(optional)), min_size=n, max_size=n, unique=True)
        .flatmap(lambda names: st.fixed_dictionaries({k: optional[k] for k in names}))
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, larger, max_leaves=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SCHEMAS, SCHEMAS)
def test_any_schema_is_enforced_or_named(schema: Any, target: Any) -> None:
    """Whatever is not named holds for every value of the grammar."""
    if not isinstance(schema, dict):
        return
    schema = {**schema, "$defs": {"d": target}}
    if list(find_oversized(schema)):
        return
    normal = normal_schema(schema)
    if list(find_unenforced(normal)):
        return
    grammar = read_grammar(grammar_of(normal))
    assert grammar.depths["root"] < FAR, "it has a value that ends"
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(8):
        text = grammar.text(seed, most=2)
        validator.validate(json.loads(text))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schema=SCHEMAS, target=SCHEMAS, name=NAMES)
def test_any_schema_of_a_tool_that_is_not_strict_is_served(
    renderer: ChatRenderer, schema: Any, target: Any, name: str
) -> None:
    """Whatever cannot be enforced is told."""
    parameters = {"type": "object", "properties": {name: schema}, "$defs": {"d": target}}
    if list(find_oversized(parameters)):
        return
    function = {"name": "f", "parameters": parameters}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required",
            "tools": [{"type": "function", "function": function}]}  # fmt: skip
    assert renderer.render(parse_chat_request(body)).sampling.extra["constraint"]
