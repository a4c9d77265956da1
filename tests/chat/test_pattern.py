"""Patterns as llama.cpp takes them: what they let through is matched by the client's own."""

import json
import re

import pytest
from gbnf import read_grammar

from kvmem.chat.json_schema import formats
from kvmem.chat.json_schema.pattern import write_pattern
from kvmem.chat.json_schema.regex import PatternError
from kvmem.llama.grammar import schema_grammar

PATTERNS = (
    "abc", "^abc", "abc$", "^a|b$", r"^\d{4}-\d{2}-\d{2}$", r"^[a-z0-9_-]+$", "^.*$", "^a.c$",
    r"^[^\s@]+@[^\s@]+\.[^\s@]+$", r"^\w+(\.\w+)*$", r"^(?:\+\d{1,3})?[ -]?\d+$", r"^[^\"\\]*$",
    r'^"\\"$', "^x+?y*?$", "^(a|b|)c$", "^(?<year>[0-9]{4})$", r"^\S+$", r"^[\w.-]+$", r"^a{2,}$",
    r"^/[^/]*(/[^/]*)*$", r"^\u0041\x42$", "^(a{3}){2}$", r"^[\]\-^]+$", r"^#[0-9a-fA-F]{6}$",
    "^(foo|bar)", r"\.py$", "^[äöü]+$", r"^[^a-z]$", "^a{0}b$", "^{a}$",
)  # fmt: skip


@pytest.mark.parametrize("pattern", [*PATTERNS, *formats.PATTERNS.values()])
def test_what_the_grammar_allows_is_matched(pattern: str) -> None:
    written = write_pattern(pattern)
    grammar = read_grammar(schema_grammar({"type": "string", "pattern": written}))
    ours = re.compile(pattern.replace("(?<year>", "(?:"))
    texts = {json.loads(grammar.text(seed)) for seed in range(60)}
    assert all(ours.search(text) for text in texts)


@pytest.mark.parametrize("pattern", [*PATTERNS[4:], *formats.PLAIN.values()])
def test_the_plain_form_is_a_rule_itself(pattern: str) -> None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        with pytest.raises(PatternError, match="is not anchored"):
            write_pattern(pattern, form="plain")
        return
    grammar = read_grammar("root ::= " + write_pattern(pattern, form="plain")[1:-1])
    ours = re.compile(pattern.replace("(?<year>", "(?:"))
    for seed in range(60):
        text = grammar.text(seed)
        assert ours.search(text) and "\n" not in text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\d{3}$", "042"),
        ("b", "abc"),
        ("^.$", '"'),
        ("^.$", "\\"),
        (r"^\s$", "\t"),
        ("^[^a]$", '"'),
        (formats.PATTERNS["email"], "john.doe@mail.example.com"),
        (formats.PATTERNS["ipv6"], "2001:db8::1"),
        (formats.PATTERNS["ipv4"], "192.168.0.255"),
        (formats.PATTERNS["uri"], "https://example.com:80/a/b%20c?x=1&y=2#top"),
        (formats.PATTERNS["uri"], "file:///etc/hosts"),
        (formats.PATTERNS["duration"], "P1Y2M3DT4H5M6S"),
    ],
)
def test_usual_texts_can_be_written(pattern: str, text: str) -> None:
    """As JSON, for which the written pattern is; classes of Python's re know no \\U in brackets."""
    letters = re.sub(r"\\U([0-9A-F]{8})", lambda m: re.escape(chr(int(m[1], 16))),
                     write_pattern(pattern))  # fmt: skip
    assert re.fullmatch(letters, json.dumps(text)[1:-1])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(?=a)b$", "looks around"),
        ("^(?!a)b$", "looks around"),
        ("(?i)abc", "a group that begins with"),
        (r"^(a)\1$", r"has \\1"),
        (r"^a\b$", r"has \\b"),
        (r"^\p{L}$", r"has \\p"),
        ("^(a$", "a parenthesis that is not closed"),
        ("^a)$", "a parenthesis that is not open"),
        ("^[a$", "a bracket that is not closed"),
        ("^*a$", "repeats what cannot be repeated"),
        ("^a**$", "repeats what cannot be repeated"),
        ("^a{5,3}$", "minimum is above its maximum"),
        ("^.{1,10000}$", "more than 9999 times"),
        ("(" * 300 + "a" + ")" * 300, "nested deeper than 64"),
        ("(" * 28 + "a" + "{2,})" * 28, "too long where its repetitions are written out"),
        ("^(a^b)$", "has an anchor inside"),
        ("^[z-a]$", "a range of letters that is none"),
        ("^$", "matches no text"),
        (r"^\x00$", "matches no text"),
    ],
)
def test_what_no_grammar_can_is_told(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        write_pattern(pattern)


def test_a_lazy_repetition_is_no_option() -> None:
    """llama.cpp would read `x+?` as `(x+)?`."""
    grammar = read_grammar(schema_grammar({"type": "string", "pattern": write_pattern("^x+?$")}))
    assert "" not in {json.loads(grammar.text(seed)) for seed in range(50)}
