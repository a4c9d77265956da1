"""Numbers between bounds as rules of a grammar; llama.cpp has them for integers alone.

A schema holds a constant in place of such numbers, and the constant's place in the grammar is taken
by the rule.
"""

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from kvmem.chat.json_schema.keywords import BOUNDS, demands_of, numbers_of, with_subschemas
from kvmem.llama.grammar import schema_grammar

__all__ = ["LARGEST", "mark_ranges", "number_rule", "put_rules"]

# of digits behind the point, and of those in front where there is no bound
MOST: Final = 15
LARGEST: Final = 10**MOST - 1  # what llama.cpp writes of an integer without bounds
ANY: Final = f"[0-9]{{0,{MOST}}}"
SOME: Final = f"[0]{{0,{MOST - 1}}} [1-9] {ANY}"
FRACTION: Final = f'("." [0-9]{{1,{MOST}}})?'


def mark_ranges(schema: Any, rules: dict[str, str]) -> Any:
    """The schema with a constant for each range of numbers.

    rules: gets the text of each constant in a grammar, and the rule for its range.
    """
    if not isinstance(schema, Mapping):
        return schema
    node = with_subschemas(schema, lambda inner, step: mark_ranges(inner, rules))
    given = [keyword for keyword in BOUNDS if keyword in node]
    kinds = node.get("type")
    if not given or set(demands_of(node)) != {"type", *given}:
        return node
    if isinstance(kinds, list) and "number" in kinds and all(numbers_of(node, k) for k in given):
        others = {k: v for k, v in node.items() if k not in (*given, "type")}
        bounds: dict[str, Any] = {keyword: node[keyword] for keyword in given}
        branches = [{"type": k, **bounds} if k == "number" else {"type": k} for k in kinds
                    if k != "integer"]  # fmt: skip
        return mark_ranges({**others, "anyOf": branches}, rules)
    rule = _rule_of(node) if kinds == "number" else None
    if rule is None:
        return node
    # so small that nobody means it, and read back as it is written
    number = int(hashlib.sha256(rule.encode()).hexdigest()[:10], 16)
    constant = float(f"{number}e-300")
    rules[f'"{json.dumps(constant)}"'] = f"({rule})"
    return {**{k: v for k, v in node.items() if k not in (*given, "type")}, "const": constant}


def put_rules(grammar: str, rules: Mapping[str, str]) -> str:
    """The grammar with rules in place of constants, and below it the rules that these name."""
    for constant, rule in rules.items():
        if constant in grammar:
            first, _, named = rule.partition("\n")
            grammar = grammar.replace(constant, first)
            grammar += f"{named}\n" if named and named not in grammar else ""
    return grammar


def _rule_of(node: Mapping[str, Any]) -> str | None:
    """The rule for a schema that has bounds, each of them a number."""
    lows = [(value, False) for value in numbers_of(node, "minimum")]
    lows += [(value, True) for value in numbers_of(node, "exclusiveMinimum")]
    highs = [(value, False) for value in numbers_of(node, "maximum")]
    highs += [(value, True) for value in numbers_of(node, "exclusiveMaximum")]
    if len(lows) + len(highs) < sum(keyword in node for keyword in BOUNDS):
        return None
    least, above = max(lows, default=(None, False))
    most, below = min(((v, not is_open) for v, is_open in highs), default=(None, True))
    return number_rule(least, most, above=above, below=not below)


def number_rule(
    least: float | None, most: float | None, *, above: bool = False, below: bool = False
) -> str | None:
    """The numbers from least to most, in decimals without an exponent; None where there are none,
    or where a bound is too large.

    above, below: without the bound itself.
    """
    low = None if least is None else Decimal(repr(least))
    high = None if most is None else Decimal(repr(most))
    if any(bound is not None and not _is_plain(bound) for bound in (low, high)):
        return None
    options = []
    if low is None or low < 0:
        top = None if low is None else -low
        if high is None or high >= 0:
            magnitudes = _magnitudes(Decimal(0), top, high == 0 and below, above)
        else:
            magnitudes = _magnitudes(-high, top, below, above)
        options += [f'"-" ({rule})' for rule in magnitudes]
    if high is None or high >= 0:
        bottom = max(low, Decimal(0)) if low is not None else Decimal(0)
        is_open = above and low is not None and low >= 0
        options += _magnitudes(bottom, high, is_open, below)
    return " | ".join(options) or None


