"""Which demands of a schema a grammar keeps, and which one is named because it would be lost."""

from functools import partial
from typing import Any

import pytest

from kvmem.chat.json_schema.all_of import UNMERGED, merge_all_of
from kvmem.chat.json_schema.keywords import ASSERTIONS
from kvmem.chat.json_schema.normal import normal_schema
from kvmem.chat.json_schema.schema import find_contradictions, find_oversized, find_unenforced
from kvmem.chat.json_schema.text_arguments import find_loose_texts, only_properties, text_rules
from kvmem.errors import RequestError
from kvmem.llama.grammar import check_grammar, schema_grammar
from kvmem.llama.model import Model

Json = dict[str, Any]


def obj(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def lost(model: Model, schema: Json) -> list[tuple[str, str]]:
    faults = find_unenforced(normal_schema(schema), partial(check_grammar, model))
    return [(fault.path, fault.keyword) for fault in faults]


KEYWORDS = sorted(ASSERTIONS | {"$defs", "title"})
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    "",
    "x",
    [],
    [[]],
    [None],
    {},
    [{}],
    {"a": []},
    1e308,
    10**30,
    [True, False],
    {"a": False},
)
BESIDE: tuple[Json, ...] = (
    {}, {"type": "object"}, {"type": [[]]}, {"type": 5, "enum": [1]}, {"type": [{}], "const": 1},
    {"type": "string", "anyOf": [{"type": []}]}, {"allOf": [{"type": "string"}]},
)  # fmt: skip


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_values_of_any_type_are_kept_or_lost_by_name(model: Model, keyword: str) -> None:
    for beside in BESIDE:
        for value in ODD:
            schema = {**beside, keyword: value}
            try:
                lost(model, schema)
                merge_all_of(schema)
                normal = normal_schema({"type": "object", "properties": {"a": schema}})
                list(find_loose_texts(normal, can_hold=True))
                text_rules(normal)
                only_properties(normal_schema(schema).schema)
                list(find_oversized(schema))
                list(find_contradictions(normal_schema(schema)))
            except RequestError as error:
                assert str(error)


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
        obj(a={"type": "string", "pattern": "^a\\!$"}),  # case R23
        obj(a={"type": ["string", "null"], "minLength": 2}),
        obj(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        obj(a={"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
        {"$defs": {"n": obj(next={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"allOf": [{"properties": {"a": {}}, "type": "object"}, {"properties": {"b": {}}}]},
        {"type": "integer", "minimum": -(10**15), "maximum": 2**62},
        {"type": "integer", "minimum": 10**17, "exclusiveMaximum": 10**18},
        {"type": "integer", "minimum": 10**15},
    ],
)  # fmt: skip
def test_what_a_grammar_keeps(model: Model, schema: Json) -> None:
    assert lost(model, schema) == []


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        (obj(a={"type": "string", "pattern": "^(?=a)b$"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "pattern": "^(a$"}), "#/properties/a", "pattern"),
        (obj(a={"type": "string", "format": "regex"}), "#/properties/a", "format"),
        (obj(a={"type": "number", "minimum": 1, "multipleOf": 0.5}), "#/properties/a",
         "multipleOf"),
        (obj(a={"minimum": 1}), "#/properties/a", "minimum"),
        (obj(a={"type": "integer", "multipleOf": 3}), "#/properties/a", "multipleOf"),
        (obj(a={"type": "array", "uniqueItems": True}), "#/properties/a", "uniqueItems"),
        (obj(a={"type": "array", "items": {"not": {"type": "null"}}}), "#/properties/a/items",
         "not"),
        (obj(a={"type": "string", "pattern": r"^a\b$", "maxLength": 3}), "#/properties/a",
         "maxLength"),
        (obj(a={"type": "string", "pattern": "^a+$", "format": "regex"}), "#/properties/a",
         "format"),
        ({"type": "object", "patternProperties": {}}, "#", "patternProperties"),
        ({"type": "object", "minProperties": 1}, "#", "minProperties"),
        ({"anyOf": [{"type": "string", "if": {}}]}, "#/anyOf/0", "if"),
        (obj(x={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"contains": {}, "type": "array"}}},
         "#/$defs/a", "contains"),
        ({"$ref": "#/$defs/b"}, "#", "$ref"),
        ({"items": [{}], "$ref": "#/items/²"}, "#", "$ref"),
        ({"$ref": "https://example.com/x"}, "#", "$ref"),
        ({"type": "colour"}, "#", "type"),
        ({"anyOf": []}, "#/anyOf", "anyOf"),
        ({"type": "string", "minLength": -1}, "#", "minLength"),
        ({"allOf": [obj(a={}), obj(b={})]}, "#", "allOf"),
        (obj(a={"allOf": 5}), "#/properties/a", "allOf"),
        (obj(a={"allOf": [5]}), "#/properties/a", "allOf"),
        ({"type": "integer", "minimum": 10**25}, "#", "minimum"),
        ({"type": "integer", "maximum": 2**63}, "#", "maximum"),
        ({"type": "integer", "minimum": -(2**63)}, "#", "minimum"),
        ({"type": "integer", "minimum": 2**63 - 8, "maximum": 2**63 - 1}, "#", "maximum"),
        ({"type": "integer", "minimum": 2**53}, "#", "minimum"),
        ({"type": "string", "maxLength": 2001}, "#", "maxLength"),
        ({"type": "string", "pattern": "^a{5,3}$"}, "#", "pattern"),
        (obj(a=5), "#/properties/a", "the schema"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_named(model: Model, schema: Json, path: str, keyword: str) -> None:
    assert (path, keyword) in lost(model, schema)


def test_a_grammar_is_what_it_says(model: Model) -> None:
    text = schema_grammar({"enum": ["yes", "no"]})
    assert "yes" in text
    check_grammar(model, text)
    with pytest.raises(RequestError, match="line 1, rule root: a parenthesis is not closed"):
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
        (
            obj(**{f"p{i}": {} for i in range(501)}),
            "properties at # has more than 500 that are not required",
        ),
        (
            {"allOf": [{"$ref": "#/a"}, {"type": "object"}], "a": {"$ref": "#/a"}},
            "$ref at #/a comes back to itself, or leads on 64 times",
        ),
        (
            {"allOf": [{"$ref": "#/allOf/0x"}, {}]},
            "$ref at #/allOf/0 comes back to itself, or leads on 64 times",
        ),
        ({"const": "x" * 300_000}, "the schema at # is longer than 262144 characters"),
    ],
)
def test_what_is_too_large_for_llamacpp(schema: Json, reason: str) -> None:
    assert [str(fault) for fault in find_oversized(schema)][:1] == [reason]
    assert list(find_oversized(nested(20))) == []


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 3},
         "minLength 5 at # contradicts maxLength 3"),
        (obj(a={"minItems": 5, "maxItems": 3}),
         "minItems 5 at #/properties/a contradicts maxItems 3"),
        ({"minProperties": 2, "maxProperties": 1},
         "minProperties 2 at # contradicts maxProperties 1"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum 5 at # contradicts maximum 3"),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6},
         "exclusiveMinimum and exclusiveMaximum at # leave no integer"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8},
         "minimum and maximum at # leave no integer"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
         "multipleOf 5 at # has no number where minimum and maximum leave one"),
        ({"type": "number", "minimum": 2, "maximum": 1}, "minimum 2 at # contradicts maximum 1"),
        ({"type": ["integer", "number"], "minimum": 2, "maximum": 1},
         "minimum 2 at # contradicts maximum 1"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]},
         'type at # "integer" contradicts "string"'),
        ({"allOf": [{"enum": [1, 2]}, {"enum": ["a"]}]}, 'enum at # [1, 2] contradicts ["a"]'),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "const at # 1 contradicts 2"),
        ({"allOf": [{"const": 1}, {"enum": [2, 3]}]}, "const at # is not in enum"),
        ({"allOf": [{"const": 1}, {"type": "string"}]}, "const at # is not of the type string"),
        ({"type": "integer", "enum": ["a"]}, "enum at # has no value of the type integer"),
        ({"enum": []}, "enum at # has no value"),
        ({"allOf": [{}, False]}, "allOf at # has a part that no value fits"),
        ({"type": "integer", "allOf": [{"minimum": 5}, {"maximum": 3}]},
         "minimum 5 at # contradicts maximum 3"),
        ({"type": "string", "allOf": [{"minLength": 5}, {"maxLength": 3}]},
         "minLength 5 at # contradicts maxLength 3"),
        ({"$defs": {"a": {"minItems": 2}}, "type": "array", "maxItems": 1,
          "allOf": [{"$ref": "#/$defs/a"}]}, "minItems 2 at # contradicts maxItems 1"),
        ({"type": "object", "allOf": [{"properties": {"a": {"type": "null"}}},
          {"properties": {"a": {"type": "string"}}, "required": ["a"]}]},
         'type at #/properties/a "null" contradicts "string"'),
        ({**obj(a={"$ref": "#/$defs/a"}), "required": ["a"], "$defs": {"a": {"enum": []}}},
         "enum at #/$defs/a has no value"),
        ({"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, {"enum": []}]},
         "minLength 2 at #/anyOf/0 contradicts maxLength 1"),
        ({"type": "string", "anyOf": [{"type": "null"}, {"type": "integer"}]},
         'type at #/anyOf/0 "string" contradicts "null"'),
        ({"type": "array", "minItems": 1, "items": {"enum": []}}, "enum at #/items has no value"),
        ({"type": "array", "prefixItems": [{}, {"enum": []}]},
         "enum at #/prefixItems/1 has no value"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "additionalProperties": True},
         "enum at #/properties/a has no value"),
        ({"type": "string", "pattern": "a", "minLength": 2, "maxLength": 1},
         "minLength 2 at # contradicts maxLength 1"),
        ({"type": "string", "format": "date", "minLength": 11},
         "format and minLength at # fit no text"),
        ({"type": "string", "format": "uuid", "pattern": "^x$", "minLength": 2},
         "pattern and minLength at # fit no text"),
        ({"type": "string", "pattern": "^(?!a)a$"}, "pattern at # fits no text"),
        ({"type": "integer", "enum": [1, 2], "minimum": 3}, "enum at # has no value that fits "
         "minimum 3"),
        ({"const": "abc", "maxLength": 2}, "const at # does not fit maxLength 2"),
        ({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]},
         "pattern at # fits no text"),
        (obj(a={"not": {}, "x-no-value": 5}), "not at #/properties/a fits no value"),
        ({"$defs": {"n": {**obj(next={"$ref": "#/$defs/n"}), "required": ["next"]}},
          "$ref": "#/$defs/n"}, "$ref at #/properties/next to #/$defs/n never comes to an end"),
        ({**obj(a={"$ref": "#"}), "required": ["a"]},
         "$ref at #/properties/a to # never comes to an end"),
    ],
)  # fmt: skip
def test_schemas_without_a_value(schema: Json, fault: str) -> None:
    """Also those that become so where parts are merged."""
    assert str(next(find_contradictions(normal_schema(schema)))) == fault
    for values in ({"const": schema}, {"default": schema}, {"enum": [schema]}):
        assert list(find_contradictions(normal_schema(values))) == []


