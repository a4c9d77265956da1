"""JSON schemas in the words that llama.cpp's grammars know.

llama.cpp reads a part of JSON Schema, and some of it in its own way. Here a schema is written so
that a grammar made from it allows no value that the schema forbids. It may allow fewer: names come
in one order, and objects without `additionalProperties` are closed. What cannot be written so stays
as it is, for json_schema.schema to name.

References go into one table under names of their own: llama.cpp knows them by the letters and
digits of their path, and takes those of two tools with the same path for one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmem.chat.json_schema.all_of import UNMERGED, Conflict, Contradiction, join, merge_all_of
from kvmem.chat.json_schema.contradictions import NOTHING, cut_out, is_nothing
from kvmem.chat.json_schema.exclusive import Prover
from kvmem.chat.json_schema.keywords import demands_of, find_target, numbers_of, with_subschemas
from kvmem.chat.json_schema.language import TextDemands
from kvmem.chat.json_schema.listed import list_sets, plain_values
from kvmem.chat.json_schema.ranges import LARGEST, mark_ranges
from kvmem.chat.json_schema.step_limit import Spent, Steps
from kvmem.chat.json_schema.texts import TextWriter
from kvmem.chat.json_schema.values import count_values, is_kind

__all__ = ["NormalSchema", "normal_schema"]

Json = dict[str, Any]

MAX_MULTIPLES = 1000
MAX_NODES = 20_000
# of all sets that are written out: beyond it their demand alone is lost, and not the whole schema
MAX_SET_VALUES = 20_000
MAX_MERGED = 60_000
# what may evaluate properties beside those that are named
EVALUATING = frozenset({"anyOf", "oneOf", "allOf", "if", "dependentSchemas", "patternProperties"})
# patterns of names that any name matches, as schema libraries write records
ANY_NAME = ("", "^", "$", ".*", "^.*", ".*$", "^.*$", "^(.*)$")


@dataclass(frozen=True, slots=True)
class NormalSchema:
    """A schema that llama.cpp is to get.

    origins: where each of its references points to in the client's schema.
    patterns: what each of its patterns was written from.
    ranges: the rules that its grammar is to have in place of some constants and patterns.
    contradictions: path and keyword of what no value fits, and why; the schema allows any there.
    unwritten: path and keyword of what stays as it is or is left out, and why.
    narrowed: path and keyword of what allows less than the client's schema, and how.
    """

    schema: Json
    origins: Mapping[str, str] = field(default_factory=dict)
    patterns: Mapping[str, TextDemands] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    contradictions: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unwritten: Mapping[tuple[str, str], str] = field(default_factory=dict)
    narrowed: Mapping[tuple[str, str], str] = field(default_factory=dict)


def normal_schema(schema: Mapping[str, Any]) -> NormalSchema:
    """The schema must not be oversized."""
    return _Normalizer(schema).run()


class _Normalizer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        text = json.dumps(root, sort_keys=True, default=str)
        self._digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
        self._names: dict[tuple[str, str], str] = {}  # pointer, what is joined to it -> name
        self._made: Json = {}
        self._origins: dict[str, str] = {}  # name, as a reference -> pointer
        self._waiting: list[tuple[str, Any, str]] = []  # name, schema, path: to be made
        self._merged: dict[int, Any] = {}  # by the id of the root's part that it is made of
        self._texts = TextWriter()
        self._unwritten: dict[tuple[str, str], str] = {}
        self._narrowed: dict[tuple[str, str], str] = {}
        self._nodes = Steps(MAX_NODES)
        self._n_set_values = MAX_SET_VALUES
        self._merges = Steps(MAX_MERGED)
        # what is being written out
        self._widest: tuple[str, str] | None = None

    def run(self) -> NormalSchema:
        try:
            schema = self._node(self._inlined(self._target("#")), "#")
            while self._waiting:
                name, target, path = self._waiting.pop()
                made = self._target(path) if target is None else target
                self._made[name] = self._node(made, path)
        except (Spent, RecursionError):
            where, reason = self._widest, f"comes to more than {MAX_NODES} schemas, written out"
            if self._merges.n_left < 0:
                where, reason = ("#", "allOf"), f"takes more than {MAX_MERGED} steps to merge"
            return NormalSchema(
                {"type": "object"}, unwritten={where or ("#", "the schema"): reason}
            )
        if self._made:
            schema["$defs"] = self._made
        schema, contradictions = cut_out(schema, self._origins)
        self._made = schema.get("$defs", {})
        ranges = dict(self._texts.rules)
        schema = mark_ranges(self._with_exclusive(schema, Prover(self._made)), ranges)
        return NormalSchema(
            schema,
            self._origins,
            self._texts.patterns,
            ranges,
            contradictions,
            {**self._unwritten, **self._texts.unwritten},
            {**self._narrowed, **self._texts.narrowed},
        )

    def _inlined(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The root itself must say that it is an object."""
        followed: set[str] = set()
        while isinstance(ref := schema.get("$ref"), str) and ref not in followed:
            followed.add(ref)
            target = self._target(ref)
            beside = {k: v for k, v in schema.items() if k != "$ref"}
            if not isinstance(target, Mapping):
                break
            try:
                schema = join(beside, target)
            except Contradiction as contradiction:
                return contradiction.schema()
            except Conflict:
                break
        return schema

    def _target(self, ref: str) -> Any:
        """What a reference points to, with each allOf merged; None for nothing."""
        target = find_target(self._root, ref)
        if not isinstance(target, Mapping):
            return target
        if id(target) not in self._merged:
            self._merged[id(target)] = merge_all_of(target, self._root, self._merges)
        return self._merged[id(target)]

    def _refer(self, key: tuple[str, str], path: str, schema: Any) -> Json:
        """A reference to a schema in the new table; equal keys have equal schemas.

        schema: None for what the path points to.
        """
        if key not in self._names:
            name = self._names[key] = f"k{self._digest}x{len(self._names)}"
            self._origins[f"#/$defs/{name}"] = path
            self._waiting.append((name, schema, path))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _node(self, schema: Any, path: str) -> Any:
        self._nodes.spend()
        if isinstance(schema, bool):
            return {} if schema else dict(NOTHING)
        if not isinstance(schema, Mapping):
            return schema
        node = {
            k: v
            for k, v in schema.items()
            if (v is not None or k == "const") and k not in ("$defs", "definitions")
        }
        if isinstance(kinds := node.get("type"), list) and all(map(is_kind, kinds)):
            node["type"] = list(dict.fromkeys(kinds))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(node.get(keyword), list) and len(demands_of(node)) > 1:
                node = self._distributed(node, keyword, path)
        if isinstance(names := node.get("propertyNames"), Mapping):
            node["propertyNames"] = self._inlined(merge_all_of(names, self._root, self._merges))
        if node.get("uniqueItems") is True and isinstance(items := node.get("items"), Mapping):
            node = self._written_sets(node, items, path)
        node = with_subschemas(node, lambda inner, step: self._node(inner, f"{path}/{step}"))
        if isinstance(ref := node.get("$ref"), str):
            if ref in self._origins:  # made here
                return node
            if find_target(self._root, ref) is None:
                return node
            return {**node, **self._refer((ref, ""), ref, None)}
        for step in (
            _plain_exclusive, plain_values, _plain_numbers, _plain_objects, _plain_arrays
        ):  # fmt: skip
            node = step(node)
        self._spend_on_names(node, schema)
        if "allOf" in node:  # llama.cpp keeps little of it, and follows its references without end
            self._unwritten[path, "allOf"] = node.get(UNMERGED, "is lost")
            node = {k: v for k, v in node.items() if k not in ("allOf", UNMERGED)}
        return self._texts.plain(self._texts.without_lost(node, path), path)

    def _written_sets(self, node: Json, items: Mapping[str, Any], path: str) -> Json:
        """Arrays of different values, where they can be written out."""
        if node.keys() & {"enum", "const", "$ref"}:  # may list arrays already
            return node
        values = self._inlined(merge_all_of(items, self._root, self._merges))
        found = list_sets(node, dict(values), self._n_set_values)
        if found is None:
            return node
        sets, has_all_orders = found
        self._n_set_values -= count_values(sets)
        if not has_all_orders:
            self._narrowed[path, "uniqueItems"] = "is written in the order of the values alone"
        said = ("type", "items", "uniqueItems", "minItems", "maxItems")
        return {**{k: v for k, v in node.items() if k not in said}, "enum": sets}

    def _spend_on_names(self, node: Json, schema: Mapping[str, Any]) -> None:
        """Properties that were written out from a list of names."""
        given, made = schema.get("properties"), node.get("properties")
        known = given if isinstance(given, Mapping) else {}
        for name, inner in made.items() if isinstance(made, Mapping) else ():
            if name not in known:
                self._nodes.spend(count_values(inner))

    def _distributed(self, node: Json, keyword: str, path: str) -> Json:
        """What stands beside alternatives, put into each of them."""
        beside = {k: v for k, v in node.items() if k != keyword and k in demands_of(node)}
        others = {k: v for k, v in node.items() if k not in beside and k != keyword}
        if self._widest is None or not path.startswith(f"{self._widest[0]}/"):
            self._widest = (path, keyword)
        branches: list[Any] = []
        text = json.dumps(beside, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        size = count_values(beside)
        room = Steps(self._nodes.n_left)
        for branch in node[keyword]:
            try:
                branches.append(self._joined(beside, branch, key, lambda: room.spend(size)))
            except Contradiction as contradiction:
                branches.append(contradiction.schema())
            except Conflict:
                return node
        return {**others, keyword: branches}

    def _joined(self, beside: Json, branch: Any, key: str, spend: Callable[[], None]) -> Any:
        """Both as one. What a reference points to may come back to itself: it is joined once, and
        has a name.

        key: of what is beside. spend: called before it is written out once more.
        """
        if isinstance(branch, bool):
            return beside if branch else False
        if not isinstance(branch, Mapping):
            raise Conflict
        ref = branch.get("$ref")
        if not isinstance(ref, str):
            spend()
            return join(beside, branch)
        if demands_of(branch) != ["$ref"]:
            raise Conflict
        if (ref, key) in self._names:
            return self._refer((ref, key), ref, None)
        target = self._inlined(branch)
        if "$ref" in target:
            raise Conflict
        spend()
        return self._refer((ref, key), ref, join(beside, target))

    def _with_exclusive(self, node: Any, prover: Prover) -> Any:
        """The same with each oneOf that can be one as an anyOf of branches that exclude each
        other.
        """
        if not isinstance(node, Mapping):
            return node
        node = with_subschemas(node, lambda inner, step: self._with_exclusive(inner, prover))
        branches = node.get("oneOf")
        if isinstance(branches, list) and branches and "anyOf" not in node:
            exclusive = prover.make_exclusive(branches)
            if exclusive is not None:
                node = {k: v for k, v in node.items() if k != "oneOf"}
                node["anyOf"] = exclusive
        return node


def _plain_exclusive(node: Json) -> Json:
    """Bounds that exclude themselves, as they were said until draft 4."""
    node = dict(node)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if node.get(exclusive) is True and bound in node:
            node[exclusive] = node.pop(bound)
        elif node.get(exclusive) is False:
            del node[exclusive]
    return node


def _plain_numbers(node: Json) -> Json:
    """Bounds as llama.cpp has them, and multiples where they can be counted."""
    node = dict(node)
    step = node.get("multipleOf")
    if node.get("type") == "number" and isinstance(step, int) and _is_positive(step):
        node["type"] = "integer"
    kinds = node.get("type")
    if kinds != "integer" and not (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    ):
        return node
    lows = [math.ceil(bound) for bound in numbers_of(node, "minimum")]
    lows += [math.floor(bound) + 1 for bound in numbers_of(node, "exclusiveMinimum")]
    highs = [math.floor(bound) for bound in numbers_of(node, "maximum")]
    highs += [math.ceil(bound) - 1 for bound in numbers_of(node, "exclusiveMaximum")]
    if lows and highs and max(lows) > min(highs):
        return node  # no integer: that is told elsewhere
    for bounds, best, names in (
        (lows, max, ("minimum", "exclusiveMinimum")),
        (highs, min, ("maximum", "exclusiveMaximum")),
    ):
        if bounds:
            for name in [name for name in names if numbers_of(node, name)]:
                del node[name]
            node[names[0]] = best(bounds)
    # with one bound alone llama.cpp's rules are wrong from two digits on
    if lows and not highs and node["minimum"] <= LARGEST:
        node["maximum"] = LARGEST
    elif highs and not lows and node["maximum"] >= -LARGEST:
        node["minimum"] = -LARGEST
    if kinds != "integer":
        return node
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    if isinstance(step, int) and _is_positive(step):
        return _multiples(node, step)
    return node


def _multiples(node: Json, step: int) -> Json:
    if step == 1:
        return {k: v for k, v in node.items() if k != "multipleOf"}
    if "minimum" not in node or "maximum" not in node:
        return node
    first = -(-node["minimum"] // step)
    last = node["maximum"] // step
    if not first <= last < first + MAX_MULTIPLES:
        return node
    counted = ("type", "multipleOf", "minimum", "maximum")
    values = [number * step for number in range(first, last + 1)]
    return {**{k: v for k, v in node.items() if k not in counted}, "enum": values}


def _plain_objects(node: Json) -> Json:
    if not _may_be(node, "object"):
        return node
    node = _plain_names(dict(node))
    open_to = node.get("additionalProperties", True)
    if is_nothing(open_to):
        open_to = node["additionalProperties"] = False
    is_shut = _is_never(node.get("unevaluatedProperties")) and "properties" in node
    if is_shut and not node.keys() & EVALUATING:
        del node["unevaluatedProperties"]
        open_to = node.setdefault("additionalProperties", False)
    given = node.get("properties")
    properties = dict(given) if isinstance(given, Mapping) else {}
    required = node.get("required")
    names = required if isinstance(required, list) else []
    unknown = [name for name in names if isinstance(name, str) and name not in properties]
    if unknown and open_to is not False:
        if given is None:
            node.setdefault("additionalProperties", True)
        properties |= {name: {} if open_to is True else open_to for name in unknown}
    if given is not None or properties:
        node["properties"] = properties
    return _plain_counts(node)


def _plain_names(node: Json) -> Json:
    """Records: rules for names that are not given one by one."""
    rules = node.get("patternProperties")
    if isinstance(rules, Mapping) and len(rules) == 1 and "properties" not in node:
        [(pattern, inner)] = rules.items()
        if pattern in ANY_NAME:
            del node["patternProperties"]
            node["additionalProperties"] = inner
    names = node.get("propertyNames")
    if isinstance(names, Mapping):
        demands = demands_of(names)
        if not demands or (demands == ["type"] and names["type"] == "string"):
            del node["propertyNames"]  # all names are texts
        elif set(demands) <= {"enum", "const", "type"} and len(set(demands) - {"type"}) == 1:
            value = node.get("additionalProperties", True)
            values = names["enum"] if "enum" in names else [names["const"]]
            texts = [name for name in values if isinstance(name, str)] if isinstance(
                values, list) else []  # fmt: skip
            if "properties" not in node and value is not False and texts:
                del node["propertyNames"]
                node["properties"] = {name: {} if value is True else value for name in texts}
                node["additionalProperties"] = False
    return node


def _plain_counts(node: Json) -> Json:
    """Numbers of properties that hold in any case."""
    properties, required = node.get("properties"), node.get("required")
    least, most = numbers_of(node, "minProperties"), numbers_of(node, "maxProperties")
    n_required = len({name for name in required if isinstance(name, str)}) if isinstance(
        required, list) else 0  # fmt: skip
    if least and least[0] <= n_required:
        del node["minProperties"]
    is_closed = node.get("additionalProperties", False) is False
    if most and is_closed and isinstance(properties, Mapping) and most[0] >= len(properties):
        del node["maxProperties"]
    return node


def _plain_arrays(node: Json) -> Json:
    if not _may_be(node, "array"):
        return node
    node = dict(node)
    if isinstance(node.get("items"), list) and "prefixItems" not in node:  # until draft 2019-09
        node["prefixItems"] = node.pop("items")
        if "additionalItems" in node:
            node["items"] = node.pop("additionalItems")
    elif not isinstance(node.get("items"), list):
        node.pop("additionalItems", None)  # it says nothing then
    first = node.get("prefixItems")
    for keyword in ("items", "unevaluatedItems"):
        if node.get(keyword) is True or (isinstance(first, list) and _is_never(node.get(keyword))):
            del node[keyword]
    if first is None and _is_never(node.get("items")):
        del node["items"]
        node["maxItems"] = 0
    most, least = numbers_of(node, "maxItems"), numbers_of(node, "minItems")
    if node.get("uniqueItems") is False or (most and most[0] <= 1):
        node.pop("uniqueItems", None)
    # of a tuple llama.cpp writes every item, and no more
    if isinstance(first, list) and "items" not in node:
        n_items = len(first)
        if not any(n > n_items for n in least) and not any(n < n_items for n in most):
            node.pop("minItems", None)
            node.pop("maxItems", None)
    return node


def _is_never(schema: Any) -> bool:
    return schema is False or is_nothing(schema)


def _may_be(node: Mapping[str, Any], kind: str) -> bool:
    kinds = node.get("type", kind)
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _is_positive(step: float) -> bool:
    return not isinstance(step, bool) and step > 0
