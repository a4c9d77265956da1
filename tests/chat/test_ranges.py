"""Numbers between bounds: all that the rule allows is between them, and what people write is."""

import json
import re

from gbnf import read_grammar
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.chat.json_schema.ranges import number_rule

BOUNDS = st.one_of(
    st.none(),
    st.integers(-120, 120),
    st.decimals(-12, 12, places=2).map(float),
    st.floats(-1e9, 1e9).map(lambda x: round(x, 6)),
)


def as_regex(rule: str) -> re.Pattern[str]:
    """The rule as a pattern of re."""
    parts = re.findall(r'"[^"]*"|\[[^]]*\]|\{[^}]*\}|[()|?*+]', rule)
    return re.compile("".join(re.escape(p[1:-1]) if p.startswith('"') else p for p in parts))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(BOUNDS, BOUNDS, st.booleans(), st.booleans(), st.lists(
    st.decimals(-130, 130, places=3), max_size=30))  # fmt: skip
def test_a_rule_allows_what_is_between(
    least: float | None, most: float | None, above: bool, below: bool, numbers: list[object]
) -> None:
    def fits(number: float) -> bool:
        is_low = least is not None and (number < least or (above and number == least))
        return not is_low and not (
            most is not None and (number > most or (below and number == most))
        )

    rule = number_rule(least, most, above=above, below=below)
    if rule is None:
        assert least is not None and most is not None and not least < most
        return
    grammar = read_grammar(f"root ::= {rule}")
    for seed in range(30):
        text = grammar.text(seed, most=3)
        assert fits(json.loads(text)), text
    pattern = as_regex(rule)
    for number in numbers:
        text = f"{number:f}"
        for written in {text, text.rstrip("0").rstrip(".")} if "." in text else {text}:
            if float(text) or not written.startswith("-"):
                assert bool(pattern.fullmatch(written)) == fits(float(text)), written


def test_what_has_no_number_or_is_too_large_has_no_rule() -> None:
    assert number_rule(3, 2) is None
    assert number_rule(2, 2, above=True) is None
    assert number_rule(1e18, None) is None
    assert number_rule(2, 2) is not None
