"""The keywords of JSON Schema: which demand something, and which hold schemas."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeGuard
from urllib.parse import unquote

__all__ = [
    "ASSERTIONS",
    "BOUNDS",
    "demands_of",
    "find_target",
    "is_number",
    "numbers_of",
    "subschemas",
    "with_subschemas",
]

ASSERTIONS: Final = frozenset(
    {
        "$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "allOf", "anyOf", "oneOf",
        "not", "if", "then", "else", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", "items", "prefixItems",
        "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains",
        "minContains", "maxContains", "properties", "patternProperties", "additionalProperties",
        "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "required",
        "dependencies", "dependentRequired", "dependentSchemas", "divisibleBy", "disallow",
        "extends",
    }
)  # fmt: skip
"""Those of all drafts that say which values are right. What they do not name is an annotation, as
JSON Schema has it: titles, defaults, and whatever a library writes for itself.
"""

BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

# keyword -> where its schemas are; of draft 4, `items` may be a list of them
SUBSCHEMAS: Final[Mapping[str, Literal["one", "list", "names"]]] = MappingProxyType(
    {
        "$defs": "names",
        "definitions": "names",
        "properties": "names",
        "patternProperties": "names",
        "additionalProperties": "one",
        "unevaluatedProperties": "one",
        "items": "one",
        "prefixItems": "list",
        "additionalItems": "one",
        "unevaluatedItems": "one",
        "anyOf": "list",
        "oneOf": "list",
        "allOf": "list",
    }
)


def demands_of(schema: Mapping[str, Any]) -> list[str]:
    """Its keywords that demand something."""
    return [k for k, v in schema.items() if k in ASSERTIONS and (v is not None or k == "const")]


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The same with its inner schemas changed, those in lists among them.

    change: gets a schema, or what stands in its place, and its path from here.
    """
    changed = dict(schema)
    for keyword, kind in SUBSCHEMAS.items():
        value = schema.get(keyword)
        if kind == "names" and isinstance(value, Mapping):
            changed[keyword] = {k: change(v, f"{keyword}/{k}") for k, v in value.items()}
        elif kind != "names" and isinstance(value, list):
            changed[keyword] = [change(v, f"{keyword}/{i}") for i, v in enumerate(value)]
        elif kind == "one" and isinstance(value, Mapping):
            changed[keyword] = change(value, keyword)
    return changed


def subschemas(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Its inner schemas, or what stands in their place, each with its path from here."""
    found: list[tuple[str, Any]] = []

    def see(inner: Any, step: str) -> None:
        found.append((step, inner))

    with_subschemas(schema, see)
    return found


def find_target(root: Any, ref: str) -> Any:
    """What a pointer within a schema points to (RFC 6901); None for nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    target = root
    for step in ref.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isascii() and step.isdigit():
            place = int(step[:9])
            target = target[place] if place < len(target) else None
        else:
            return None
    return target


def is_number(value: object) -> TypeGuard[float]:
    """A number of JSON, which true is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_of(schema: Mapping[str, Any], keyword: str) -> list[float]:
    """The value of a keyword, if it is a number that JSON has."""
    value = schema.get(keyword)
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return [value] if is_number(value) and is_finite else []
