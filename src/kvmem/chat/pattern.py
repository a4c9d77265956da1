"""Regular expressions in the few words that llama.cpp's grammars know.

llama.cpp takes a pattern of literals, classes, groups and repetitions that is anchored at both
ends, and takes it for the JSON text itself, where a quote would end the string. Here a pattern is
read as ECMA 262 has it, and written so that it matches what JSON writes for the texts it matches.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PatternError", "write_pattern"]

Ranges = tuple[tuple[int, int], ...]

MAX_POINT: Final = 0x10FFFF
# JSON has no place for halves of a pair, and llama.cpp writes no DEL
NEVER: Final[Ranges] = ((0x7F, 0x7F), (0xD800, 0xDFFF))
DIGIT: Final[Ranges] = ((0x30, 0x39),)
WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Final[Ranges] = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
LINE_ENDS: Final[Ranges] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CONTROLS: Final[Ranges] = ((0, 0x1F),)
# letter after the backslash in JSON -> what it stands for
JSON_ESCAPES: Final = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
LETTER_ESCAPES: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
# Some languages' \d and \w know letters beyond ASCII, and their \s a few more: what is outside is
# outside of all of them.
SETS: Final = {"d": DIGIT, "w": WORD, "s": SPACE}
WIDE_SETS: Final = {
    "d": (*DIGIT, (0x80, MAX_POINT)),
    "w": (*WORD, (0x80, MAX_POINT)),
    "s": ((0x1C, 0x20), (0x85, 0x85), *SPACE),
}

REPEAT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
MAX_REPEATS = 9999
MAX_DEPTH = 64
MAX_LETTERS = 20_000
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
GROUP = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)")
# what JSON Schema calls a pattern matches anywhere in the text
ANYTHING = r"[\s\S]*"


class PatternError(Exception):
    """A pattern that no grammar can hold a text to; the message says why."""


@dataclass(frozen=True, slots=True)
class _Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class _Anchor:
    letter: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """Options, each a sequence."""

    options: tuple[tuple["_Node", ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: "_Chars | _Choice"
    least: int
    most: int | None


_Node = _Chars | _Anchor | _Choice | _Repeat


def write_pattern(pattern: str, *, form: Literal["json", "plain"] = "json") -> str:
    """A pattern for llama.cpp that no text matches which ``pattern`` refuses.

    form: the text stands in JSON, or alone, on one line.

    Raises PatternError: it looks around, refers back, or matches no text that can be written.
    """
    whole = _Reader(pattern).read()
    padding = _Reader(ANYTHING).read().options[0]
    options = []
    for option in whole.options:
        is_start = bool(option) and option[0] == _Anchor("^")
        is_end = len(option) > is_start and option[-1] == _Anchor("$")
        if form == "plain" and not (is_start and is_end):
            raise PatternError("is not anchored with ^ and $")
        inner = option[is_start : len(option) - is_end]
        options.append((*(() if is_start else padding), *inner, *(() if is_end else padding)))
    try:
        written = _Writer(form).write_options(options)
    except _NoMatch:
        written = ""
    if not written:
        raise PatternError("matches no text that can be written")
    return f"^{written}$"


class _Reader:
    """A pattern to its parts, in one pass."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> _Choice:
        found = self._read_choice()
        if self._at < len(self._text):
            raise PatternError("has a parenthesis that is not open")
        return found

    def _read_choice(self) -> _Choice:
        options: list[tuple[_Node, ...]] = []
        items: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                options.append(tuple(items))
                items = []
            else:
                items.append(self._read_repeated())
        return _Choice((*options, tuple(items)))

    def _read_repeated(self) -> _Node:
        item = self._read_item()
        least, most, is_repeat = 1, None, True
        letter = self._text[self._at : self._at + 1]
        counted = REPEAT.match(self._text, self._at)
        if counted is not None:
            if max(len(digits.lstrip("0")) for digits in (counted[1], counted[3] or "")) > 4:
                raise PatternError(f"repeats more than {MAX_REPEATS} times")
            least = int(counted[1])
            most = least if counted[2] is None else int(counted[3]) if counted[3] else None
            self._at = counted.end()
        elif letter and letter in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
            self._at += 1
        else:
            is_repeat = False
        if not is_repeat:
            return item
        if isinstance(item, _Anchor | _Repeat):
            raise PatternError("repeats what cannot be repeated")
        if most is not None and most < least:
            raise PatternError(f"has the repetition {{{least},{most}}}, whose minimum is above its "
                               "maximum")  # fmt: skip
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1  # how eager it is changes no match
        if self._text[self._at : self._at + 1] in ("*", "+") or (
            REPEAT.match(self._text, self._at) is not None
        ):
            raise PatternError("repeats what cannot be repeated")
        return _Repeat(item, least, most)

    def _read_item(self) -> _Node:
        letter = self._text[self._at]
        self._at += 1
        if letter in "^$":
            return _Anchor(letter)
        if letter == ".":
            return _Chars(_outside(LINE_ENDS))
        if letter == "[":
            return self._read_class()
        if letter == "(":
            return self._read_group()
        if letter == "\\":
            return _Chars(self._read_escape())
        if letter in "*+?":
            raise PatternError("repeats what cannot be repeated")
        return _Chars(((ord(letter), ord(letter)),))

    def _read_group(self) -> _Choice:
        if self._text[self._at : self._at + 1] == "?":
            opening = GROUP.match(self._text, self._at)
            if opening is None:
                raise PatternError("looks around, which no grammar can")
            self._at = opening.end()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"has groups nested deeper than {MAX_DEPTH}")
        inner = self._read_choice()
        self._depth -= 1
        if self._at >= len(self._text):
            raise PatternError("has a parenthesis that is not closed")
        self._at += 1
        return inner

    def _read_class(self) -> _Chars:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        found: list[tuple[int, int]] = []
        wide: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            letter = self._text[self._at + 1 : self._at + 2]
            is_set = self._text.startswith("\\", self._at) and letter.lower() in SETS and letter
            low = self._read_member()
            if is_set:
                wide += WIDE_SETS[letter] if letter in SETS else _outside(SETS[letter.lower()])
            is_range = (
                len(low) == 1
                and low[0][0] == low[0][1]
                and self._text.startswith("-", self._at)
                and not self._text.startswith("-]", self._at)
            )
            if not is_range:
                found += low
                continue
            self._at += 1
            high = self._read_member()
            if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                raise PatternError("has a range of letters that is none")
            found.append((low[0][0], high[0][0]))
        self._at += 1
        ranges = _joined(found)
        return _Chars(_outside(_joined((*ranges, *wide))) if is_negated else ranges)

    def _read_member(self) -> Ranges:
        if self._at >= len(self._text):
            raise PatternError("has a bracket that is not closed")
        letter = self._text[self._at]
        self._at += 1
        if letter != "\\":
            return ((ord(letter), ord(letter)),)
        if self._text.startswith("b", self._at):
            self._at += 1
            return ((8, 8),)
        return self._read_escape()

    def _read_escape(self) -> Ranges:
        letter = self._text[self._at : self._at + 1]
        code = CODE.match(self._text, self._at)
        if code is not None:
            self._at = code.end()
            point = int(code[1] or code[2] or code[3], 16)
            if point > MAX_POINT:
                raise PatternError("names a letter that there is not")
            return ((point, point),)
        self._at += 1
        if letter.lower() in SETS and letter:
            return SETS[letter] if letter in SETS else _outside(_joined(WIDE_SETS[letter.lower()]))
        if letter in LETTER_ESCAPES:
            point = LETTER_ESCAPES[letter]
        elif letter and not letter.isalnum() and letter.isascii():
            point = ord(letter)
        else:
            raise PatternError(f"has \\{letter}, which no grammar knows")
        return ((point, point),)