def test_properties_may_be_called_as_keywords() -> None:
    never: Json = {"type": "string", "minLength": 2, "maxLength": 1}
    found = normal_schema(obj(default=never, enum=never, minLength={"const": never}))
    paths = {path for path, _ in found.contradictions}
    assert paths == {"#/properties/default", "#/properties/enum"}


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?i)abc", "has a group that begins with (?i), which no grammar knows"),
        ("a(?#b)", "has a comment"),
        ("(?<=a)b", "looks around"),
    ],
)
def test_the_reason_is_the_patterns_own(pattern: str, reason: str) -> None:
    faults = find_unenforced(normal_schema({"type": "string", "pattern": pattern}))
    assert reason in str(next(faults))


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, {"type": "null"}]},
         {"anyOf": [{"type": "null"}]}),
        (obj(a=False, b={"type": "null"}), obj(b={"type": "null"})),
        ({"type": "array", "items": False}, {"type": "array", "maxItems": 0}),
        ({"type": ["string", "null"], "minLength": 2, "maxLength": 1}, {"type": "null",
         "minLength": 2, "maxLength": 1}),
        ({"type": ["string", "null"], "format": "date", "minLength": 11}, {"type": "null"}),
    ],
)  # fmt: skip
def test_what_no_value_fits_is_left_out_where_another_does(schema: Json, left: Json) -> None:
    normal = normal_schema(schema)
    assert (normal.schema, dict(normal.contradictions)) == (left, {})


