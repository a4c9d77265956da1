"""Schemas that no value fits, or none that comes to an end: found, cut out, and named.

llama.cpp makes grammars of them that allow anything, or never finish.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvmem.chat.json_schema.keywords import BOUNDS, numbers_of, subschemas, with_subschemas

__all__ = ["NOTHING", "cut_out", "integer_range", "is_nothing", "nothing"]

Json = dict[str, Any]
Schema = Mapping[str, Any]
Fault = tuple[str, str, str]  # path, keyword, reason

NOTHING: Final[Json] = {"not": {}}
"""The schema that no value fits."""

WHY: Final = "x-no-value"
RANGES: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
    ("minimum", "maximum"),
)


def nothing(keyword: str, reason: str) -> Json:
    """The same, with what it comes from."""
    return {**NOTHING, WHY: (keyword, reason)}


def is_nothing(schema: Any) -> bool:
    return isinstance(schema, Mapping) and {k: v for k, v in schema.items() if k != WHY} == NOTHING


def integer_range(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the largest integer that its bounds allow; None where there is no bound."""
    lows = [math.ceil(bound) for bound in numbers_of(schema, "minimum")]
    highs = [math.floor(bound) for bound in numbers_of(schema, "maximum")]
    lows += [math.floor(bound) + 1 for bound in numbers_of(schema, "exclusiveMinimum")]
    highs += [math.ceil(bound) - 1 for bound in numbers_of(schema, "exclusiveMaximum")]
    return max(lows, default=None), min(highs, default=None)


def cut_out(schema: Json, origins: Mapping[str, str]) -> tuple[Json, dict[tuple[str, str], str]]:
    """The schema without alternatives that no value fits, and what else no value fits: path,
    keyword and reason. In its place stands a schema that any value fits.

    origins: the paths that references, which are `#/$defs/NAME` all, have in messages.
    """
    targets = {f"#/$defs/{name}": target for name, target in schema.get("$defs", {}).items()}
    emptiness = _Emptiness(targets, origins)
    cut: Json = emptiness.without({k: v for k, v in schema.items() if k != "$defs"}, "#")
    made: Json = {}
    waiting = list(_refs_in(cut))
    while waiting:
        ref = waiting.pop()
        if ref in targets and ref not in made:
            made[ref] = emptiness.without(targets[ref], origins.get(ref, ref))
            waiting += _refs_in(made[ref])
    if made:
        cut["$defs"] = {ref.removeprefix("#/$defs/"): target for ref, target in made.items()}
    return cut, emptiness.found


