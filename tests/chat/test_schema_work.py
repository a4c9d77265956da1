"""What a schema of a client may cost: work is bounded, whatever it says."""

import tracemalloc
from typing import Any

import pytest
from work import at_most

from kvmem.chat.json_schema.normal import normal_schema
from kvmem.chat.json_schema.schema import find_contradictions, find_oversized, find_unenforced
from kvmem.chat.json_schema.text_arguments import text_rules

Json = dict[str, Any]

CALLS = 15_000_000
"""A few seconds' worth; without bounds, each of these takes minutes or has no end."""


def obj(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def ref(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


def twins() -> Json:
    """Two types that nothing tells apart, each with four ways down at every level."""
    defs: Json = {}
    for side in "AB":
        for level in range(16):
            defs[f"{side}{level}"] = obj(**dict.fromkeys("abcd", ref(f"{side}{level + 1}")))
        defs[f"{side}16"] = {"type": "string"}
    return {"$defs": defs, "oneOf": [ref("A0"), ref("B0")]}


def nested(depth: int, around: Json) -> Json:
    """A schema around itself; `around` has the next one in its property a."""
    inner: Json = {"type": "null"}
    for _ in range(depth):
        inner = {**around, "properties": {"a": inner}}
    return inner


def doubled_parts() -> Json:
    """Parts that cannot be merged, each asked for twice at every level."""
    defs: Json = {"A20": {"type": "object"}}
    for level in range(20):
        twice = {"allOf": [ref(f"A{level + 1}"), {"minProperties": 1}]}
        defs[f"A{level}"] = {
            "properties": {"x": twice, "y": twice}, "allOf": [{"$ref": "#/nowhere"}]
        }  # fmt: skip
    return {"$defs": defs, "allOf": [ref("A0"), {"type": "object"}]}


def spelled(number: int) -> str:
    """One of many spellings of `#/$defs/aaaaaaaaaaaa`."""
    letters = ("%61" if number >> place & 1 else "a" for place in range(12))
    return f"#/$defs/{''.join(letters)}"


WIDE = obj(**{f"p{n}": {"type": "null"} for n in range(900)})
SAME = {"type": "object", "properties": {"a": {"type": "null"}}}
LARGE: dict[str, Json] = {
    "oneOf of twins": twins(),
    "oneOf of long lists": {"oneOf": [
        {"enum": [f"{i}-{n}" for n in range(900)]} for i in range(25)]},
    "oneOf in a circle": {"$defs": {"a": {"anyOf": [ref("a"), {"type": "null"}]}},
                          "oneOf": [{"const": 1}, ref("a")]},
    "a type twice": nested(30, {"type": ["object", "object"], "required": ["a"]}),
    "required twice": nested(30, {"type": "object", "required": ["a", "a"]}),
    "a nested constant": {"oneOf": [{"const": {"a": {"a": {"a": {"a": {}}}}}}, {"const": 1}]},
    "texts that come to nothing": obj(**{f"p{n}": {"type": "string", "pattern":
        f"^(?!x)[a-z]*{n}(/[a-z]*)*$", "maxLength": 1999} for n in range(300)}),
    "references to the whole": {**WIDE, "anyOf": [{"$ref": "#"}] * 900,
                                "oneOf": [{"$ref": "#"}] * 900},
    "lists of references": obj(**{f"p{n}": {"anyOf": [{"$ref": "#"}] * 900} for n in range(12)}),
    "one target, many names": {"$defs": {"a" * 12: WIDE}, **obj(**{
        f"q{n}": {"$ref": spelled(n)} for n in range(900)})},
    "much beside much": {**WIDE, "anyOf": [{"required": [f"q{n}"]} for n in range(900)]},
    "much beside references": {"$defs": {f"d{n}": SAME for n in range(900)}, **WIDE,
                               "anyOf": [ref(f"d{n}") for n in range(900)]},
    "many names": {"$defs": {"n": {"enum": [f"v{n}" for n in range(900)]}}, **obj(**{
        f"p{n}": {"type": "object", "propertyNames": ref("n"), "additionalProperties": SAME}
        for n in range(400)})},
    "parts twice": doubled_parts(),
    "one part many times": {"$defs": {"w": WIDE}, **obj(**{
        f"p{n}": {"allOf": [ref("w")] * 900} for n in range(8)})},
}  # fmt: skip
for _ in range(40):
    LARGE["a nested constant"]["oneOf"][0]["const"] = {
        "a": LARGE["a nested constant"]["oneOf"][0]["const"]
    }


@pytest.mark.parametrize("name", LARGE)
def test_work_is_bounded(name: str) -> None:
    schema = LARGE[name]
    assert not list(find_oversized(schema))
    with at_most(CALLS):
        normal = normal_schema(schema)
        list(find_contradictions(normal))
        text_rules(normal)


def test_memory_is_bounded() -> None:
    tracemalloc.start()
    try:
        normal_schema(LARGE["references to the whole"])
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_what_comes_to_too_much_is_named() -> None:
    named = {"oneOf of twins": ("#", "oneOf"), "parts twice": ("#", "allOf"),
             "much beside much": ("#", "anyOf"),
             "texts that come to nothing": ("#/properties/p299", "pattern")}  # fmt: skip
    for name, fault in named.items():
        faults = find_unenforced(normal_schema(LARGE[name]))
        assert fault in [(one.path, one.keyword) for one in faults], name


def test_what_tells_large_branches_apart_may_stand_last() -> None:
    """The deep ones in front of it are not looked into first."""
    schema = twins()
    for side in "AB":
        branch = schema["$defs"][f"{side}0"]
        branch["properties"]["kind"] = {"const": side}
        branch["required"].append("kind")
    with at_most(CALLS):
        assert not [one for one in find_unenforced(normal_schema(schema))]