@pytest.mark.parametrize(
    ("schema", "merged"),
    [
        ({"allOf": [{"type": "integer"}]}, {"type": "integer"}),
        ({"title": "t", "allOf": [{"$ref": "#/a"}]}, {"title": "t", "$ref": "#/a"}),
        ({"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 3}]},
         {"type": "string", "minLength": 2, "maxLength": 3}),
        ({"allOf": [{"minLength": 1}, {"type": ["string", "null"]}, {"type": "string"}],
          "minLength": 2}, {"type": "string", "minLength": 2}),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"a": {"type": "null"}}}]},
         {"properties": {"a": {"type": "null"}}}),
        ({"allOf": [{"anyOf": [{"type": "null"}]}]}, {"anyOf": [{"type": "null"}]}),
        ({"allOf": [True, {"type": "null"}, True]}, {"type": "null"}),
        ({"allOf": [{"enum": [1, 2]}, {"enum": [2, True]}]}, {"enum": [2]}),
        ({"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"$ref": "#/d"}],
          "d": {"properties": {"b": {}}, "required": ["b"]}},
         {"properties": {"a": {}, "b": {}}, "required": ["a", "b"],
          "d": {"properties": {"b": {}}, "required": ["b"]}}),
        ({"items": {"allOf": [{"allOf": [{"type": "null"}]}]}}, {"items": {"type": "null"}}),
        ({"allOf": [{"allOf": [{"$ref": "#/d"}, {"minLength": 2}]}, {"maxLength": 9}],
          "d": {"allOf": [{"$ref": "#/e~1f"}, {"minLength": 1}]}, "e/f": {"type": "string"}},
         {"type": "string", "minLength": 2, "maxLength": 9,
          "d": {"allOf": [{"$ref": "#/e~1f"}, {"minLength": 1}]}, "e/f": {"type": "string"}}),
    ],
)  # fmt: skip
def test_parts_become_one_schema(schema: Json, merged: Json) -> None:
    assert merge_all_of(schema) == merged


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [obj(a={}), obj(b={})]},
        {"allOf": [{"format": "email"}, {"format": "uri"}], "type": "string"},
        {"allOf": [{"patternProperties": {"^.*$": {}}}, {"additionalProperties": False}]},
        {"allOf": [{"prefixItems": [{}]}, {"items": {"type": "null"}}]},
        {"allOf": [{"properties": {"a": {}}}, {"unevaluatedProperties": {"type": "null"}}]},
        {"allOf": [{"$ref": "#"}], "minLength": 2},
    ],
)
def test_parts_that_hide_each_other_stay(model: Model, schema: Json) -> None:
    merged = merge_all_of(schema)
    assert {**merged, UNMERGED: ""} == {**schema, UNMERGED: ""} and merged[UNMERGED]
    assert ("#", "allOf") in lost(model, schema)
    assert "allOf" not in str(normal_schema(schema).schema), "llama.cpp does not get it"


