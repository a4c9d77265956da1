"""Arguments that a template writes between tags, without quotes, held to their schemas.

llama.cpp lets such an argument be any text up to the closing tag, whatever its schema says. Here
the rule of an argument is narrowed to the texts that the schema allows, where they can be written:
values that are named, patterns, formats, and lengths from below.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvmem.chat.json_schema import formats
from kvmem.chat.json_schema.keywords import demands_of, numbers_of
from kvmem.chat.json_schema.language import NoText, TextDemands, write_rules
from kvmem.chat.json_schema.normal import NormalSchema
from kvmem.chat.json_schema.pattern import write_pattern
from kvmem.chat.json_schema.regex import PatternError
from kvmem.chat.json_schema.step_limit import Steps
from kvmem.chat.json_schema.texts import MAX_STEPS
from kvmem.chat.json_schema.values import is_of_type
from kvmem.errors import UnsupportedContentError

__all__ = [
    "ANY_TEXT",
    "find_loose_texts",
    "has_loose_texts",
    "hold_texts",
    "only_properties",
    "text_rules",
]

ANY_TEXT: Final = "xml-arg-string"
"""The rule for any text in llama.cpp's grammar for templates of Qwen's kind.

Source: common/parsers/qwen3-coder.cpp.
"""

CLOSING: Final = "\n</parameter>\n"
MAX_LEAST = 1000
# an object may have any values beside a text; others are not looked at by that grammar
PLAIN_KINDS = ("null", "boolean", "number", "object", "array")


@dataclass(frozen=True, slots=True)
class _Form:
    """What one argument may be: a rule, or None for any text.

    lost: keywords that do not hold; demanded: those that the rule holds it to.
    """

    rule: str | None
    lost: tuple[str, ...] = ()
    demanded: tuple[str, ...] = ()


def has_loose_texts(grammar: str) -> bool:
    """Whether a grammar for calls lets texts be anything, in a way that is known here."""
    return re.search(rf"^{ANY_TEXT} ::=", grammar, re.MULTILINE) is not None


def find_loose_texts(normal: NormalSchema, *, can_hold: bool) -> Iterator[tuple[str, str]]:
    """Arguments that may be a text and are not held to their schema: (name, keyword).

    can_hold: what hold_texts does counts.
    """
    for name, form in _forms(normal):
        lost = form.lost if can_hold or form.rule is None else form.demanded
        for keyword in lost:
            yield name, keyword


def text_rules(normal: NormalSchema) -> tuple[str | None, ...]:
    """For each argument, in order, the rule that hold_texts is to narrow it to, if any."""
    return tuple(form.rule for _, form in _forms(normal))


def hold_texts(grammar: str, tools: Sequence[Sequence[str | None]]) -> str:
    """The grammar with its rules for arguments narrowed. tools: the text_rules of each, in order.

    The result is to be checked as any grammar.

    Raises UnsupportedContentError: the grammar is not of the kind that was looked for.
    """
    narrowed = {
        f"tool-{number}-arg-{index}": rule
        for number, rules in enumerate(tools)
        for index, rule in enumerate(rules)
        if rule is not None
    }
    lines = []
    below: dict[str, None] = {}  # what the rules name
    for line in grammar.splitlines():
        name, is_rule, body = line.partition(" ::= ")
        rule = narrowed.get(name)
        if is_rule and rule is not None and body.endswith(f" {ANY_TEXT}"):
            first, _, named = rule.partition("\n")
            line = f"{name} ::= {body.removesuffix(ANY_TEXT)}({first})"
            below |= {named: None} if named else {}
            del narrowed[name]
        lines.append(line)
    if narrowed:
        raise UnsupportedContentError(
            "arguments of the tools cannot be held to their schemas with this chat template"
        )
    return "\n".join([*lines, *below, ""])


def only_properties(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """An object with the arguments of a schema that is alternatives of objects: all of them, and
    required where each alternative requires them. None for a schema of another kind.

    llama.cpp lets a call have no argument where the schema does not say at once that it is an
    object.
    """
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(branches, list):
        return None
    properties: dict[str, list[Any]] = {}
    required: list[str] | None = None
    for branch in branches:
        target = _resolved(branch, schema)
        given = target.get("properties") if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping) or not isinstance(given, Mapping):
            return None
        for name, inner in given.items():
            seen = properties.setdefault(name, [])
            seen += [] if inner in seen else [inner]
        wanted = target.get("required")
        wanted = wanted if isinstance(wanted, list) else []
        required = wanted if required is None else [name for name in required if name in wanted]
    joined = {k: v[0] if len(v) == 1 else {"anyOf": v} for k, v in properties.items()}
    made = {"type": "object", "properties": joined, "required": required or []}
    return {**made, "$defs": schema["$defs"]} if "$defs" in schema else made


def _forms(normal: NormalSchema) -> Iterator[tuple[str, _Form]]:
    properties = normal.schema.get("properties")
    steps = Steps(MAX_STEPS)
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        yield name, _form_of(list(_alternatives(schema, normal)), normal, steps)


def _form_of(alternatives: list[Any], normal: NormalSchema, steps: Steps) -> _Form:
    if not any(_may_be_text(item) for item in alternatives):
        return _Form(None)  # JSON, which llama.cpp holds to the schema
    if not all(isinstance(item, Mapping) for item in alternatives):
        return _Form(None, ("the schema",))
    if any(_is_any_text(item) for item in alternatives):
        beside = [keyword for item in alternatives for keyword in _lost_beside_text(item, normal)]
        return _Form(None, tuple(dict.fromkeys(beside)))
    kinds = {kind for item in alternatives for kind in _kinds(item)}
    # what reads as JSON is taken for that: right where any value of its type will do
    harmless = {"string", "null"}
    if any(item.get("type") == "boolean" for item in alternatives):
        harmless.add("boolean")
    rules: list[str] = []
    lost: list[str] = []
    for item in alternatives:
        values = _values(item)
        if values is not None:
            rule: str | None = _values_rule(values, kinds)
        else:
            rule = _type_rule(item, normal, steps) if kinds <= harmless else None
        if rule is None:
            lost += [k for k in demands_of(item) if k != "type"] or ["type"]
        else:
            rules += [rule] if rule else []
    demanded = [
        k for item in alternatives if _may_be_text(item) for k in demands_of(item) if k != "type"
    ]
    if lost or not rules:
        return _Form(None, tuple(dict.fromkeys([*demanded, *lost])))
    parts = [rule.partition("\n") for rule in rules]
    named = dict.fromkeys(lines for _, _, lines in parts if lines)
    rule = "\n".join([" | ".join(first for first, _, _ in parts), *named])
    return _Form(rule, demanded=tuple(dict.fromkeys(demanded)))


def _alternatives(schema: Any, normal: NormalSchema, depth: int = 0) -> Iterator[Any]:
    """The schemas of which one has to hold; each of one type, or of values."""
    schema = _resolved(schema, normal.schema)
    branches = None
    if isinstance(schema, Mapping):
        branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list) and depth < 8:
        for branch in branches:
            yield from _alternatives(branch, normal, depth + 1)
    elif isinstance(schema, Mapping) and isinstance(schema.get("type"), list):
        yield from ({**schema, "type": kind} for kind in schema["type"])
    else:
        yield schema


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(8):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            break
        schema = root.get("$defs", {}).get(ref.removeprefix("#/$defs/"))
    return schema


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: Any) -> set[str]:
    values = _values(schema)
    if values is not None:
        names = ("null", "boolean", "number", "string", "array", "object")
        return {kind for kind in names for value in values if is_of_type(value, kind)}
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind is None:
        return {"string"}
    return {"number"} if kind == "integer" else {kind} if isinstance(kind, str) else set()


def _may_be_text(schema: Any) -> bool:
    return "string" in _kinds(schema) or (
        isinstance(schema, Mapping) and _values(schema) is None and schema.get("type") is None
    )


def _is_any_text(schema: Any) -> bool:
    """Of a schema without a type, llama.cpp takes any text too."""
    return (
        _may_be_text(schema)
        and _values(schema) is None
        and not any(k in schema for k in ("pattern", "format", "minLength", "maxLength"))
    )


def _lost_beside_text(schema: Any, normal: NormalSchema) -> list[str]:
    """What is not looked at of values that are no text, where a text may stand in their place."""
    values = _values(schema)
    if values is not None:
        if values and f'"{json.dumps(values[0])}"' in normal.ranges:
            return ["the range"]
        others = [value for value in values if not isinstance(value, str) and value is not None]
        is_switch = len(others) == 2 and all(isinstance(value, bool) for value in others)
        return [k for k in demands_of(schema) if k != "type"] if others and not is_switch else []
    if _may_be_text(schema):
        return []
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "integer":
        return [k for k in demands_of(schema) if k != "type"] or ["type"]
    return [k for k in demands_of(schema) if k != "type"] if kind in PLAIN_KINDS else []


def _values_rule(values: Sequence[Any], kinds: set[str]) -> str:
    """A rule for values that are named; nothing where none can be written."""
    texts = " | ".join(_literal(text) for text in _texts_of(values, kinds))
    return f"({texts}) {_literal(CLOSING)}" if texts else ""


def _type_rule(schema: Mapping[str, Any], normal: NormalSchema, steps: Steps) -> str | None:
    """A rule for the values of a type, with what it demands of texts; None where there is none."""
    kind = schema.get("type")
    if kind in ("null", "boolean"):
        words = '"null"' if kind == "null" else '("true" | "false")'
        return f"{words} {_literal(CLOSING)}"
    demands = set(demands_of(schema)) - {"type"}
    texts = None
    if demands == {"pattern"}:
        texts = normal.patterns.get(str(schema["pattern"]))
    elif demands == {"format"} and schema["format"] in formats.KNOWN:
        texts = TextDemands((formats.PLAIN[schema["format"]],))
    elif demands == {"minLength"} and numbers_of(schema, "minLength"):
        least = math.ceil(schema["minLength"])
        if least <= 0:
            return ANY_TEXT
        # the first ones on one line, so that the closing tag is none of them
        return rf"[^\x0A]{{{least}}} {ANY_TEXT}" if least <= MAX_LEAST else None
    if texts is None:
        return None
    if texts.is_one_pattern:
        with suppress(PatternError):  # it may look ahead
            return f"{write_pattern(texts.patterns[0], form='plain')[1:-1]} {_literal(CLOSING)}"
    try:
        written, _, named = write_rules(texts, "plain", steps).partition("\n")
    except (PatternError, NoText):
        return None
    return f"{written} {_literal(CLOSING)}\n{named}"


def _texts_of(values: Sequence[Any], kinds: set[str]) -> Iterator[str]:
    """Values as they stand between the tags, without those that would be read as others."""
    allowed = {json.dumps(value, sort_keys=True) for value in values}
    for value in values:
        if not isinstance(value, str):
            yield json.dumps(value, ensure_ascii=False)
            continue
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        is_taken = isinstance(read, str) or not any(is_of_type(read, kind) for kind in kinds)
        if CLOSING not in f"{value}\n" and (is_taken or json.dumps(read) in allowed):
            yield value


def _literal(text: str) -> str:
    letters = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}
    # a NUL would end the grammar's text
    letters |= {chr(code): f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), 127)}
    return '"' + "".join(letters.get(letter, letter) for letter in text) + '"'