class _Emptiness:
    """Which of a schema's parts no value fits that ends.

    targets: what references point to. found: what `without` could not cut out.
    """

    def __init__(self, targets: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        self._origins = origins
        self._targets = targets
        self._ending: set[str] = set()  # references that some value fits
        self._faults: dict[str, Fault | None] = {}  # of what references point to
        self.found: dict[tuple[str, str], str] = {}
        users = defaultdict(list)
        for ref, target in targets.items():
            for used in _refs_in(target):
                users[used].append(ref)
        # in order: one that uses many waits for them
        waiting: dict[str, None] = dict.fromkeys(reversed(list(targets)))
        while waiting:
            ref = next(iter(waiting))
            del waiting[ref]
            if ref not in self._ending and self.fault_of(targets[ref], ref) is None:
                self._ending.add(ref)
                waiting |= dict.fromkeys(users[ref])

    def without(self, schema: Any, path: str) -> Any:
        """The schema without alternatives that nothing fits, and properties that shall not be."""
        if not isinstance(schema, Mapping):
            return schema
        fault = self.fault_of(schema, path)
        if fault is not None and (fault[0] == path or "$ref" in schema):
            self.found[fault[:2]] = fault[2]
            return {}
        node = dict(schema)
        for keyword in ("anyOf", "oneOf"):
            branches = node.get(keyword)
            if isinstance(branches, list):
                left = [branch for branch in branches if self.fault_of(branch, path) is None]
                node[keyword] = [
                    self.without(branch, f"{path}/{keyword}/{index}")
                    for index, branch in enumerate(branches)
                    if not left or not self._may_go(branch, keyword)
                ]
        kinds = node.get("type")
        if isinstance(kinds, list):
            left = [kind for kind in kinds if self.fault_of({**node, "type": kind}, path) is None]
            node["type"] = left[0] if len(left) == 1 else left or kinds
        properties = node.get("properties")
        if node.get("additionalProperties", False) is False and isinstance(properties, Mapping):
            required = schema["required"] if isinstance(schema.get("required"), list) else ()
            node["properties"] = {
                k: v for k, v in properties.items() if v != NOTHING or k in required
            }
        return with_subschemas(
            node,
            lambda inner, step: (
                inner
                if step.startswith(("anyOf/", "oneOf/", "$defs/"))
                else self.without(inner, f"{path}/{step}")
            ),
        )

    def _may_go(self, branch: Any, keyword: str) -> bool:
        """Of a oneOf, only what certainly nothing fits: the grammar takes the rest for granted."""
        return is_nothing(branch) or (keyword == "anyOf" and self.fault_of(branch, "") is not None)

    def fault_of(self, schema: Any, path: str) -> Fault | None:
        """Why no value fits, by what is deepest."""
        if not isinstance(schema, Mapping):
            return None
        if is_nothing(schema):
            why = schema.get(WHY)
            # a client's schema has lists alone
            keyword, reason = why if isinstance(why, tuple) else ("not", "fits no value")
            return path, keyword, reason
        ref = schema.get("$ref")
        if ref is not None:
            if not isinstance(ref, str) or ref not in self._targets or ref in self._ending:
                return None
            return self._fault_of_target(ref, path)
        for keyword in ("oneOf", "anyOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list) and branches:
                return self._fault_of_all(branches, f"{path}/{keyword}")
        if schema.get("enum") == []:
            return path, "enum", "has no value"
        if "const" in schema or "enum" in schema:
            return None
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return self._fault_of_kinds(schema, kinds, path)
        return self._fault_of_kind(schema, kinds, path)

    def _fault_of_kinds(self, schema: Schema, kinds: list[Any], path: str) -> Fault | None:
        """Each type once: with what is inside, work would double at every level."""
        first = None
        for kind in dict.fromkeys(kind for kind in kinds if isinstance(kind, str)):
            fault = self._fault_of_kind(schema, kind, path)
            if fault is None:
                return None
            first = first or fault
        return first

    def _fault_of_target(self, ref: str, path: str) -> Fault:
        """Of a reference that no value fits: what it points to, unless that leads on."""
        origin = self._origins.get(ref, ref)
        if ref not in self._faults:
            target = self._targets[ref]
            leads_on = any(used in self._targets for used in _refs_in(target))
            self._faults[ref] = None if leads_on else self.fault_of(target, origin)
        return self._faults[ref] or (path, "$ref", f"to {origin} never comes to an end")

    def _fault_of_all(self, branches: list[Any], path: str) -> Fault | None:
        first = None
        for index, branch in enumerate(branches):
            fault = self.fault_of(branch, f"{path}/{index}")
            if fault is None:
                return None
            first = first or fault
        return first

    def _fault_of_kind(self, schema: Mapping[str, Any], kind: Any, path: str) -> Fault | None:
        """Of a schema that is neither a reference nor alternatives, for one type; None for any."""
        for low, high in RANGES:
            lows, highs = numbers_of(schema, low), numbers_of(schema, high)
            if lows and highs and lows[0] > highs[0] and kind in (None, *KINDS_OF[low]):
                return path, f"{low} {lows[0]}", f"contradicts {high} {highs[0]}"
        if kind == "integer":
            return _fault_of_integer(schema, path)
        if kind in (None, "object"):
            properties, required = schema.get("properties"), schema.get("required")
            if isinstance(properties, Mapping) and isinstance(required, list):
                for name in dict.fromkeys(name for name in required if isinstance(name, str)):
                    fault = self.fault_of(properties.get(name), f"{path}/properties/{name}")
                    if fault is not None:
                        return fault
        if kind in (None, "array"):
            first = schema.get("prefixItems")
            for index, item in enumerate(first if isinstance(first, list) else ()):
                fault = self.fault_of(item, f"{path}/prefixItems/{index}")
                if fault is not None:
                    return fault
            if any(least > 0 for least in numbers_of(schema, "minItems")):
                return self.fault_of(schema.get("items"), f"{path}/items")
        return None


KINDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "minLength": ("string",),
    "minItems": ("array",),
    "minProperties": ("object",),
    "minContains": ("array",),
    "minimum": ("integer", "number"),
}


def _fault_of_integer(schema: Mapping[str, Any], path: str) -> Fault | None:
    least, most = integer_range(schema)
    if least is None or most is None:
        return None
    given = " and ".join(keyword for keyword in BOUNDS if keyword in schema)
    if least > most:
        return path, given, "leave no integer"
    for step in numbers_of(schema, "multipleOf"):
        if step > 0 and step == int(step) and -(-least // int(step)) > most // int(step):
            return path, f"multipleOf {step}", f"has no number where {given} leave one"
    return None


def _refs_in(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            if isinstance(ref := node.get("$ref"), str):
                yield ref
            left += [inner for _, inner in subschemas(node)]
