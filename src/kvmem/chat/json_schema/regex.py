"""Regular expressions, as ECMA 262 has them, in parts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = [
    "MAX_POINT",
    "Anchor",
    "Chars",
    "Choice",
    "Look",
    "Node",
    "PatternError",
    "Ranges",
    "Repeat",
    "join_ranges",
    "ranges_without",
    "read_regex",
]

Ranges = tuple[tuple[int, int], ...]

MAX_POINT: Final = 0x10FFFF
DIGIT: Final[Ranges] = ((0x30, 0x39),)
WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Final[Ranges] = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
LINE_ENDS: Final[Ranges] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
LETTER_ESCAPES: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
# Some languages' \d and \w know letters beyond ASCII, and their \s a few more: what is outside is
# outside of all of them.
SETS: Final = {"d": DIGIT, "w": WORD, "s": SPACE}
WIDE_SETS: Final = {
    "d": (*DIGIT, (0x80, MAX_POINT)),
    "w": (*WORD, (0x80, MAX_POINT)),
    "s": ((0x1C, 0x20), (0x85, 0x85), *SPACE, (0xFEFF, 0xFEFF)),
}

REPEAT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
MAX_REPEATS = 9999
MAX_DEPTH = 64
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
GROUP = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)")


class PatternError(Exception):
    """A pattern that no grammar can hold a text to; the message says why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Any one of these letters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`."""

    letter: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Options, each a sequence."""

    options: tuple[tuple["Node", ...], ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many of an item; most: None for any number."""

    item: "Chars | Choice"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """What must follow, or must not."""

    inner: Choice
    is_negated: bool


Node = Chars | Anchor | Choice | Repeat | Look


def read_regex(pattern: str) -> Choice:
    """Raises PatternError: it is no regular expression, or refers back, or looks behind.

    Where languages take a set of letters for larger or smaller ones (`\\w`, `.`), the letters are
    those that fit in all of them, and for what must not follow those that fit in any.
    """
    return _Reader(pattern).read()


class _Reader:
    """A pattern to its parts, in one pass."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._is_wide = False  # what a look ahead must not find: all that any language takes for it

    def read(self) -> Choice:
        found = self._read_choice()
        if self._at < len(self._text):
            raise PatternError("has a parenthesis that is not open")
        return found

    def _read_choice(self) -> Choice:
        options: list[tuple[Node, ...]] = []
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                options.append(tuple(items))
                items = []
            else:
                items.append(self._read_repeated())
        return Choice((*options, tuple(items)))

    def _read_repeated(self) -> Node:
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
        if isinstance(item, Anchor | Look | Repeat):
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
        return Repeat(item, least, most)

    def _read_item(self) -> Node:
        letter = self._text[self._at]
        self._at += 1
        if letter in "^$":
            return Anchor(letter)
        if letter == ".":
            return Chars(_outside(LINE_ENDS[:1] if self._is_wide else LINE_ENDS))
        if letter == "[":
            return self._read_class()
        if letter == "(":
            return self._read_group()
        if letter == "\\":
            return Chars(self._read_escape())
        if letter in "*+?":
            raise PatternError("repeats what cannot be repeated")
        return Chars(((ord(letter), ord(letter)),))

    def _read_group(self) -> Choice | Look:
        if self._text.startswith(("?=", "?!"), self._at):
            return self._read_look()
        if self._text[self._at : self._at + 1] == "?":
            opening = GROUP.match(self._text, self._at)
            if opening is None:
                raise PatternError(_why_no_group(self._text[self._at : self._at + 3]))
            self._at = opening.end()
        return self._read_inner()

    def _read_look(self) -> Look:
        before = self._is_wide
        is_negated = self._text[self._at + 1] == "!"
        self._at += 2
        self._is_wide ^= is_negated
        inner = self._read_inner()
        self._is_wide = before
        return Look(inner, is_negated)

    def _read_inner(self) -> Choice:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"has groups nested deeper than {MAX_DEPTH}")
        inner = self._read_choice()
        self._depth -= 1
        if self._at >= len(self._text):
            raise PatternError("has a parenthesis that is not closed")
        self._at += 1
        return inner

    def _read_class(self) -> Chars:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        before, self._is_wide = self._is_wide, False
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
        self._is_wide = before
        ranges = join_ranges((*found, *wide) if is_negated != before else found)
        return Chars(_outside(ranges) if is_negated else ranges)

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
            is_inside = letter in SETS
            known = (WIDE_SETS if is_inside == self._is_wide else SETS)[letter.lower()]
            return join_ranges(known) if is_inside else _outside(join_ranges(known))
        if letter in LETTER_ESCAPES:
            point = LETTER_ESCAPES[letter]
        elif letter and not letter.isalnum() and letter.isascii():
            point = ord(letter)
        else:
            raise PatternError(f"has \\{letter}, which no grammar knows")
        return ((point, point),)


def _why_no_group(opening: str) -> str:
    if opening.startswith("?#"):
        return "has a comment, which ECMA 262 has not"
    if opening.startswith("?<") and opening[2:] in ("=", "!"):
        return "looks around, which no grammar can"
    return f"has a group that begins with ({opening}, which no grammar knows"


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """In order, and without overlaps."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _outside(ranges: Ranges) -> Ranges:
    return ranges_without(((0, MAX_POINT),), ranges)


def ranges_without(ranges: Ranges, taken: Ranges) -> Ranges:
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
