"""Texts that fit several patterns and a length at once: all that the rules write, fits."""

import json
import re

import pytest
from gbnf import Grammar, read_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from zod import DATE_TIME, EMAIL, UUID

from kvmem.chat.json_schema import formats
from kvmem.chat.json_schema.language import NoText, TextDemands, length_range, write_rules
from kvmem.chat.json_schema.pattern import Form
from kvmem.chat.json_schema.regex import PatternError


def grammar_of(demands: TextDemands, form: Form = "json") -> Grammar:
    rule, _, named = write_rules(demands, form).partition("\n")
    return read_grammar(f"root ::= {rule}\n{named}")


def read(text: str, form: str) -> str:
    return str(json.loads(f'"{text}"')) if form == "json" else text


@pytest.mark.parametrize("form", ["json", "plain"])
@pytest.mark.parametrize(
    ("patterns", "right", "wrong"),
    [
        ((EMAIL,), ["a.b@c.de", "x@y.z-0.org"], [".a@b.cd", "a..b@c.de", "a@b", "a.@b.cd"]),
        ((EMAIL, formats.PATTERNS["email"]), ["a.b@c.de"], [".a@b.cd", "a@-b.cd"]),
        ((UUID, formats.PLAIN["uuid"]), ["01234567-89ab-4def-89ab-0123456789ab"],
         ["01234567-89ab-0def-89ab-0123456789ab", "01234567"]),
        ((DATE_TIME, formats.PLAIN["date-time"]), ["2024-02-29T10:00:00Z"],
         ["2023-02-29T10:00:00Z", "2024-02-29T10:00Z", "2024-01-31T10:00:00+01:00"]),
        ((r"^(?=.*\d)(?=.*[a-z])[a-z\d]{4,6}$",), ["abc1", "1a1a1a"], ["abcd", "1234", "ab1"]),
        ((r"^(?!abc$|x)\w+$",), ["abcd", "ab", "ax"], ["abc", "xa", ""]),
    ],
)  # fmt: skip
def test_patterns_at_once(
    patterns: tuple[str, ...], right: list[str], wrong: list[str], form: Form
) -> None:
    grammar = grammar_of(TextDemands(patterns), form)
    for seed in range(60):
        text = read(grammar.text(seed), form)
        assert all(re.search(pattern, text) for pattern in patterns), text
    assert [grammar.accepts(text) for text in right] == [True] * len(right)
    assert [grammar.accepts(text) for text in wrong] == [False] * len(wrong)


def test_lengths_beside_a_pattern() -> None:
    grammar = grammar_of(TextDemands(("^[a-z]+(-[a-z]+)*$",), 3, 5))
    assert [text for text in ("ab", "abc", "a-b-c", "a-", "abcdef") if grammar.accepts(text)] == [
        "abc", "a-b-c"
    ]  # fmt: skip
    quoted = grammar_of(TextDemands(('["x]',), 2, 3))
    for seed in range(60):
        text = read(quoted.text(seed), "json")
        assert 2 <= len(text) <= 3 and re.search('["x]', text)
    assert quoted.accepts(r"\"a") and not quoted.accepts(r"\"") and not quoted.accepts('"a')


PIECES = st.sampled_from(["a", "b", "[ab]", ".", "a?", "b*", "(a|bb)", "(ab){1,2}", "[^a]", r"\d"])
PATTERNS = st.builds(
    lambda looks, pieces, is_open: (
        "^" + "".join(looks) + "".join(pieces) + ("" if is_open else "$")
    ),
    st.lists(st.sampled_from(["(?!a)", "(?=.*b)", "(?!.*bb)", "(?=..)", "(?!b$)"]), max_size=2),
    st.lists(PIECES, min_size=1, max_size=4),
    st.booleans(),
)
TEXTS = [""] + [a + b + c for a in "ab1" for b in ("", "a", "b") for c in ("", "a", "bb")]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(patterns=st.lists(PATTERNS, min_size=1, max_size=2), least=st.integers(0, 2),
       most=st.sampled_from([None, 2, 4]))  # fmt: skip
def test_any_patterns(patterns: list[str], least: int, most: int | None) -> None:
    """Against Python's own engine, for short texts of few letters: the same ones fit."""

    def fits(text: str) -> bool:
        is_long = most is not None and len(text) > most
        matched = all(re.search(pattern, text) for pattern in patterns)
        return len(text) >= least and not is_long and matched

    try:
        grammar = grammar_of(TextDemands(tuple(patterns), least, most))
    except NoText:
        assert not any(map(fits, TEXTS))
        return
    assert [text for text in TEXTS if grammar.accepts(text)] == list(filter(fits, TEXTS))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^a(?=b)c$", "looks around inside"),
        ("^a|(?=b)$", "looks around inside"),
        ("(?=a)b", "looks around inside"),
        ("^(?<=a)b$", "looks around"),
        ("^a^b$", "has an anchor inside"),
        ("^(a{9999}){9999}$", "is too long beside another demand"),
        ("^(a|b)*a(a|b){14}$", "comes to too much"),
    ],
)
def test_what_cannot_be_read_side_by_side(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        write_rules(TextDemands((pattern,)))


@pytest.mark.parametrize(
    "patterns", [("^a$", "^b$"), ("^(?!a)a$",), ("^a{3}$", "^a{4}$"), ("\x00",)]
)
def test_no_text_fits(patterns: tuple[str, ...]) -> None:
    with pytest.raises(NoText):
        write_rules(TextDemands(patterns))
    with pytest.raises(NoText):
        write_rules(TextDemands(("a",), 2, 1))


@pytest.mark.parametrize(
    ("pattern", "lengths"),
    [
        ("^a$", (1, 1)), ("^a|b", (1, None)), ("^(ab|c){2,3}$", (2, 6)), ("^a?$", (0, 1)),
        ("^$", (0, 0)), ("a", (1, None)), (formats.PLAIN["date"], (10, 10)),
        (formats.PLAIN["uuid"], (36, 36)), (formats.PATTERNS["ipv4"], (7, 15)),
        (formats.PATTERNS["json-pointer"], (0, None)),
    ],
)  # fmt: skip
def test_lengths_of_a_pattern(pattern: str, lengths: tuple[int, int | None]) -> None:
    assert length_range(pattern) == lengths
