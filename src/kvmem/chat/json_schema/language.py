"""Texts that have to fit several patterns and a length at once, as rules of a grammar.

llama.cpp writes one pattern, which looks at nothing but what it writes. Here all of them read the
text side by side, letter by letter; what they know after a letter is a state, and each state that
can still come to an end is a rule.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from kvmem.chat.json_schema.pattern import ANYTHING, Form, NoMatch, write_letters
from kvmem.chat.json_schema.regex import (
    MAX_POINT,
    Anchor,
    Chars,
    Choice,
    Look,
    Node,
    PatternError,
    Ranges,
    Repeat,
    join_ranges,
    read_regex,
)
from kvmem.chat.json_schema.step_limit import Spent, Steps

__all__ = ["NoText", "TextDemands", "length_range", "write_rules"]

ANY: Final = Chars(((0, MAX_POINT),))
MAX_PARTS: Final = 20_000
MAX_STATES: Final = 2000
MAX_STEPS: Final = 1_000_000

States = frozenset[int]


class NoText(Exception):
    """No text fits all that is demanded."""


@dataclass(frozen=True, slots=True)
class TextDemands:
    """patterns: a text has to fit each. least, most: of its letters; None for no limit."""

    patterns: tuple[str, ...]
    least: int = 0
    most: int | None = None

    @property
    def is_one_pattern(self) -> bool:
        return len(self.patterns) == 1 and self.least == 0 and self.most is None


def write_rules(demands: TextDemands, form: Form = "json", steps: Steps | None = None) -> str:
    """An expression for the texts that fit, and below it the rules that it names.

    steps: what is left for this text and others; those that come to nothing take as many.

    Raises:
        PatternError: a pattern cannot be read, or all of them come to too much.
        NoText: nothing that can be written fits.
    """
    if steps is not None and steps.n_left <= 0:
        raise PatternError("comes to too much beside those of other texts")
    found, n_steps = _attempt(demands, form)
    if steps is not None:
        with suppress(Spent):  # the next one is told
            steps.spend(n_steps)
    if isinstance(found, Exception):
        raise type(found)(*found.args)
    return found


@lru_cache(maxsize=256)
def _attempt(demands: TextDemands, form: Form) -> tuple[str | PatternError | NoText, int]:
    """The rules, or why there are none, and the steps that it takes to know."""
    steps = Steps(MAX_STEPS)
    found: str | PatternError | NoText
    try:
        found = _write(demands, form, steps)
    except Spent:
        found = PatternError("comes to too much beside another demand")
    except (PatternError, NoText) as error:
        found = type(error)(*error.args)  # without what it came from, which is large
    return found, MAX_STEPS - steps.n_left


def _write(demands: TextDemands, form: Form, steps: Steps) -> str:
    if demands.most is not None and demands.most < demands.least:
        raise NoText
    readers = [reader for pattern in demands.patterns for reader in _readers(pattern, form, steps)]
    if demands.least or demands.most is not None:
        length = Repeat(ANY, demands.least, demands.most)
        readers.append(_Reader((length,), steps=steps))
    name = "t" + hashlib.sha256(repr((demands, form)).encode()).hexdigest()[:12]
    return _Automaton(readers, form, steps).rules(name)


def length_range(pattern: str) -> tuple[int, int | None]:
    """Lengths between which all texts lie that a pattern matches; None for no limit."""
    lengths = [_length_of(sequence) for sequence in _sequences(read_regex(pattern))]
    return _any_of(lengths)


def _sequences(whole: Choice) -> Iterator[tuple[Node, ...]]:
    """Its options, as they match a whole text."""
    for option in whole.options:
        is_start = bool(option) and option[0] == Anchor("^")
        is_end = len(option) > is_start and option[-1] == Anchor("$")
        inner = option[is_start : len(option) - is_end]
        yield (*(() if is_start else ANYTHING), *inner, *(() if is_end else ANYTHING))


def _length_of(sequence: tuple[Node, ...]) -> tuple[int, int | None]:
    least, most = 0, 0
    is_bounded = True
    for node in sequence:
        if isinstance(node, Choice):
            low, high = _any_of([_length_of(option) for option in node.options])
        elif isinstance(node, Repeat):
            low, high = _length_of((node.item,))
            low *= node.least
            high = None if high is None or node.most is None else high * node.most
        else:
            low = high = int(isinstance(node, Chars))
        least += low
        is_bounded &= high is not None
        most += high or 0
    return least, most if is_bounded else None


def _any_of(lengths: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    most = [high for _, high in lengths if high is not None]
    return min(low for low, _ in lengths), max(most) if len(most) == len(lengths) else None


def _readers(pattern: str, form: Form, steps: Steps) -> Iterator["_Reader"]:
    """What reads a text by a pattern: itself, and each of the looks ahead that it begins with."""
    whole = read_regex(pattern)
    if form == "plain" and any(
        not option or option[0] != Anchor("^") or option[-1] != Anchor("$")
        for option in whole.options
    ):
        raise PatternError("is not anchored with ^ and $")
    looks: list[Look] = []
    if len(whole.options) == 1 and whole.options[0][:1] == (Anchor("^"),):
        (option,) = whole.options
        rest = list(option[1:])
        while rest and isinstance(rest[0], Look):
            looks.append(rest[0])
            del rest[0]
        whole = Choice(((option[0], *rest),))
    yield _Reader(*_sequences(whole), steps=steps)
    for look in looks:
        # what follows need not be all that follows
        start = Anchor("^")  # which it may say itself
        options = [
            option if option[:1] == (start,) else (start, *option) for option in look.inner.options
        ]
        whole = Choice(tuple(options))
        yield _Reader(*_sequences(whole), steps=steps, is_wanted=not look.is_negated)


class _Reader:
    """Reads texts letter by letter in all ways at once (Thompson's construction).

    is_wanted: texts that are read to the end fit; if not, the others do.
    """

    def __init__(self, *sequences: tuple[Node, ...], steps: Steps, is_wanted: bool = True) -> None:
        self._steps = steps
        self._moves: list[list[tuple[Ranges, int]]] = [[]]
        self._free: list[list[int]] = [[]]
        self.is_wanted = is_wanted
        self._closures: dict[States, States] = {}
        self._end = self._add(Choice(sequences), 0)
        self.start = self._closed(frozenset([0]))

    def moves(self, states: States) -> Iterator[tuple[int, int, int]]:
        """Letters from, to, and the state behind them."""
        for state in states:
            for ranges, behind in self._moves[state]:
                for low, high in ranges:
                    yield low, high, behind

    def after(self, states: set[int]) -> States:
        return self._closed(frozenset(states))

    def fits(self, states: States) -> bool:
        """Whether a text that ends here fits."""
        return (self._end in states) == self.is_wanted

    def _closed(self, states: States) -> States:
        known = self._closures.get(states)
        if known is None:
            found, left = set(states), list(states)
            while left:
                for state in self._free[left.pop()]:
                    if state not in found:
                        found.add(state)
                        left.append(state)
            # those with nothing but free moves are known by what they lead to
            useful = (s for s in found if self._moves[s] or s == self._end)
            known = self._closures[states] = frozenset(useful)
            self._steps.spend(len(found))
        return known

    def _new(self, *before: int) -> int:
        self._moves.append([])
        self._free.append([])
        if len(self._free) > MAX_PARTS:
            raise PatternError("is too long beside another demand")
        for state in before:
            self._free[state].append(len(self._free) - 1)
        return len(self._free) - 1

    def _add(self, node: Node, at: int) -> int:
        """The state behind a node that begins at a state."""
        if isinstance(node, Chars):
            behind = self._new()
            self._moves[at].append((node.ranges, behind))
            return behind
        if isinstance(node, Choice):
            ends = []
            for option in node.options:
                end = self._new(at)
                for item in option:
                    end = self._add(item, end)
                ends.append(end)
            return self._new(*ends)
        if isinstance(node, Repeat):
            return self._add_repeat(node, at)
        what = "looks around" if isinstance(node, Look) else "has an anchor"
        raise PatternError(f"{what} inside")

    def _add_repeat(self, node: Repeat, at: int) -> int:
        for _ in range(node.least):
            at = self._add(node.item, at)
        if node.most is None:
            hub = self._new(at)
            self._free[self._add(node.item, hub)].append(hub)
            return hub
        ends = [at]
        for _ in range(node.most - node.least):
            at = self._add(node.item, at)
            ends.append(at)
        return self._new(*ends)


class _Automaton:
    """All readers side by side: its states, and the letters that lead from one to another."""

    def __init__(self, readers: list[_Reader], form: Form, steps: Steps) -> None:
        self._readers = readers
        self._form = form
        self._numbers: dict[tuple[States, ...], int] = {}
        self._edges: list[dict[int, list[tuple[int, int]]]] = []
        self._ends: set[int] = set()
        self._work = steps
        waiting = [tuple(reader.start for reader in readers)]
        self._number(waiting[0])
        while waiting:
            states = waiting.pop()
            edges = self._edges[self._numbers[states]]
            for low, high, behind in self._steps(states):
                if behind not in self._numbers:
                    waiting.append(behind)
                edges.setdefault(self._number(behind), []).append((low, high))

    def rules(self, name: str) -> str:
        """The first rule's name, and the rules."""
        alive = self._alive()
        if 0 not in alive:
            raise NoText
        lines = [f"{name}-0"]
        for number, edges in enumerate(self._edges):
            if number in alive and (edges or number == 0):
                lines.append(f"{name}-{number} ::= {self._rule(name, number, edges, alive)}")
        return "\n".join(lines)

    def _rule(
        self, name: str, number: int, edges: Mapping[int, list[tuple[int, int]]], alive: set[int]
    ) -> str:
        options = []
        for behind, letters in edges.items():
            if behind in alive:
                written = write_letters(join_ranges(letters), self._form, in_grammar=True)
                options.append(written + (f" {name}-{behind}" if self._edges[behind] else ""))
        body = " | ".join(options)
        if number not in self._ends:
            return body
        return f"({body})?" if body else '""'

    def _number(self, states: tuple[States, ...]) -> int:
        if states not in self._numbers:
            if len(self._numbers) == MAX_STATES:
                raise PatternError("comes to too much beside another demand")
            number = self._numbers[states] = len(self._numbers)
            self._edges.append({})
            if all(r.fits(s) for r, s in zip(self._readers, states, strict=True)):
                self._ends.add(number)
        return self._numbers[states]

    def _steps(self, states: tuple[States, ...]) -> Iterator[tuple[int, int, tuple[States, ...]]]:
        """Letters from, to, and what all readers know behind them."""
        moves = [list(r.moves(s)) for r, s in zip(self._readers, states, strict=True)]
        starts = {0} | {low for each in moves for low, _, _ in each}
        starts |= {high + 1 for each in moves for _, high, _ in each if high < MAX_POINT}
        bounds = [*sorted(starts), MAX_POINT + 1]
        self._work.spend(len(bounds) * sum(map(len, moves)))
        for low, stop in pairwise(bounds):
            try:
                write_letters(((low, stop - 1),), self._form)
            except NoMatch:
                continue
            behind = tuple(
                r.after({state for first, last, state in each if first <= low <= last})
                for r, each in zip(self._readers, moves, strict=True)
            )
            if all(b or not r.is_wanted for r, b in zip(self._readers, behind, strict=True)):
                yield low, stop - 1, behind

    def _alive(self) -> set[int]:
        """The states from which some text comes to an end."""
        before: dict[int, list[int]] = {}
        for number, edges in enumerate(self._edges):
            for behind in edges:
                before.setdefault(behind, []).append(number)
        alive, left = set(self._ends), list(self._ends)
        while left:
            for number in before.get(left.pop(), ()):
                if number not in alive:
                    alive.add(number)
                    left.append(number)
        return alive
