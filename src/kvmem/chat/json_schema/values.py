"""Values of JSON, as JSON Schema sees them: of which type they are, and which are equal."""

import json
from typing import Any, Final

__all__ = ["KINDS", "count_values", "is_equal", "is_kind", "is_of_type", "key_of"]

KINDS: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def is_of_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type that JSON Schema names."""
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return bool(kind == "number" or (kind == "integer" and is_whole))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return bool(kind == names[type(value)])


def is_kind(name: object) -> bool:
    """Whether JSON Schema has a type of this name."""
    return isinstance(name, str) and name in KINDS


def is_equal(one: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0 and not true."""
    return key_of(one) == key_of(other)


def key_of(value: Any) -> str:
    """Equal for equal values."""
    return json.dumps(_plain(value), sort_keys=True)


def count_values(value: Any) -> int:
    """How many values there are in a value, itself among them."""
    n_values, left = 0, [value]
    while left:
        one = left.pop()
        n_values += 1
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return n_values


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