def test_what_llamacpp_would_follow_without_end_does_not_reach_it(model: Model) -> None:
    """Its own merging of an allOf overflows the stack where a part leads back to it."""
    for parts in ([True, {"$ref": "#"}], [{"$ref": "#"}, {"minProperties": 1}], [{"$ref": "#"}]):
        schema = obj(a={"allOf": parts}, b={"type": "null"})
        check_grammar(model, schema_grammar(normal_schema(schema).schema))


CHAIN = "".join(f"a{i} ::= a{i + 1}%s | a{i + 1}%s\n" for i in range(40)) + 'a40 ::= "x"'


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"{5,3}', "rule root: the repetition {5,3} has a minimum above its maximum"),
        ('root ::= ("a" # "\n){ 5 , # "\n 3 }', "line 3, rule root: the repetition {5,3}"),
        ('root ::= "a"{2001}', "at least 2001 is above 2000"),
        (f'root ::= "{"a" * 100_000}"{{2000}}', "come to more than 1048576 elements"),
        ("root ::= " + '"a"{0,2000} ' * 1000, "come to more than 1048576 elements"),
        ("root ::= x{0,2000}\nx ::= y{0,2000}\ny ::= [a]?", "begin in more than 8192 ways"),
        ("root ::= a0\n" + CHAIN.replace("%s", ""), "begin in more than 8192 ways"),
        ("root ::= a0\n" + CHAIN.replace("%s", " [x]", 1), "line"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= b root "z" | "x"\nb ::= c\nc ::= "y" | ""', "left recursion"),
        ('root ::= "a"\n  | nope', "line 2: no rule is named nope"),
        ('a ::= "b"', "no rule is named root"),
        ('root ::= "a" \\q', "unexpected"),
        ('root ::= "abc', "a text is not closed"),
        ('root ::= "\\q"', "no such escape"),
    ],
)  # fmt: skip
def test_what_llamacpp_would_not_survive_does_not_reach_it(
    model: Model, grammar: str, reason: str
) -> None:
    with pytest.raises(RequestError) as error:
        check_grammar(model, grammar)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ("a"*)*',
        'root ::= "{5,3}" [{5,3}\\]] # {5,3}\n',
        'root ::= "\\"{5,3}" | x\nx ::= ("y" "z"){1,4}?',
        'root ::= "a"{3} "b"{2,} . | <[1]> !<[2]>',
        'root ::= "(" root ")" | ""',
    ],
)
def test_what_only_looks_like_it_is_taken(model: Model, grammar: str) -> None:
    check_grammar(model, grammar)


def test_what_is_lost_is_not_written_to_stderr(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pattern is a part of the prompt."""
    schema_grammar({"type": "string", "pattern": "a secret of the user"})
    assert lost(model, {"type": "string", "pattern": "(?=another secret)"})
    assert capfd.readouterr().err == ""