def _is_plain(bound: Decimal) -> bool:
    return abs(bound) < Decimal(10) ** MOST and -int(bound.as_tuple().exponent) <= MOST


def _magnitudes(low: Decimal, high: Decimal | None, is_open: bool, is_below: bool) -> list[str]:
    """Rules for low <= x <= high, where 0 <= low; is_open, is_below: without low, without high."""
    first, after = _parts(low)
    if high is None:
        return [_join(first, _least(after, is_open)), f"{_integers(first + 1, None)} {FRACTION}"]
    last, until = _parts(high)
    if high < low or (high == low and (is_open or is_below)):
        return []
    if first == last:
        return _joined(first, _between(after, until, is_open, is_below))
    options = _joined(first, _least(after, is_open))
    if first + 1 < last:
        options.append(f"{_integers(first + 1, last - 1)} {FRACTION}")
    return options + _joined(last, _most(until, is_below))


def _parts(number: Decimal) -> tuple[int, str]:
    """The number before the point, and the digits behind it."""
    whole, _, digits = f"{number:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _joined(whole: int, digits: list[str]) -> list[str]:
    return [_join(whole, digits)] if digits else []


def _join(whole: int, digits: list[str]) -> str:
    """A number with any of these behind the point; one of nothing stands for no point."""
    behind = " | ".join(item for item in digits if item)
    fraction = f'("." ({behind}))' if behind else ""
    return f'"{whole}" {fraction}{"?" if fraction and "" in digits else ""}'


def _least(digits: str, is_open: bool) -> list[str]:
    """What may stand behind the point of a number whose fraction is at least this one."""
    if not digits:
        return [SOME] if is_open else ["", f"[0-9] {ANY}"]
    found = [f"[{_next(digits[0])}-9] {ANY}"] if digits[0] != "9" else []
    rest = _least(digits[1:], is_open)
    return [*found, *(f'"{digits[0]}" {item}' for item in rest)]


def _most(digits: str, is_open: bool) -> list[str]:
    """The same for a fraction of at most this one."""
    if not digits:
        return [] if is_open else ["", f"[0]{{1,{MOST}}}"]
    found = [""]
    if digits[0] != "0":
        found.append(f"[0-{_before(digits[0])}] {ANY}")
    return [*found, *(f'"{digits[0]}" {item}' for item in _most(digits[1:], is_open))]


def _between(low: str, high: str, is_open: bool, is_below: bool) -> list[str]:
    """The same for a fraction between two, of which the first is the smaller one, if any is."""
    if not low and not high:
        return ["", f"[0]{{1,{MOST}}}"] if not is_open and not is_below else []
    if not low and not is_open:
        return _most(high, is_below)
    one, two = (low or "0")[0], (high or "0")[0]
    if one == two:
        inner = _between(low[1:].rstrip("0"), high[1:], is_open, is_below)
        return [f'"{one}" {item}' for item in inner]
    found = [f'"{one}" {item}' for item in _least(low[1:], is_open)]
    if int(one) + 1 < int(two):
        found.append(f"[{_next(one)}-{_before(two)}] {ANY}")
    return [*found, *(f'"{two}" {item}' for item in _most(high[1:], is_below))]


def _next(digit: str) -> int:
    return int(digit) + 1


def _before(digit: str) -> int:
    return int(digit) - 1


@lru_cache(maxsize=512)
def _integers(least: int, most: int | None) -> str:
    # with one bound alone llama.cpp's rule is wrong from two digits on
    bounds = {"minimum": least, "maximum": max(least, LARGEST) if most is None else most}
    lines = schema_grammar({"type": "integer", **bounds}).splitlines()
    return next(line for line in lines if line.startswith("root ::= ")).removeprefix("root ::= ")