class _Writer:
    def __init__(self, form: Literal["json", "plain"]) -> None:
        self._form = form

    def write_options(self, options: Iterable[tuple[_Node, ...]]) -> str:
        written = []
        is_optional = False
        for option in options:
            try:
                text = "".join(self._write(node) for node in option)
            except _NoMatch:
                continue
            is_optional |= not text
            written += [text] if text else []
        if not written and not is_optional:
            raise _NoMatch
        if not written:
            return ""
        return f"({'|'.join(written)})?" if is_optional else f"({'|'.join(written)})"

    def _write(self, node: _Node) -> str:
        if isinstance(node, _Anchor):
            raise PatternError("has an anchor inside")
        if isinstance(node, _Chars):
            return self._write_chars(node.ranges)
        if isinstance(node, _Choice):
            return self.write_options(node.options)
        return self._write_repeat(node)

    def _write_repeat(self, node: _Repeat) -> str:
        try:
            item = self._write(node.item)
        except _NoMatch:
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

    def _write_chars(self, ranges: Ranges) -> str:
        alone = _without(ranges, _joined((*CONTROLS, *NEVER)))
        escaped = ""
        if self._form == "json":
            alone = _without(alone, ((0x22, 0x22), (0x5C, 0x5C)))
            letters = [
                letter
                for point, letter in JSON_ESCAPES.items()
                if any(low <= point <= high for low, high in ranges)
            ]
            escaped = "".join(_escape(ord(letter)) for letter in letters)
        found = [f"[{_write_class(alone)}]"] if alone else []
        found += [rf"\\[{escaped}]"] if escaped else []
        if not found:
            raise _NoMatch
        return found[0] if len(found) == 1 and alone else f"({'|'.join(found)})"


class _NoMatch(Exception):
    """Nothing that can be written is matched."""


def _write_class(ranges: Ranges) -> str:
    return "".join(
        _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}" for low, high in ranges
    )


def _escape(point: int) -> str:
    if chr(point).isascii() and chr(point).isalnum():
        return chr(point)
    return rf"\x{point:02X}" if point < 0x80 else rf"\U{point:08X}"


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """In order, and without overlaps."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _outside(ranges: Ranges) -> Ranges:
    return _without(((0, MAX_POINT),), ranges)


def _without(ranges: Ranges, taken: Ranges) -> Ranges:
    """What is left of ranges."""
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        for start, stop in taken:
            if stop < low or start > high:
                continue
            if low < start:
                left.append((low, start - 1))
            low = stop + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)
