"""allOf in JSON schemas: its parts as one schema, which has a grammar where allOf has none."""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvmem.chat.json_schema.contradictions import nothing
from kvmem.chat.json_schema.keywords import (
    ASSERTIONS,
    demands_of,
    find_target,
    is_number,
    with_subschemas,
)
from kvmem.chat.json_schema.step_limit import Steps
from kvmem.chat.json_schema.values import is_equal, key_of

__all__ = ["UNMERGED", "Conflict", "Contradiction", "join", "merge_all_of"]

# of two such demands, one holds both
LEAST = frozenset(
    {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}
)
MOST = frozenset(
    {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"}
)
MAX_SHOWN = 60
MAX_STEPS = 60_000
ITEMS = frozenset({"items", "additionalItems"})
UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
EVALUATED = frozenset(
    {"properties", "patternProperties", "additionalProperties", "prefixItems", "items", "contains"}
)


UNMERGED: Final = "x-unmerged"
"""Stands beside an allOf that stays, and says why."""


class Conflict(Exception):
    """Two demands that do not come to one; the message says which."""


class Contradiction(Conflict):
    """Two demands that no value fits."""

    def __init__(self, keyword: str, one: Any, other: Any) -> None:
        shown = [json.dumps(value, ensure_ascii=False)[:MAX_SHOWN] for value in (one, other)]
        super().__init__(keyword, f"{shown[0]} contradicts {shown[1]}")

    def schema(self) -> dict[str, Any]:
        """The schema that they come to."""
        keyword, reason = self.args
        return nothing(keyword, reason)


def merge_all_of(
    schema: Mapping[str, Any],
    root: Mapping[str, Any] | None = None,
    steps: Steps | None = None,
) -> dict[str, Any]:
    """The schema with each allOf merged into what stands beside it, where that changes nothing.

    An allOf whose parts hide each other stays, with UNMERGED; one whose parts contradict each
    other becomes the schema that no value fits. The schema must not be oversized.
    root: what references point into, if not the schema. steps: what it may take, shared with
    others.

    Raises Spent: it takes more.
    """
    merger = _Merger(schema if root is None else root, steps or Steps(MAX_STEPS))
    merged: dict[str, Any] = merger.merged(dict(schema))
    return merged


class _Merger:
    def __init__(self, root: Mapping[str, Any], steps: Steps) -> None:
        self._root = root
        self._steps = steps
        self._targets: dict[str, Mapping[str, Any]] = {}  # what references point to, merged
        self._following: set[str] = set()

    def merged(self, node: Any) -> Any:
        self._steps.spend()
        if not isinstance(node, Mapping):
            return node
        inner = with_subschemas(node, lambda schema, step: self.merged(schema))
        if inner.get("allOf") is None:
            return inner
        beside = {k: v for k, v in inner.items() if k not in ("allOf", UNMERGED)}
        parts = inner["allOf"]
        if not isinstance(parts, list):
            return {**inner, UNMERGED: "must be a list of schemas"}
        if False in parts:
            return nothing("allOf", "has a part that no value fits")
        parts = [part for part in parts if part is not True]
        is_alone = len(parts) == 1 and not demands_of(beside)
        try:
            if not all(isinstance(part, Mapping) for part in parts):
                raise Conflict("a part is no schema")
            for part in _once(parts):
                found = part if is_alone else self._resolved(part)
                self._steps.spend(_n_names(beside) + _n_names(found))
                beside = join(beside, found)
        except Contradiction as contradiction:
            return contradiction.schema()
        except Conflict as conflict:
            return {**inner, UNMERGED: f"cannot be written as one schema: {conflict}"}
        return beside

    def _resolved(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a part of nothing but a reference points to."""
        if "$ref" not in part:
            if "allOf" in part:
                raise Conflict("an allOf in it cannot either")
            return part
        ref = part["$ref"]
        if not isinstance(ref, str) or demands_of(part) != ["$ref"]:
            raise Conflict("something stands beside a $ref")
        if ref in self._following:
            raise Conflict(f"$ref to {ref} comes back to itself")
        if ref not in self._targets:
            target = find_target(self._root, ref)
            if not isinstance(target, Mapping):
                raise Conflict(f"$ref points to {ref}, which is not there")
            self._following.add(ref)
            try:
                self._targets[ref] = self._resolved(self.merged(target))
            finally:
                self._following.discard(ref)
        return self._targets[ref]


def join(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two schemas as one that demands what both do; several patterns are a tuple.

    Raises Conflict: there is none such.
    """
    for closed, open_ in ((one, other), (other, one)):
        # some keywords speak of the properties and items of their own part
        others = _names(open_) - _names(closed) or "patternProperties" in open_
        if closed.get("additionalProperties", True) is not True and others:
            raise Conflict("additionalProperties speaks of what another part has")
        if "prefixItems" in open_ and closed.keys() & ITEMS and "prefixItems" not in closed:
            raise Conflict("items speaks of what another part has")
    if other.keys() & UNEVALUATED and one.keys() & EVALUATED:
        raise Conflict("unevaluatedProperties or unevaluatedItems looks at other parts")
    joined = dict(one)
    for keyword, value in other.items():
        if keyword not in joined or keyword not in ASSERTIONS:
            joined.setdefault(keyword, value)
        else:
            joined[keyword] = _joined_values(keyword, joined[keyword], value)
    return joined


def _once(parts: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without references that stand there already: a demand made twice is one."""
    refs: set[str] = set()
    left = []
    for part in parts:
        ref = part.get("$ref") if demands_of(part) == ["$ref"] else None
        if isinstance(ref, str):
            if ref in refs:
                continue
            refs.add(ref)
        left.append(part)
    return left


def _n_names(schema: Mapping[str, Any]) -> int:
    given = (schema.get("properties"), schema.get("required"), schema.get("enum"))
    return sum(len(names) for names in given if isinstance(names, Mapping | list))


def _names(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()


def _joined_values(keyword: str, one: Any, other: Any) -> Any:
    if not _is_different(one, other):
        return one
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if keyword == "properties":
            both = one.keys() & other.keys()
            return {**one, **other, **{k: _joined_schemas(one[k], other[k]) for k in both}}
        if keyword in ("items", "additionalProperties"):
            return _joined_schemas(one, other)
    if isinstance(one, list) and isinstance(other, list):
        if keyword == "required":
            known = {key_of(name) for name in one}
            return one + [name for name in other if key_of(name) not in known]
        if keyword == "enum":
            allowed = {key_of(value) for value in other}
            common = [value for value in one if key_of(value) in allowed]
            if not common:
                raise Contradiction(keyword, one, other)
            return common
    if keyword == "pattern":
        patterns = (*_patterns(one), *_patterns(other))
        if all(isinstance(pattern, str) for pattern in patterns):
            return tuple(dict.fromkeys(patterns))
    if is_number(one) and is_number(other):
        if keyword in LEAST:
            return max(one, other)
        if keyword in MOST:
            return min(one, other)
    if keyword == "type" and (types := _common_types(one, other)) is not None:
        if not types:
            raise Contradiction(keyword, one, other)
        return types[0] if len(types) == 1 else types
    if keyword == "const" and not is_equal(one, other):
        raise Contradiction(keyword, one, other)
    raise Conflict(f"it has two demands by {keyword}")


def _patterns(value: Any) -> tuple[Any, ...]:
    """A client's schema has one, which is no tuple; joined, there may be several."""
    return value if isinstance(value, tuple) else (value,)


def _joined_schemas(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or other is True:
        return other if one is True else one
    if not _is_different(one, other):
        return one
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        raise Conflict("a part has what is no schema")
    if ("$ref" in one or "$ref" in other) and demands_of(one) and demands_of(other):
        raise Conflict("something stands beside a $ref")
    try:
        return join(one, other)
    except Contradiction as contradiction:
        return contradiction.schema()


def _common_types(one: Any, other: Any) -> list[Any] | None:
    """The types of both; None where it is not types that are given."""
    ones, others = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    if not isinstance(ones, list) or not isinstance(others, list):
        return None
    common = [kind for kind in ones if kind in others]
    for first, second in ((ones, others), (others, ones)):
        if "integer" in first and "number" in second and "integer" not in common:
            common.append("integer")
    return common


def _is_different(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or bool(one != other)
