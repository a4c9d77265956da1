"""JSON schemas: which demands a grammar can enforce, and which one it cannot.

llama.cpp turns a schema into a grammar and leaves out, without a word, what has no grammar. Here
each demand is looked at alone, so that one which would be lost can be named.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from kvmem.errors import RequestError
from kvmem.llama.grammar import schema_grammar

__all__ = [
    "MAX_DEPTH",
    "MAX_TEXT",
    "Unenforced",
    "find_bound_texts",
    "find_contradictions",
    "find_oversized",
    "find_unenforced",
]

# Beyond these llama.cpp takes minutes for a token, or overflows its stack.
MAX_DEPTH = 64
MAX_NAME = 256
MAX_VALUES = 1000
MAX_OPTIONAL = 500
MAX_TEXT = 1 << 18

# llama.cpp takes a larger maximum for none
MAX_TIMES = 2000
# it counts digits where one bound is missing, and takes the ends of 64 bits for missing ones
MAX_OPEN_BOUND = 10**15
MAX_BOUND = 2**63 - 2

# llama.cpp reads an index as C does: what follows the digits is left out
INDEX = re.compile(r"\s*[+-]?([0-9]+)")

# says nothing about which values are right
ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$anchor", "$comment", "$defs", "$vocabulary", "definitions", "title",
        "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
        "contentMediaType", "contentEncoding", "strict", "name", "nullable", "discriminator", "xml",
        "externalDocs",
    }
)  # fmt: skip
# a tuple, as a client may ask for anything, a list for one, which no set can look up
FORMATS = ("date", "time", "date-time", "uuid", *(f"uuid{n}" for n in range(1, 6)))

TEXT_DEMANDS = ("pattern", "minLength", "maxLength", "format")

# keyword -> the type whose grammar has it
TYPED: Mapping[str, str] = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "pattern": "string",
    "format": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "integer",
    "maximum": "integer",
    "exclusiveMinimum": "integer",
    "exclusiveMaximum": "integer",
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
RANGES = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
    ("minimum", "maximum"),
)
# what a part of an allOf may have; the rest of it is lost, and of closed parts the closing
IN_ALL_OF = frozenset({"type", "properties", "required"})
# hold values, not schemas
VALUES = frozenset({"const", "enum", "default", "examples", "example"})
ALTERNATIVES = ("oneOf", "anyOf", "allOf")
# what the presence of a keyword makes llama.cpp forget about the rest of its schema
DECIDING = ("$ref", "oneOf", "anyOf", "const", "enum")

Check = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A demand that no grammar can hold a model to. path: of the schema, as `#/properties/a`."""

    path: str
    keyword: str
    reason: str = "has no grammar"

    def __str__(self) -> str:
        return f"{self.keyword} at {self.path} {self.reason}"


def find_unenforced(schema: Mapping[str, Any], check: Check | None = None) -> Iterator[Unenforced]:
    """The demands of a schema that its grammar would lack; it must not be oversized.

    check: raises RequestError for a grammar that does not parse.
    """
    yield from _Walk(schema, check or (lambda grammar: None)).visit(schema, "#")


