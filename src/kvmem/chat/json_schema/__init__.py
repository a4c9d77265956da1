"""JSON schemas as grammars: what llama.cpp can hold a reply to, and what of a schema it cannot."""

from kvmem.chat.json_schema.constraint import require_grammar, require_schema
from kvmem.chat.json_schema.normal import NormalSchema, normal_schema
from kvmem.chat.json_schema.ranges import put_rules
from kvmem.chat.json_schema.schema import Unenforced, find_oversized, find_unenforced
from kvmem.chat.json_schema.text_arguments import (
    find_loose_texts,
    has_loose_texts,
    hold_texts,
    only_properties,
    text_rules,
)

__all__ = [
    "NormalSchema",
    "Unenforced",
    "find_loose_texts",
    "find_oversized",
    "find_unenforced",
    "has_loose_texts",
    "hold_texts",
    "normal_schema",
    "only_properties",
    "put_rules",
    "require_grammar",
    "require_schema",
    "text_rules",
]
