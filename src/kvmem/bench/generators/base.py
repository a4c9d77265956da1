"""What a text generator gives to a workload: facts to plant and text to hide them in."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is said once and asked for later.

    kind: what sort of fact, for tables.
    statement: the whole text that states it, as it stands in the history.
    question: asks for it with the statement's own words.
    paraphrase: asks for it without any rare word of the statement; empty where there is none.
    prefix: the start of the answer, up to the value.
    value: the answer; `statement` holds it.
    lookalikes: statements of the same form about something else, with other values.
    """

    kind: str
    statement: str
    question: str
    prefix: str
    value: str
    paraphrase: str = ""
    lookalikes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the history. `pieces` are whole sentences, lines or paragraphs.

    A fact may be planted between two pieces. Pieces end in a newline or begin with a space, so
    that a byte-level tokenizer gives the same tokens for the pieces as for the whole.
    """

    role: str
    pieces: tuple[str, ...]


class Generator(Protocol):
    """Makes text of one style. Everything it draws comes from the `rng` it is given."""

    name: str

    def facts(self, rng: random.Random, n: int, *, n_lookalikes: int) -> list[Fact]:
        """`n` facts about different things, of as many kinds as there are."""
        ...

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        """`n` facts of the kinds that a small model answers well; no look-alikes."""
        ...

    def turns(self, rng: random.Random) -> list[Turn]:
        """One exchange of filler: some turns that belong together."""
        ...

    def opening(self) -> str:
        """The system message."""
        ...


def draw(rng: random.Random, items: Sequence[str], n: int) -> list[str]:
    """`n` different items in random order."""
    return rng.sample(list(items), n)


def digits(rng: random.Random, n: int) -> str:
    """A number of `n` digits without a leading zero."""
    return str(rng.randrange(10 ** (n - 1), 10**n))