def find_bound_texts(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Properties that may be a text but not any text: (name, keyword)."""
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        for keyword in _text_demands(inner, schema) or ():
            yield name, keyword


def find_oversized(schema: Mapping[str, Any]) -> Iterator[Unenforced]:
    """What makes a schema larger than llama.cpp can take."""
    left: list[tuple[Any, str, int]] = [(schema, "#", 0)]
    while left:
        node, path, depth = left.pop()
        if depth > MAX_DEPTH:
            yield Unenforced("#", "the schema", f"is nested deeper than {MAX_DEPTH}")
            return
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(node, Mapping):
            items = node.items()
            if any(len(name) > MAX_NAME for name in node):
                yield Unenforced(path, "a name", f"is longer than {MAX_NAME}")
            if _count_optional(node) > MAX_OPTIONAL:
                reason = f"has more than {MAX_OPTIONAL} that are not required"
                yield Unenforced(path, "properties", reason)
            if _is_loop(node, schema):
                yield Unenforced(
                    path, "$ref", f"comes back to itself, or leads on {MAX_DEPTH} times"
                )
        elif isinstance(node, list):
            items = enumerate(node)
            if len(node) > MAX_VALUES:
                yield Unenforced(path, "a list", f"has more than {MAX_VALUES} values")
        left += [(item, f"{path}/{name}"[:MAX_NAME], depth + 1) for name, item in items]
    if len(json.dumps(schema)) > MAX_TEXT:
        yield Unenforced("#", "the schema", f"is longer than {MAX_TEXT} characters")


def _count_optional(schema: Mapping[str, Any]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    return len(properties) - len(required if isinstance(required, list) else ())


def _is_loop(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether references alone lead in a circle, or far; llama.cpp follows by recursion."""
    followed: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
        if ref in followed or len(followed) == MAX_DEPTH:
            return True
        followed.add(ref)
        schema = _target(root, ref)
    return False


def find_contradictions(schema: Mapping[str, Any]) -> Iterator[Unenforced]:
    """Ranges that no value is in; llama.cpp never comes to an end of some."""
    left: list[tuple[Any, str]] = [(schema, "#")]
    while left:
        node, path = left.pop()
        if isinstance(node, list):
            left += [(item, f"{path}/{index}") for index, item in enumerate(node)]
        if not isinstance(node, Mapping):
            continue
        for low, high in RANGES:
            lows, highs = _numbers(node, low), _numbers(node, high)
            if lows and highs and lows[0] > highs[0]:
                yield Unenforced(path, f"{low} {lows[0]}", f"contradicts {high} {highs[0]}")
        least, most = _integer_range(node)
        if node.get("type") == "integer" and least is not None and most is not None:
            given = [keyword for keyword in BOUNDS if keyword in node]
            if least > most and given != ["minimum", "maximum"]:
                yield Unenforced(path, " and ".join(given), "leave no integer")
        left += [(item, f"{path}/{name}") for name, item in node.items() if name not in VALUES]


def _integer_range(schema: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The least and the largest integer that its bounds allow; None where there is no bound."""
    lows = _numbers(schema, "minimum")
    highs = _numbers(schema, "maximum")
    lows += [bound + 1 for bound in _numbers(schema, "exclusiveMinimum")]
    highs += [bound - 1 for bound in _numbers(schema, "exclusiveMaximum")]
    return max(lows, default=None), min(highs, default=None)


def _numbers(schema: Mapping[str, Any], keyword: str) -> list[float]:
    """The value of a keyword, if it is a number."""
    value = schema.get(keyword)
    return [value] if _is_number(value) else []


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Walk:
    def __init__(self, root: Mapping[str, Any], check: Check) -> None:
        self._root = root
        self._check = check
        self._followed: set[str] = set()

    def visit(self, schema: object, path: str) -> Iterator[Unenforced]:
        if isinstance(schema, bool) or not isinstance(schema, Mapping):
            if schema is not True:
                yield Unenforced(path, "the schema", "must be an object")
            return
        demands = [k for k, v in schema.items() if k not in ANNOTATIONS and v is not None]
        deciding = next((k for k in DECIDING if k in demands), None)
        if deciding is not None:
            yield from self._visit_deciding(schema, deciding, demands, path)
            return
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind or _implied_type(schema)]
        for keyword in demands:
            if keyword == "type":
                continue
            yield from self._visit_keyword(schema, keyword, kinds, path)
        if "type" in demands:
            yield from self._try({"type": kind}, path, "type")

    def _visit_deciding(
        self, schema: Mapping[str, Any], deciding: str, demands: list[str], path: str
    ) -> Iterator[Unenforced]:
        """A keyword that decides alone; what stands beside it is lost, unless it says the same."""
        value = schema[deciding]
        for keyword in demands:
            if keyword != deciding and not self._is_implied(schema, keyword, deciding):
                yield Unenforced(f"{path}", keyword, f"is lost beside {deciding}")
        if deciding == "$ref":
            yield from self._follow(value, path)
        elif deciding in ALTERNATIVES:
            yield from self._visit_alternatives(value, f"{path}/{deciding}")
        else:
            yield from self._try({deciding: value}, path, deciding)

    def _is_implied(self, schema: Mapping[str, Any], keyword: str, deciding: str) -> bool:
        """A type beside values of that type says nothing new, nor does one beside alternatives
        that all have it.
        """
        if keyword != "type":
            return False
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = {kind for kind in given if isinstance(kind, str)}
        if len(kinds) < len(given):
            return False
        if deciding == "const":
            return _type_of(schema["const"]) <= kinds
        if deciding == "enum" and isinstance(schema["enum"], list):
            return all(_type_of(value) & kinds for value in schema["enum"])
        if deciding in ALTERNATIVES and isinstance(schema[deciding], list):
            return all(
                isinstance(item, Mapping) and item.get("type") in tuple(kinds)
                for item in schema[deciding]
            )
        return False

    def _visit_keyword(
        self, schema: Mapping[str, Any], keyword: str, kinds: Sequence[Any], path: str
    ) -> Iterator[Unenforced]:
        value = schema[keyword]
        if keyword == "allOf":
            yield from self._visit_alternatives(value, f"{path}/allOf")
            yield from self._visit_parts(value, f"{path}/allOf")
            if any(k in schema for k in ("properties", "additionalProperties", "items")):
                yield Unenforced(path, "allOf", "is lost beside the properties")
            return
        if keyword == "propertyNames" and value == {"type": "string"}:
            return  # all names are
        kind = TYPED.get(keyword)
        if kind is None:
            yield Unenforced(path, keyword)
            return
        if kind not in kinds:
            if schema.get("type") is None:
                yield Unenforced(path, keyword, "is lost without a type")
            elif kind == "integer" and "number" in kinds:
                yield Unenforced(path, keyword, "has no grammar for a number that is no integer")
            return  # it speaks of values that the type rules out
        yield from self._visit_typed(schema, keyword, value, kind, path)

    def _visit_typed(
        self, schema: Mapping[str, Any], keyword: str, value: Any, kind: str, path: str
    ) -> Iterator[Unenforced]:
        if keyword == "properties" and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from self.visit(inner, f"{path}/properties/{name}")
        elif keyword == "required":
            known = schema.get("properties")
            known = known if isinstance(known, Mapping) else {}
            for name in value if isinstance(value, list) else ():
                if not isinstance(name, str) or name not in known:
                    yield Unenforced(path, "required", f"names {name!r}, which properties lacks")
        elif keyword == "additionalProperties" and isinstance(value, Mapping):
            yield from self.visit(value, f"{path}/additionalProperties")
        elif keyword in ("items", "prefixItems"):
            yield from self._visit_items(schema, keyword, value, path)
        elif keyword == "format":
            if value not in FORMATS:
                yield Unenforced(path, keyword, f"{value!r} has no grammar")
        elif keyword == "pattern":
            yield from self._try_pattern(value, path)
        elif keyword in BOUNDS:
            yield from self._visit_bound(schema, keyword, value, path)
        elif keyword in ("maxLength", "maxItems") and _is_number(value) and value > MAX_TIMES:
            yield Unenforced(path, keyword, f"has no grammar above {MAX_TIMES}")
        else:
            yield from self._try({"type": kind, keyword: value}, path, keyword)
        if kind == "string" and keyword != "pattern" and "pattern" in schema:
            yield Unenforced(path, keyword, "is lost beside pattern")
        elif keyword in ("minLength", "maxLength") and schema.get("format") in FORMATS:
            yield Unenforced(path, keyword, "is lost beside format")
        for weak, strong in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if keyword == weak and strong in schema:
                yield Unenforced(path, keyword, f"is lost beside {strong}")

    def _visit_bound(
        self, schema: Mapping[str, Any], keyword: str, value: Any, path: str
    ) -> Iterator[Unenforced]:
        least, most = _integer_range(schema)
        limit = MAX_OPEN_BOUND if least is None or most is None else MAX_BOUND
        if isinstance(value, float) and not value.is_integer():
            yield Unenforced(path, keyword, "must be a whole number for an integer")
        elif _is_number(value) and abs(value) > limit:
            yield Unenforced(path, keyword, f"has no grammar beyond {limit}")
        elif all(abs(bound) <= limit for name in BOUNDS for bound in _numbers(schema, name)):
            # a large one has a grammar only beside its other end
            bounds = {name: schema[name] for name in BOUNDS if _numbers(schema, name)}
            yield from self._try({"type": "integer", **bounds, keyword: value}, path, keyword)

    def _visit_items(
        self, schema: Mapping[str, Any], keyword: str, value: Any, path: str
    ) -> Iterator[Unenforced]:
        if keyword == "prefixItems" and "items" in schema:
            yield Unenforced(path, keyword, "is lost beside items")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.visit(item, f"{path}/{keyword}/{index}")
            for bound in ("minItems", "maxItems"):
                if bound in schema and schema[bound] != len(value):
                    yield Unenforced(path, bound, f"is lost beside a list of {keyword}")
        else:
            yield from self.visit(value, f"{path}/{keyword}")

    def _visit_alternatives(self, value: Any, path: str) -> Iterator[Unenforced]:
        if not isinstance(value, list) or not value:
            yield Unenforced(path, path.rpartition("/")[2], "must be a list of schemas")
            return
        for index, item in enumerate(value):
            yield from self.visit(item, f"{path}/{index}")

    def _visit_parts(self, value: Any, path: str) -> Iterator[Unenforced]:
        """Parts of an allOf: of each, no more than its properties is kept."""
        names: set[str] = set()
        for index, item in enumerate(value if isinstance(value, list) else ()):
            part = item
            followed: set[Any] = set()
            while isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                if part["$ref"] in followed:
                    break
                followed.add(part["$ref"])
                part = _target(self._root, part["$ref"])
            if not isinstance(part, Mapping):
                continue
            for keyword, inner in part.items():
                is_kept = keyword in IN_ALL_OF or keyword in ANNOTATIONS
                if not is_kept and not (keyword == "additionalProperties" and inner is True):
                    yield Unenforced(f"{path}/{index}", keyword, "is lost in allOf")
            if part.get("type", "object") != "object":
                yield Unenforced(f"{path}/{index}", "type", "is lost in allOf")
            properties = part.get("properties")
            for name in properties if isinstance(properties, Mapping) else ():
                if name in names:
                    yield Unenforced(f"{path}/{index}", "properties", f"has {name!r} once more")
                names.add(name)

    def _follow(self, ref: Any, path: str) -> Iterator[Unenforced]:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            yield Unenforced(path, "$ref", "must point into the same schema, as #/$defs/name")
            return
        if ref in self._followed:
            return
        self._followed.add(ref)
        target = _target(self._root, ref)
        if target is None:
            yield Unenforced(path, "$ref", f"points to {ref}, which is not there")
        else:
            yield from self.visit(target, ref)

    def _try_pattern(self, value: Any, path: str) -> Iterator[Unenforced]:
        faults = list(self._try({"type": "string", "pattern": value}, path, "pattern"))
        yield from faults
        # an unsupported pattern becomes any string, as one that is not anchored always does
        if not faults and _pattern_grammar(value) == _pattern_grammar("unanchored"):
            yield Unenforced(path, "pattern", f"{value!r} has no grammar (anchor it with ^ and $)")

    def _try(self, schema: dict[str, Any], path: str, keyword: str) -> Iterator[Unenforced]:
        """Whether one demand alone makes a grammar that parses."""
        try:
            self._check(_grammar(schema))
        except RequestError as error:
            reason = str(error).splitlines()[-1]
            yield Unenforced(path, keyword, f"cannot be enforced: {reason}")


def _target(root: Mapping[str, Any], ref: str) -> Any:
    """What `#/a/b` points to; None for nothing."""
    target: Any = root
    for step in ref.split("/")[1:]:
        if isinstance(target, Mapping) and step in target:
            target = target[step]
        elif isinstance(target, list) and (index := INDEX.match(step)):
            place = int(index[1][:MAX_NAME])
            target = target[place] if place < len(target) else None
        else:
            return None
    return target


def _text_demands(
    schema: object, root: Mapping[str, Any], followed: frozenset[str] = frozenset()
) -> list[str] | None:
    """The keywords that not every text meets; None where no text is a value of the schema."""
    if not isinstance(schema, Mapping):
        return None
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return (
            None if ref in followed else _text_demands(_target(root, ref), root, followed | {ref})
        )
    for keyword in ("oneOf", "anyOf"):
        if isinstance(schema.get(keyword), list):
            found = [_text_demands(item, root, followed) for item in schema[keyword]]
            return min((item for item in found if item is not None), key=len, default=None)
    for keyword in ("const", "enum"):
        if schema.get(keyword) is not None:
            values = schema[keyword] if keyword == "enum" else [schema[keyword]]
            has_text = isinstance(values, list) and any(isinstance(item, str) for item in values)
            return [keyword] if has_text else None
    demands = [keyword for keyword in TEXT_DEMANDS if schema.get(keyword) is not None]
    for item in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        demands += _text_demands(item, root, followed) or ()
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return demands if "string" in kinds or (kind is None and demands) else None


def _implied_type(schema: Mapping[str, Any]) -> str | None:
    """What llama.cpp takes a schema without a type for."""
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if any(k in schema for k in ("pattern", "minLength", "maxLength")):
        return "string"
    return "string" if schema.get("format") in FORMATS else None


def _grammar(schema: dict[str, Any]) -> str:
    return _cached_grammar(json.dumps(schema))


def _pattern_grammar(pattern: str) -> str:
    return _grammar({"type": "string", "pattern": pattern})


@lru_cache(maxsize=512)
def _cached_grammar(schema: str) -> str:
    return schema_grammar(json.loads(schema))


def _type_of(value: object) -> set[str]:
    """The JSON types that a value is of."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}
