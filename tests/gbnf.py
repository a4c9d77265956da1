"""Random texts of a grammar (GBNF), for tests that ask what a grammar allows."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<chars>\[(?:[^\]\\]|\\.)*\])|(?P<name>[A-Za-z][\w-]*)"""
    r"""|(?P<times>\{\d+(?:,\d*)?\}|[*+?])|(?P<sign>[()|.])|\s+""",
    re.DOTALL | re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
DEEP = 12
FAR = 10**6

Node = tuple[str, object]


@dataclass
class _Times:
    item: Node
    least: int
    most: int | None


@dataclass
class Grammar:
    """Rules by name, and how deep each is at least."""

    rules: dict[str, Node]
    depths: dict[str, int]

    def text(self, seed: int, root: str = "root", most: int = 4) -> str:
        """A text that the grammar allows. most: repetitions beyond the least."""
        rng = random.Random(seed)
        parts: list[str] = []
        self._write(self.rules[root], rng, 0, most, parts.append)
        return "".join(parts)

    def accepts(self, text: str, root: str = "root") -> bool:
        """Whether a text is one of the grammar's."""
        return len(text) in self._ends(self.rules[root], text, {0})

    def _ends(self, node: Node, text: str, starts: set[int]) -> set[int]:
        """Where a node may end that begins at one of these places."""
        kind, value = node
        if kind == "text":
            return {at + len(str(value)) for at in starts if text.startswith(str(value), at)}
        if kind == "chars":
            assert isinstance(value, list)
            return {
                at + 1 for at in starts
                if at < len(text) and any(low <= ord(text[at]) <= high for low, high in value)
            }  # fmt: skip
        if kind == "name":
            return self._ends(self.rules[str(value)], text, starts) if starts else starts
        if kind == "all":
            assert isinstance(value, list)
            for item in value:
                starts = self._ends(item, text, starts)
            return starts
        if kind == "any":
            assert isinstance(value, list)
            return {end for item in value for end in self._ends(item, text, starts)}
        assert isinstance(value, _Times)
        found = set(starts) if value.least == 0 else set()
        for times in range(1, len(text) + 2 if value.most is None else value.most + 1):
            starts = self._ends(value.item, text, starts)
            if times >= value.least:
                if starts <= found and times > value.least:
                    break
                found |= starts
        return found

    def _write(
        self, node: Node, rng: random.Random, depth: int, most: int, put: Callable[[str], None]
    ) -> None:
        kind, value = node
        if kind == "text":
            put(str(value))
        elif kind == "chars":
            ranges = value
            assert isinstance(ranges, list)
            low, high = rng.choice(ranges)
            put(chr(rng.randint(low, min(high, low + 300))))
        elif kind == "name":
            self._write(self.rules[str(value)], rng, depth + 1, most, put)
        elif kind == "all":
            assert isinstance(value, list)
            for item in value:
                self._write(item, rng, depth, most, put)
        elif kind == "any":
            assert isinstance(value, list)
            options = value
            if depth > DEEP:
                least = min(self.depth_of(item) for item in options)
                options = [item for item in options if self.depth_of(item) == least]
            self._write(rng.choice(options), rng, depth, most, put)
        else:
            assert isinstance(value, _Times)
            item, least, largest = value.item, value.least, value.most
            extra = 0 if depth > DEEP else rng.randint(0, most)
            times = least + extra if largest is None else rng.randint(
                least, min(largest, least + extra))  # fmt: skip
            for _ in range(times):
                self._write(item, rng, depth, most, put)

    def depth_of(self, node: Node) -> int:
        """How many rules deep its shortest text is."""
        kind, value = node
        if kind == "name":
            return 1 + self.depths[str(value)]
        if kind == "all":
            assert isinstance(value, list)
            return max((self.depth_of(item) for item in value), default=0)
        if kind == "any":
            assert isinstance(value, list)
            return min(self.depth_of(item) for item in value)
        if kind == "times":
            assert isinstance(value, _Times)
            return self.depth_of(value.item) if value.least else 0
        return 0


def read_grammar(text: str) -> Grammar:
    rules: dict[str, Node] = {}
    for line in text.splitlines():
        name, is_rule, body = line.partition(" ::= ")
        if is_rule:
            rules[name] = _Reader(body).read()
    grammar = Grammar(rules, dict.fromkeys(rules, FAR))
    for _ in rules:
        before = dict(grammar.depths)
        for name, node in rules.items():
            grammar.depths[name] = min(grammar.depth_of(node), FAR)
        if grammar.depths == before:
            break
    return grammar


class _Reader:
    def __init__(self, body: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(body):
            found = TOKEN.match(body, at)
            assert found is not None, body[at : at + 40]
            at = found.end()
            if found.lastgroup is not None:
                self._tokens.append((found.lastgroup, found[0]))
        self._at = 0

    def read(self) -> Node:
        node = self._options()
        assert self._at == len(self._tokens)
        return node

    def _options(self) -> Node:
        options: list[Node] = []
        items: list[Node] = []
        while self._at < len(self._tokens) and self._tokens[self._at] != ("sign", ")"):
            kind, text = self._tokens[self._at]
            self._at += 1
            if text == "|" and kind == "sign":
                options.append(("all", items))
                items = []
            elif kind == "times":
                items.append(("times", _Times(items.pop(), *_times(text))))
            elif text == "(" and kind == "sign":
                items.append(self._options())
                self._at += 1
            elif kind == "text":
                items.append(("text", _plain(text[1:-1])))
            elif kind == "chars":
                items.append(("chars", _ranges(text[1:-1])))
            elif kind == "name":
                items.append(("name", text))
            else:
                items.append(("chars", [(32, 126)]))
        options.append(("all", items))
        return options[0] if len(options) == 1 else ("any", options)


def _times(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    least, comma, most = text[1:-1].partition(",")
    return int(least), (int(most) if most else None) if comma else int(least)


def _plain(text: str) -> str:
    def letter(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return chr(int(code, 16)) if code else LETTERS.get(found[4], found[4])

    return ESCAPE.sub(letter, text)


def _ranges(text: str) -> list[tuple[int, int]]:
    is_negated = text.startswith("^")
    points: list[tuple[int, bool]] = []  # letter, and whether it was written as an escape
    at = int(is_negated)
    while at < len(text):
        found = ESCAPE.match(text, at)
        points.append((ord(_plain(found[0])), True) if found else (ord(text[at]), False))
        at = found.end() if found else at + 1
    ranges = []
    n = 0
    while n < len(points):
        if n + 2 < len(points) and points[n + 1] == (ord("-"), False):
            ranges.append((points[n][0], points[n + 2][0]))
            n += 3
        else:
            ranges.append((points[n][0], points[n][0]))
            n += 1
    if not is_negated:
        return ranges
    left = [p for p in range(32, 0x250) if not any(low <= p <= high for low, high in ranges)]
    return [(p, p) for p in left]
