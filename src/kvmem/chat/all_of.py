"""allOf in JSON schemas: its parts as one schema, which has a grammar where allOf has none."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["merge_all_of"]

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
# hold values, not schemas
VALUES = frozenset({"const", "enum", "default", "examples", "example", "required"})


class _Conflict(Exception):
    """Two demands that do not come to one."""


def merge_all_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with each allOf merged into what stands beside it, where that changes nothing.

    An allOf whose parts contradict or hide each other stays. The schema must not be oversized.
    """
    merged: dict[str, Any] = _merge_within(dict(schema), schema)
    return merged


def _merge_within(node: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_merge_within(item, root) for item in node]
    if not isinstance(node, Mapping):
        return node
    inner = {k: v if k in VALUES else _merge_within(v, root) for k, v in node.items()}
    parts = inner.get("allOf")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return inner
    beside = {k: v for k, v in inner.items() if k != "allOf"}
    is_alone = len(parts) == 1 and not beside.keys() - ANNOTATIONS - {"$defs", "definitions"}
    try:
        for part in parts:
            beside = _joined(beside, part if is_alone else _resolved(part, root))
    except _Conflict:
        return inner
    return beside


def _resolved(part: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a part of nothing but a reference points to."""
    seen: set[str] = set()
    while "$ref" in part:
        ref = part["$ref"]
        if not isinstance(ref, str) or ref in seen or part.keys() - ANNOTATIONS - {"$ref"}:
            raise _Conflict
        seen.add(ref)
        target: Any = root
        for step in ref.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise _Conflict
        part = target
    if "allOf" in part:
        raise _Conflict
    return part


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for closed, open_ in ((one, other), (other, one)):
        names = open_.get("properties")
        if closed.get("additionalProperties", True) is not True and names:
            raise _Conflict  # it speaks of the properties of its own part
    joined = dict(one)
    for keyword, value in other.items():
        if keyword not in joined or keyword in ANNOTATIONS:
            joined.setdefault(keyword, value)
        else:
            joined[keyword] = _joined_values(keyword, joined[keyword], value)
    return joined


def _joined_values(keyword: str, one: Any, other: Any) -> Any:
    if keyword == "properties" and isinstance(one, Mapping) and isinstance(other, Mapping):
        if any(_is_different(one[name], other[name]) for name in one.keys() & other.keys()):
            raise _Conflict
        return {**one, **other}
    if keyword == "required" and isinstance(one, list) and isinstance(other, list):
        return one + [name for name in other if name not in one]
    if keyword == "enum" and isinstance(one, list) and isinstance(other, list):
        allowed = {json.dumps(value, sort_keys=True) for value in other}
        common = [value for value in one if json.dumps(value, sort_keys=True) in allowed]
        if common:
            return common
    if _is_different(one, other):
        raise _Conflict
    return one


def _is_different(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or bool(one != other)
