"""JSON schemas: which demands a grammar can enforce, and which one it cannot.

llama.cpp turns a schema into a grammar and leaves out, without a word, what has no grammar. Here
each demand is looked at alone, so that one which would be lost can be named. json_schema.normal has
written the schema in the words that have one, as far as there are any.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvmem.chat.json_schema.contradictions import integer_range
from kvmem.chat.json_schema.formats import KNOWN as FORMATS
from kvmem.chat.json_schema.keywords import BOUNDS, demands_of, is_number, numbers_of
from kvmem.chat.json_schema.normal import NormalSchema
from kvmem.errors import RequestError
from kvmem.llama.grammar import schema_grammar

__all__ = [
    "MAX_DEPTH",
    "MAX_TEXT",
    "Unenforced",
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
ALTERNATIVES = ("oneOf", "anyOf")
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


def find_unenforced(normal: NormalSchema, check: Check | None = None) -> Iterator[Unenforced]:
    """The demands of a schema that its grammar would lack, by their paths in the client's schema.

    check: raises RequestError for a grammar that does not parse.
    """
    yield from _Walk(normal, check or (lambda grammar: None)).run()


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


def find_contradictions(normal: NormalSchema) -> Iterator[Unenforced]:
    """What no value fits: nothing can be held to it."""
    for (path, keyword), reason in normal.contradictions.items():
        yield Unenforced(path, keyword, reason)


class _Walk:
    def __init__(self, normal: NormalSchema, check: Check) -> None:
        self._normal = normal
        self._check = check
        self._followed: set[str] = set()
        self._waiting: list[str] = []  # references to follow

    def run(self) -> Iterator[Unenforced]:
        yield from find_contradictions(self._normal)
        for (path, keyword), reason in self._normal.unwritten.items():
            yield Unenforced(path, keyword, reason)
        yield from self._visit(self._normal.schema, "#")
        while self._waiting:
            ref = self._waiting.pop()
            yield from self._visit(_target(self._normal.schema, ref), self._normal.origins[ref])

    def _visit(self, schema: object, path: str) -> Iterator[Unenforced]:
        if not isinstance(schema, Mapping):
            yield Unenforced(path, "the schema", "must be an object")
            return
        demands = demands_of(schema)
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
            if deciding == "oneOf":
                yield Unenforced(path, "oneOf", "has branches that may hold at the same time: tell "
                                 "them apart by a const, or use anyOf")  # fmt: skip
            yield from self._visit_alternatives(value, f"{path}/{deciding}")
        else:
            yield from self._try({deciding: value}, path, deciding)

    def _is_implied(self, schema: Mapping[str, Any], keyword: str, deciding: str) -> bool:
        """A type beside alternatives that all have it says nothing new."""
        if keyword != "type":
            return False
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = {kind for kind in given if isinstance(kind, str)}
        if len(kinds) < len(given):
            return False
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
        kind = TYPED.get(keyword)
        if kind is None:
            yield Unenforced(path, keyword)
            return
        if kind == "integer" and "number" in kinds:
            if "multipleOf" in demands_of(schema):
                return  # it is that which has no grammar: bounds alone have one
            yield Unenforced(path, keyword, "has no grammar for a number that is no integer")
            return
        if kind not in kinds:
            if schema.get("type") is None:
                yield Unenforced(path, keyword, "is lost without a type")
            return  # it speaks of values that the type rules out
        yield from self._visit_typed(schema, keyword, value, kind, path)

    def _visit_typed(
        self, schema: Mapping[str, Any], keyword: str, value: Any, kind: str, path: str
    ) -> Iterator[Unenforced]:
        if keyword == "properties" and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from self._visit(inner, f"{path}/properties/{name}")
        elif keyword == "required":
            known = schema.get("properties")
            known = known if isinstance(known, Mapping) else {}
            for name in value if isinstance(value, list) else ():
                if not isinstance(name, str) or name not in known:
                    yield Unenforced(path, "required", f"names {name!r}, which properties lacks")
        elif keyword == "additionalProperties" and isinstance(value, Mapping):
            yield from self._visit(value, f"{path}/additionalProperties")
        elif keyword in ("items", "prefixItems"):
            yield from self._visit_items(schema, keyword, value, path)
        elif keyword == "format":
            if value not in FORMATS:
                yield Unenforced(path, keyword, f"{value!r} has no grammar")
        elif keyword == "pattern":
            if (path, keyword) not in self._normal.unwritten:
                yield from self._try({"type": kind, keyword: value}, path, keyword)
        elif keyword in BOUNDS:
            yield from self._visit_bound(schema, keyword, value, path)
        elif keyword in ("maxLength", "maxItems") and is_number(value) and value > MAX_TIMES:
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
        least, most = integer_range(schema)
        limit = MAX_OPEN_BOUND if least is None or most is None else MAX_BOUND
        if isinstance(value, float) and not value.is_integer():
            yield Unenforced(path, keyword, "must be a whole number for an integer")
        elif is_number(value) and abs(value) > limit:
            yield Unenforced(path, keyword, f"has no grammar beyond {limit}")
        elif all(abs(bound) <= limit for name in BOUNDS for bound in numbers_of(schema, name)):
            # a large one has a grammar only beside its other end
            bounds = {name: schema[name] for name in BOUNDS if numbers_of(schema, name)}
            yield from self._try({"type": "integer", **bounds, keyword: value}, path, keyword)

    def _visit_items(
        self, schema: Mapping[str, Any], keyword: str, value: Any, path: str
    ) -> Iterator[Unenforced]:
        if keyword == "prefixItems" and "items" in schema:
            yield Unenforced(path, keyword, "is lost beside items")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._visit(item, f"{path}/{keyword}/{index}")
            for bound in ("minItems", "maxItems"):
                if bound in schema and schema[bound] != len(value):
                    yield Unenforced(path, bound, f"is lost beside a list of {keyword}")
        else:
            yield from self._visit(value, f"{path}/{keyword}")

    def _visit_alternatives(self, value: Any, path: str) -> Iterator[Unenforced]:
        if not isinstance(value, list) or not value:
            yield Unenforced(path, path.rpartition("/")[2], "must be a list of schemas")
            return
        for index, item in enumerate(value):
            yield from self._visit(item, f"{path}/{index}")

    def _follow(self, ref: Any, path: str) -> Iterator[Unenforced]:
        if isinstance(ref, str) and ref in self._normal.origins:
            if ref not in self._followed:
                self._followed.add(ref)
                self._waiting.append(ref)
        elif isinstance(ref, str) and ref.startswith("#/"):
            yield Unenforced(path, "$ref", f"points to {ref}, which is not there")
        else:
            yield Unenforced(path, "$ref", "must point into the same schema, as #/$defs/name")

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


@lru_cache(maxsize=512)
def _cached_grammar(schema: str) -> str:
    return schema_grammar(json.loads(schema))
