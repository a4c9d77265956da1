"""Patterns of texts in the few words that llama.cpp's grammars know.

llama.cpp takes a pattern of literals, classes, groups and repetitions that is anchored at both
ends, and takes it for the JSON text itself, where a quote would end the string. Here a pattern is
written so that it matches what JSON writes for the texts it matches.
"""

from collections.abc import Iterable
from typing import Final, Literal

from kvmem.chat.json_schema.regex import (
    Anchor,
    Chars,
    Choice,
    Look,
    Node,
    PatternError,
    Ranges,
    Repeat,
    join_ranges,
    ranges_without,
    read_regex,
)

__all__ = ["ANYTHING", "Form", "NoMatch", "write_letters", "write_pattern"]

Form = Literal["json", "plain"]
"""Where a text stands: in JSON, or alone, on one line."""

# JSON has no place for halves of a pair, and llama.cpp writes no DEL
NEVER: Final[Ranges] = ((0x7F, 0x7F), (0xD800, 0xDFFF))
CONTROLS: Final[Ranges] = ((0, 0x1F),)
# letter after the backslash in JSON -> what it stands for
JSON_ESCAPES: Final = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
MAX_LETTERS = 20_000
ANYTHING: Final = read_regex(r"[\s\S]*").options[0]
"""What JSON Schema calls a pattern matches anywhere in the text."""


class NoMatch(Exception):
    """Nothing that can be written is matched."""


def write_pattern(pattern: str, *, form: Form = "json") -> str:
    """A pattern for llama.cpp that no text matches which ``pattern`` refuses.

    Raises PatternError: it looks around, refers back, or matches no text that can be written.
    """
    options = []
    for option in read_regex(pattern).options:
        is_start = bool(option) and option[0] == Anchor("^")
        is_end = len(option) > is_start and option[-1] == Anchor("$")
        if form == "plain" and not (is_start and is_end):
            raise PatternError("is not anchored with ^ and $")
        inner = option[is_start : len(option) - is_end]
        options.append((*(() if is_start else ANYTHING), *inner, *(() if is_end else ANYTHING)))
    try:
        written = _Writer(form).write_options(options)
    except NoMatch:
        written = ""
    if not written:
        raise PatternError("matches no text that can be written")
    return f"^{written}$"


def write_letters(ranges: Ranges, form: Form, *, in_grammar: bool = False) -> str:
    """One of these letters, in the words of a pattern or of a grammar. Raises NoMatch."""
    alone = ranges_without(ranges, join_ranges((*CONTROLS, *NEVER)))
    escaped = ""
    if form == "json":
        alone = ranges_without(alone, ((0x22, 0x22), (0x5C, 0x5C)))
        letters = [
            letter
            for point, letter in JSON_ESCAPES.items()
            if any(low <= point <= high for low, high in ranges)
        ]
        escaped = "".join(_escape(ord(letter)) for letter in letters)
    found = [f"[{_write_class(alone)}]"] if alone else []
    backslash = '"\\\\" ' if in_grammar else "\\\\"
    found += [f"{backslash}[{escaped}]"] if escaped else []
    if not found:
        raise NoMatch
    return found[0] if len(found) == 1 and alone else f"({'|'.join(found)})"


class _Writer:
    def __init__(self, form: Form) -> None:
        self._form = form

    def write_options(self, options: Iterable[tuple[Node, ...]]) -> str:
        written = []
        is_optional = False
        for option in options:
            try:
                text = "".join(self._write(node) for node in option)
            except NoMatch:
                continue
            is_optional |= not text
            written += [text] if text else []
        if not written and not is_optional:
            raise NoMatch
        if not written:
            return ""
        return f"({'|'.join(written)})?" if is_optional else f"({'|'.join(written)})"

    def _write(self, node: Node) -> str:
        if isinstance(node, Anchor):
            raise PatternError("has an anchor inside")
        if isinstance(node, Look):
            raise PatternError("looks around, which no grammar can")
        if isinstance(node, Chars):
            return write_letters(node.ranges, self._form)
        if isinstance(node, Choice):
            return self.write_options(node.options)
        return self._write_repeat(node)

    def _write_repeat(self, node: Repeat) -> str:
        try:
            item = self._write(node.item)
        except NoMatch:
            if node.least:
                raise
            return ""
        if node.most == 0 or not item:
            return ""
        if item.endswith(")?"):  # it may be empty
            item = f"({item})"
        if node.most is not None:
            return f"{item}{{{node.least},{node.most}}}"
        if node.least < 2:
            return item + "*+"[node.least]
        if len(item) > MAX_LETTERS:  # it doubles with each repetition around it
            raise PatternError("is too long where its repetitions are written out")
        return f"{item}{{{node.least}}}{item}*"


def _write_class(ranges: Ranges) -> str:
    return "".join(
        _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}" for low, high in ranges
    )


def _escape(point: int) -> str:
    if chr(point).isascii() and chr(point).isalnum():
        return chr(point)
    return rf"\x{point:02X}" if point < 0x80 else rf"\U{point:08X}"
