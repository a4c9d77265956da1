"""Grammars and schemas that a reply is to follow: only those that llama.cpp can hold it to."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from kvmem.chat.fields import FieldError
from kvmem.chat.json_schema.normal import NormalSchema, normal_schema
from kvmem.chat.json_schema.schema import (
    MAX_DEPTH,
    MAX_TEXT,
    Unenforced,
    find_contradictions,
    find_oversized,
    find_unenforced,
)
from kvmem.errors import RequestError
from kvmem.llama.grammar import check_grammar
from kvmem.llama.model import Model

__all__ = ["require_grammar", "require_schema"]

# llama.cpp follows rules and parentheses by recursion: far more of either overflow its stack
MAX_RULES = 4096

# llama.cpp takes an empty schema for none
ANY_VALUE = {"title": "any value"}


def require_grammar(model: Model, grammar: str) -> None:
    """Raises FieldError: the grammar (GBNF) does not parse, or is larger than can be taken."""
    if _depth(grammar) > MAX_DEPTH:
        raise FieldError("grammar", f"has parentheses nested deeper than {MAX_DEPTH}")
    if len(grammar) > MAX_TEXT:
        raise FieldError("grammar", f"is longer than {MAX_TEXT} characters")
    if grammar.count("::=") > MAX_RULES:
        raise FieldError("grammar", f"has more than {MAX_RULES} rules")
    try:
        check_grammar(model, grammar)
    except RequestError as error:
        raise FieldError("grammar", f"does not parse: {error}") from None


def _hint(fault: Unenforced) -> str:
    """What to change, where a keyword alone is in the way."""
    if fault.reason != "has no grammar":
        return ""
    values = ", or give its items an enum of few values" if fault.keyword == "uniqueItems" else ""
    return f"; leave it out{values}"


def require_schema(model: Model, schema: Mapping[str, Any], field: str) -> NormalSchema:
    """The schema as llama.cpp is to get it.

    Raises FieldError, about this field: a demand of the schema would be lost.
    """
    for fault in find_oversized(schema):
        raise FieldError(field, f"cannot be enforced: {fault}")
    normal = normal_schema(schema)
    for fault in find_contradictions(normal):
        raise FieldError(field, f"has no value: {fault}")
    for fault in find_unenforced(normal, lambda text: check_grammar(model, text)):
        raise FieldError(field, f"cannot be enforced: {fault}{_hint(fault)}")
    for fault in find_oversized(normal.schema):
        raise FieldError(field, f"cannot be enforced, written out: {fault}")
    return normal if normal.schema else replace(normal, schema=dict(ANY_VALUE))


def _depth(grammar: str) -> int:
    """At most so deep do its parentheses go, those in texts included."""
    steps = (1 if letter == "(" else -1 for letter in grammar if letter in "()")
    return max(accumulate(steps), default=0)
