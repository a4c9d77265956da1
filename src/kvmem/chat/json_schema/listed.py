"""Values that a schema lists, beside what else it demands: those that fit are left."""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, permutations
from types import MappingProxyType
from typing import Any, Final

from kvmem.chat.json_schema.contradictions import nothing
from kvmem.chat.json_schema.keywords import demands_of, is_number, numbers_of
from kvmem.chat.json_schema.values import count_values, is_equal, is_kind, is_of_type, key_of

__all__ = ["list_sets", "plain_values"]

Json = dict[str, Any]

# arrays that are written out: of five values in any order, of eight in one
MAX_SETS: Final = 400

# keyword -> the type whose values it speaks of, and whether one of them fits a number
FITS: Final[Mapping[str, tuple[str, Callable[[Any, float], bool]]]] = MappingProxyType(
    {
        "minimum": ("number", lambda value, bound: value >= bound),
        "maximum": ("number", lambda value, bound: value <= bound),
        "exclusiveMinimum": ("number", lambda value, bound: value > bound),
        "exclusiveMaximum": ("number", lambda value, bound: value < bound),
        "multipleOf": ("number", lambda value, step: _is_multiple(value, step)),
        "minLength": ("string", lambda value, bound: len(value) >= bound),
        "maxLength": ("string", lambda value, bound: len(value) <= bound),
        "minItems": ("array", lambda value, bound: len(value) >= bound),
        "maxItems": ("array", lambda value, bound: len(value) <= bound),
    }
)
SPEAK_OF: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{keyword: kind for keyword, (kind, _) in FITS.items()},
        "pattern": "string",
        "format": "string",
        **dict.fromkeys(("items", "prefixItems", "additionalItems", "uniqueItems"), "array"),
        **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    }
)


def plain_values(node: Json) -> Json:
    """The same with what stands beside its values said by them: one of several, a type, bounds and
    lengths, and what speaks of values of other types.
    """
    if "const" in node and isinstance(values := node.get("enum"), list):
        if not any(is_equal(node["const"], value) for value in values):
            return nothing("const", "is not in enum")
        node = {k: v for k, v in node.items() if k != "enum"}
    for keyword in ("const", "enum"):
        if keyword == "const" and keyword in node:
            return _held(node, keyword, [node[keyword]])
        if isinstance(values := node.get(keyword), list) and values:
            return _held(node, keyword, values)
    return node


def list_sets(
    node: Mapping[str, Any], items: Json, n_left: int
) -> tuple[list[list[Any]], bool] | None:
    """The arrays of an array's schema whose items are different ones out of a few values, and
    whether these stand in any order; in the schema's alone where there would be too many. None
    where there still are, or where the values are not listed.

    items: the schema of its items, without a reference. n_left: the values that they may come to.
    """
    values = _few_values(plain_values(items))
    if values is None or node.get("type") != "array" or "prefixItems" in node:
        return None
    least = math.ceil(max(numbers_of(node, "minItems"), default=0))
    most = math.floor(min([*numbers_of(node, "maxItems"), len(values)]))
    sizes = range(max(least, 0), most + 1)
    for arrange, count in ((permutations, math.perm), (combinations, math.comb)):
        if 0 < sum(count(len(values), size) for size in sizes) <= MAX_SETS:
            sets = [list(found) for size in sizes for found in arrange(values, size)]
            if count_values(sets) <= n_left:
                return sets, arrange is permutations
    return None


def _few_values(items: Json) -> list[Any] | None:
    """Different values, where a schema is no more than these."""
    demands = set(demands_of(items))
    if demands == {"enum"} and isinstance(items["enum"], list):
        return list({key_of(value): value for value in items["enum"]}.values())
    if demands == {"const"}:
        return [items["const"]]
    if demands == {"type"} and items["type"] == "boolean":
        return [True, False]
    return [None] if demands == {"type"} and items["type"] == "null" else None


def _held(node: Json, keyword: str, values: list[Any]) -> Json:
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and kinds and all(map(is_kind, kinds)):
        values = [value for value in values if any(is_of_type(value, kind) for kind in kinds)]
        if not values:
            reason = "is not" if keyword == "const" else "has no value"
            return nothing(keyword, f"{reason} of the type {' or '.join(kinds)}")
        node = {k: v for k, v in node.items() if k != "type"}
    for beside, (kind, fits) in FITS.items():
        for bound in numbers_of(node, beside):
            values = [v for v in values if not is_of_type(v, kind) or fits(v, bound)]
            if not values:
                reason = "does not fit" if keyword == "const" else "has no value that fits"
                return nothing(keyword, f"{reason} {beside} {bound}")
            node = {k: v for k, v in node.items() if k != beside}
    for beside, kind in SPEAK_OF.items():
        if beside in node and not any(is_of_type(value, kind) for value in values):
            node = {k: v for k, v in node.items() if k != beside}
    return {**node, keyword: values[0] if keyword == "const" else values}


def _is_multiple(value: float, step: float) -> bool:
    """As they are written, in decimals: of 0.1, 0.3 is one."""
    if not math.isfinite(value) or not is_number(step) or step <= 0:
        return False
    one, other = (Fraction(Decimal(repr(number))) for number in (value, step))
    return (one / other).denominator == 1
