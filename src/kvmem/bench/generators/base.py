"""What a text generator gives to a workload: facts to plant and text to hide them in."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is said once and asked for later.

    kind: what sort of fact, for tables.
    statement: the whole text that states it, as it stands in the history.
    question: asks for it; shares_word says whether with a rare word of the statement.
    prefix: the start of the answer, up to the value.
    value: the answer; `statement` holds it, or the last of `parts`, or they hold it together.
    parts: further statements that the answer needs, told later in the history, in this order.
    lookalikes: statements of the same form about something else, with other values.
    confirmed: the user tells the fact in a turn of its own and asks for it in the next one; the
        assistant repeats it both times.
    """

    kind: str
    statement: str
    question: str
    prefix: str
    value: str
    shares_word: bool = True
    lookalikes: tuple[str, ...] = ()
    confirmed: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the history. `pieces` are whole sentences, lines or paragraphs.

    A fact may be planted between two pieces. Each piece is tokenized alone, so a piece ends where
    a tokenizer would split anyhow: after a newline.
    """

    role: str
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A sentence pattern that makes facts: {x} is the thing, {v} the value that is told of it.

    things: what {x} can be; value: draws {v}.
    """

    kind: str
    statement: str
    question: str
    prefix: str
    things: tuple[str, ...]
    value: Callable[[random.Random], str]

    @classmethod
    def short(
        cls,
        kind: str,
        subject: str,
        things: tuple[str, ...],
        value: Callable[[random.Random], str],
        unit: str = "",
    ) -> Self:
        """The plainest of forms: "The SUBJECT is VALUE"."""
        start = f"The {subject} is"
        return cls(kind, f"{start} {{v}}{unit}.", f"What is the {subject}?", start, things, value)

    def fact(self, rng: random.Random, things: list[str], n_lookalikes: int) -> Fact:
        """A fact about the last of `things`, look-alikes about those before; all are removed."""
        subjects = [things.pop() for _ in range(1 + n_lookalikes)]
        values: list[str] = []
        while len(values) < len(subjects):
            drawn = self.value(rng)
            if drawn not in values:
                values.append(drawn)
        said = [self.statement.format(x=x, v=v) for x, v in zip(subjects, values, strict=True)]
        return Fact(
            kind=self.kind,
            statement=said[0],
            question=self.question.format(x=subjects[0]),
            prefix=self.prefix.format(x=subjects[0]),
            value=values[0],
            lookalikes=tuple(said[1:]),
        )


Paraphrase = tuple[str, str, str, tuple[str, ...]]
"""Statement with {x} and {v}, question and answer up to the value with {x}, values."""


def paraphrased(
    rng: random.Random, items: Sequence[Paraphrase], things: Sequence[str], n: int
) -> list[Fact]:
    """`n` facts, each about another thing, whose questions share no rare word with them."""
    facts = []
    for (statement, question, prefix, values), x in zip(rng.sample(items, n), things, strict=False):
        value = rng.choice(values)
        facts.append(
            Fact(
                kind="paraphrase",
                statement=statement.format(x=x, v=value),
                question=question.format(x=x),
                prefix=prefix.format(x=x),
                value=value,
                shares_word=False,
            )
        )
    return facts


class Generator(Protocol):
    """Makes text of one style. Everything it draws comes from the `rng` it is given."""

    name: str

    def facts(
        self, rng: random.Random, n: int, *, n_lookalikes: int, n_paraphrased: int
    ) -> list[Fact]:
        """`n` facts of different kinds, and further ones whose questions are paraphrased."""
        ...

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        """`n` facts of the kinds that a small model answers well; no look-alikes."""
        ...

    def turns(self, rng: random.Random) -> list[Turn]:
        """One exchange of filler: some turns that belong together."""
        ...

    def prose(self, rng: random.Random) -> list[Turn]:
        """An exchange in which the user writes sentences, no log or table."""
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
