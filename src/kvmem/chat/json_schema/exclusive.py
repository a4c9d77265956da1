"""oneOf in JSON schemas: branches of which no value fits two, so that any of them will do.

llama.cpp has no exclusive or. What a grammar makes of one branch must be refused by each other
branch: by its type, by a value that tells them apart, or by a property that one demands and the
other has not. Where that needs a property to be there, or to be left out, the branch is narrowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmem.chat.json_schema.keywords import is_number, numbers_of
from kvmem.chat.json_schema.step_limit import Spent, Steps
from kvmem.chat.json_schema.values import KINDS, is_kind, is_of_type, key_of

__all__ = ["Prover"]

Json = dict[str, Any]
Schema = Mapping[str, Any]

MAX_FOLLOWED = 16
MAX_STEPS = 100_000  # of all proofs about one schema


class Prover:
    """Proves it for the oneOfs of one schema.

    targets: what `#/$defs/NAME` points to, by its name.
    """

    def __init__(self, targets: Schema) -> None:
        self._targets = targets
        self._steps = Steps(MAX_STEPS)
        # by what they are keys of, which is kept, so that nothing else comes to its place
        self._keys: dict[int, tuple[Any, frozenset[str]]] = {}

    def make_exclusive(self, branches: Sequence[Any]) -> list[Any] | None:
        """The branches, some of them narrowed; None where two may hold at once, or where it takes
        too long to see that they do not.
        """
        made = list(branches)
        listed = [values for branch in branches if (values := _values(branch)) is not None]
        try:
            if len(listed) == len(branches):
                keys = [self._keys_of(values) for values in listed]
                return made if len(frozenset().union(*keys)) == sum(map(len, keys)) else None
            for one in range(len(branches)):
                for other in range(len(branches)):
                    if one == other or self.excludes(made[one], branches[other]):
                        continue
                    narrowed = self.narrowed(made[one], branches[other])
                    if narrowed is None:
                        return None
                    made[one] = narrowed
        except Spent:
            return None
        return made

    def excludes(self, made: Any, other: Any, depth: int = 0) -> bool:
        """Whether no value that a grammar makes of one schema is valid by another."""
        self._steps.spend()
        one, two = self._resolved(made), self._resolved(other)
        if one is None or two is None or one is two or depth > MAX_FOLLOWED:
            return False
        if (branches := _branches(one)) is not None:
            return all(self.excludes(branch, two, depth + 1) for branch in branches)
        if (branches := _branches(two)) is not None and all(
            self.excludes(one, branch, depth + 1) for branch in branches
        ):
            return True
        mine, theirs = _values(one), _values(two)
        if mine is not None and theirs is not None:
            keys, others = self._keys_of(mine), self._keys_of(theirs)
            self._steps.spend(min(len(keys), len(others)) // 8)
            return keys.isdisjoint(others)
        if mine is not None:
            return all(self._refuses(two, value) for value in mine)
        if theirs is not None and all(self._refuses(one, value) for value in theirs):
            return True
        common = _kinds(one) & _kinds(two)
        if not common:
            return True
        if common <= {"integer", "number"}:
            return _is_below(one, two) or _is_below(two, one)
        return common == {"object"} and self._excludes_object(one, two, depth)

    def narrowed(self, made: Any, other: Any) -> Json | None:
        """The first schema with fewer values, none of them valid by the second."""
        one, two = self._resolved(made), self._resolved(other)
        if one is None or two is None or _branches(one) is not None or not _is_object(one):
            return None
        properties, required = _properties(one), _required(one)
        for name, inner in properties.items():
            if name in required or name not in _properties(two):
                continue
            if _values(self._resolved(inner) or {}) is None:
                continue
            if self.excludes(inner, _properties(two)[name]):
                return {**one, "required": [*required, name]}
        for name in _required(two):
            if name in properties and name not in required and _is_closed(one):
                left = {k: v for k, v in properties.items() if k != name}
                return {**one, "properties": left}
        return None

    def _excludes_object(self, one: Schema, two: Schema, depth: int) -> bool:
        mine, theirs = _properties(one), _properties(two)
        if _is_closed(one) and any(name not in mine for name in _required(two)):
            return True
        is_shut = two.get("additionalProperties") is False and "patternProperties" not in two
        # what names its values is soon told apart, and is what writers of schemas mean for it
        for name in sorted(_required(one), key=lambda name: not self._has_values(mine.get(name))):
            if name not in theirs:
                if is_shut:
                    return True
            elif name in mine and self.excludes(mine[name], theirs[name], depth + 1):
                return True
        return False

    def _has_values(self, schema: Any) -> bool:
        self._steps.spend()
        found = self._resolved(schema)
        return found is not None and _values(found) is not None

    def _keys_of(self, values: Sequence[Any]) -> frozenset[str]:
        known = self._keys.get(id(values))
        if known is None:
            self._steps.spend(len(values))
            known = self._keys[id(values)] = values, frozenset(map(key_of, values))
        return known[1]

    def _refuses(self, schema: Schema, value: Any, depth: int = 0) -> bool:
        """Whether a value is certainly not valid."""
        self._steps.spend()
        branches = _branches(schema)
        if branches is not None:
            found = [self._resolved(branch) for branch in branches]
            return depth < MAX_FOLLOWED and all(
                item is not None and self._refuses(item, value, depth + 1) for item in found
            )
        values = _values(schema)
        if values is not None:
            return key_of(value) not in self._keys_of(values)
        if not any(is_of_type(value, kind) for kind in _kinds(schema)):
            return True
        if not is_number(value):
            return False
        lows, highs = numbers_of(schema, "minimum"), numbers_of(schema, "maximum")
        return any(value < low for low in lows) or any(value > high for high in highs)

    def _resolved(self, schema: Any) -> Schema | None:
        for _ in range(MAX_FOLLOWED):
            if not isinstance(schema, Mapping):
                return None
            ref = schema.get("$ref")
            if ref is None:
                return schema
            schema = self._targets.get(str(ref).removeprefix("#/$defs/"))
        return None


def _branches(schema: Schema) -> Sequence[Any] | None:
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            return branches
    return None


def _values(schema: Any) -> Sequence[Any] | None:
    """All values that it allows, if it names them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Schema) -> frozenset[str]:
    """The types of JSON that it allows."""
    given = schema.get("type")
    if given is None:
        return KINDS
    names = {name for name in (given if isinstance(given, list) else [given]) if is_kind(name)}
    return frozenset(names | ({"integer"} if "number" in names else set()))


def _is_object(schema: Schema) -> bool:
    return schema.get("type", "object") == "object" and isinstance(
        schema.get("properties"), Mapping
    )


def _is_closed(schema: Schema) -> bool:
    """Whether a grammar writes no property but those that are named."""
    return _is_object(schema) and schema.get("additionalProperties", False) is False


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Schema) -> list[str]:
    required = schema.get("required")
    names = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
    return list(dict.fromkeys(names))


def _is_below(one: Schema, two: Schema) -> bool:
    return any(
        high < low for high in numbers_of(one, "maximum") for low in numbers_of(two, "minimum")
    )
