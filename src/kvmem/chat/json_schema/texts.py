"""What a schema demands of texts: patterns, formats and lengths, in the words of a grammar."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvmem.chat.json_schema import formats
from kvmem.chat.json_schema.contradictions import is_nothing, nothing
from kvmem.chat.json_schema.keywords import numbers_of
from kvmem.chat.json_schema.language import NoText, TextDemands, length_range, write_rules
from kvmem.chat.json_schema.pattern import write_pattern
from kvmem.chat.json_schema.regex import PatternError
from kvmem.chat.json_schema.step_limit import Spent, Steps

__all__ = ["MAX_STEPS", "TextWriter"]

Json = dict[str, Any]

# of all texts of a schema: rules, letters of patterns, and steps to find them
MAX_RULES = 10_000
MAX_LETTERS = 1 << 18
MAX_STEPS = 600_000
TOO_MUCH = "comes to too much beside those of other texts"
LENGTHS = ("minLength", "maxLength")
KEYWORDS = ("pattern", "format", *LENGTHS)


class TextWriter:
    """Writes the texts of one schema.

    patterns: what each pattern that it wrote was made from.
    rules: texts of a grammar, and the rules that are to take their places.
    unwritten: path and keyword of what it could not write, and why.
    narrowed: path and keyword of what allows less than the schema, and how.
    """

    def __init__(self) -> None:
        self.patterns: dict[str, TextDemands] = {}
        self.rules: dict[str, str] = {}
        self.unwritten: dict[tuple[str, str], str] = {}
        self.narrowed: dict[tuple[str, str], str] = {}
        self._rules = Steps(MAX_RULES)
        self._letters = Steps(MAX_LETTERS)
        self._work = Steps(MAX_STEPS)

    def plain(self, node: Json, path: str) -> Json:
        """The schema with all that it demands of texts in one keyword, where that can be."""
        form = node.get("format")
        if isinstance(form, str) and not _is_known(form):
            # it says nothing about which texts are right
            return self.plain({k: v for k, v in node.items() if k != "format"}, path)
        if node.get("minLength") == 0:
            node = {k: v for k, v in node.items() if k != "minLength"}
        kinds = node.get("type", "string")
        if (
            "const" in node
            or "enum" in node
            or "string" not in (kinds if isinstance(kinds, list) else [kinds])
        ):
            return node
        demands = _demands_of(node)
        if demands is None:
            return node
        if demands.is_one_pattern and form in formats.KNOWN:  # llama.cpp has it
            return {k: v for k, v in node.items() if k not in LENGTHS}
        short = _shortened(demands, form)
        if short is not None:
            # it may have no text where the format has one
            with suppress(NoText, PatternError):
                written = self._written(short)
                self.patterns[written] = short
                longest = length_range(short.patterns[-1])[1]
                self.narrowed[path, "format"] = f"{form!r} is written up to {longest} letters"
                return {**{k: v for k, v in node.items() if k not in KEYWORDS}, "pattern": written}
        try:
            written = self._written(demands)
        except NoText:
            if "pattern" in node and "format" in node:  # which JSON Schema takes for an annotation
                return self.plain({k: v for k, v in node.items() if k != "format"}, path)
            return _without_texts(node, kinds)
        except PatternError as error:
            keyword = "pattern" if "pattern" in node else "format"
            given = node[keyword]
            shown = " and ".join(map(repr, given if isinstance(given, tuple) else (given,)))
            self.unwritten[path, keyword] = f"{shown} {error}"
            return node
        self.patterns[written] = demands
        return {**{k: v for k, v in node.items() if k not in KEYWORDS}, "pattern": written}

    def without_lost(self, node: Json, path: str) -> Json:
        """The schema without those of its alternatives whose texts could not be written, where
        others are left.
        """
        branches = node.get("anyOf")
        if not isinstance(branches, list):
            return node
        lost = {
            key: index
            for index in range(len(branches))
            for keyword in ("pattern", "format")
            if (key := (f"{path}/anyOf/{index}", keyword)) in self.unwritten
        }
        left = [branch for i, branch in enumerate(branches) if i not in lost.values()]
        if not lost or all(map(is_nothing, left)):
            return node
        for key in lost:
            self.narrowed[key] = f"is left out: {self.unwritten.pop(key)}"
        return {**node, "anyOf": left}

    def _written(self, demands: TextDemands) -> str:
        """A pattern, or one that a rule takes the place of."""
        if demands.is_one_pattern:
            try:
                return self._counted(write_pattern(demands.patterns[0]))
            except PatternError as error:
                try:
                    rules = write_rules(demands, steps=self._work)  # it may look ahead
                except PatternError:
                    raise error from None
        else:
            rules = write_rules(demands, steps=self._work)
        try:
            self._rules.spend(rules.count("\n"))
        except Spent:
            raise PatternError(TOO_MUCH) from None
        name = rules.partition("\n")[0]
        self.rules[f'"{name.replace("-", "")}"'] = rules
        return f"^{name.replace('-', '')}$"

    def _counted(self, pattern: str) -> str:
        try:
            self._letters.spend(len(pattern))
        except Spent:
            raise PatternError(TOO_MUCH) from None
        return pattern


def _is_known(form: str) -> bool:
    return form in formats.PATTERNS or form in (*formats.KNOWN, *formats.CHECKED)


def _demands_of(node: Mapping[str, Any]) -> TextDemands | None:
    """None where there is nothing to write, or nothing that can be read."""
    given = node.get("pattern")  # several where schemas were joined
    patterns = (
        list(given) if isinstance(given, tuple) else [given] if isinstance(given, str) else []
    )
    form = node.get("format")
    if isinstance(form, str):
        known = formats.PATTERNS.get(form) or formats.PLAIN.get(form)
        if known is None:
            return None
        patterns.append(known)
    if not patterns or ("pattern" in node) != isinstance(given, str | tuple):
        return None
    lengths: dict[str, int] = {}
    for keyword in LENGTHS:
        for value in numbers_of(node, keyword):
            if value >= 0 and int(value) == value:
                lengths[keyword] = int(value)
    if len(lengths) < sum(keyword in node for keyword in LENGTHS):
        return None
    least, most = lengths.get("minLength", 0), lengths.get("maxLength")
    if most is not None and most < least:
        return None  # that is told of the lengths themselves
    return _without_lengths(TextDemands(tuple(patterns), least, most))


def _shortened(demands: TextDemands, form: object) -> TextDemands | None:
    """The same with a format of so few letters that none need be counted, as wide as can be."""
    if demands.most is None or not isinstance(form, str):
        return None
    for pattern in formats.SHORT.get(form, ()):
        shortest, longest = length_range(pattern)
        if demands.least <= shortest and longest is not None and longest <= demands.most:
            return TextDemands((*demands.patterns[:-1], pattern))
    return None


def _without_lengths(demands: TextDemands) -> TextDemands:
    """Without those that every text of the patterns has."""
    try:
        ranges = [length_range(pattern) for pattern in demands.patterns]
    except PatternError:
        return demands
    shortest = max(low for low, _ in ranges)
    longest = min((high for _, high in ranges if high is not None), default=None)
    least, most = demands.least, demands.most
    if least <= shortest:
        least = 0
    if most is not None and longest is not None and most >= longest:
        most = None
    return TextDemands(demands.patterns, least, most)


def _without_texts(node: Json, kinds: Any) -> Json:
    """No text fits: what is left of the types."""
    given = [keyword for keyword in KEYWORDS if keyword in node]
    if isinstance(kinds, list) and len(kinds) > 1:
        left = [kind for kind in kinds if kind != "string"]
        return {**{k: v for k, v in node.items() if k not in KEYWORDS}, "type": left}
    return nothing(" and ".join(given), "fit no text" if len(given) > 1 else "fits no text")
