"""Generator C: a coding agent at work. Facts of several parts, for tests.

Tool calls with their results, logs, diffs and notes; it shares no sentence, name or form of
question with generators A and B. Beside single facts it plants answers that stand in several
places: four values of one key, two hops, counts, and values that were replaced.
"""

import random
from collections.abc import Callable
from typing import Final

from kvmem.bench.generators.agent_text import COLLEAGUES, diff, logs, notes, shell, tool
from kvmem.bench.generators.base import Fact, Form, Turn, digits, draw, paraphrased

REPOSITORIES: Final = (
    "quillcore", "fernbank", "tarpaulin", "moonseed", "pebbledash", "oxbow", "larkgate", "driftnet",
    "saltmarsh", "copperleaf", "hazelwire", "thornback",
)  # fmt: skip
INCIDENTS: Final = tuple(f"INC-{n}" for n in (2071, 2188, 2349, 2412, 2533, 2604, 2790, 2815))
ENGINEERS: Final = (
    "Okonkwo", "Bellweather", "Castellanos", "Duvivier", "Eskildsen", "Farahani", "Gorski",
    "Hashimoto", "Ivanova", "Jankowski", "Kowalczyk", "Lindholm",
)  # fmt: skip
TOWNS: Final = (
    "Tampere", "Ghent", "Ravenna", "Odense", "Zagreb", "Leiden", "Bilbao", "Graz", "Turku", "Brno",
)  # fmt: skip
ENDPOINTS: Final = ("ingest", "billing", "thumbnail", "webhook", "export", "autocomplete", "digest")
BRANCHES: Final = ("canary", "nightly", "rollback", "staging", "hotfix", "preview")


def _hash(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789abcdef", k=7))


SINGLE: Final = (
    Form(
        "commit",
        "bisect result: {x} broke at commit {v}",
        "At which commit did {x} break?",
        "{x} broke at commit",
        REPOSITORIES,
        _hash,
    ),
    Form(
        "limit",
        'set("{x}.rate_limit", {v})  # agreed with the platform team',
        "What is the rate_limit of {x}?",
        "The rate_limit of {x} is",
        ENDPOINTS,
        lambda rng: digits(rng, 4),
    ),
    Form(
        "schedule",
        "cron: the {x} pipeline runs at {v} UTC",
        "At what time does the {x} pipeline run?",
        "The {x} pipeline runs at",
        BRANCHES,
        lambda rng: f"{rng.randrange(1, 12)}:{rng.randrange(10, 60)}",
    ),
)
PARAPHRASED: Final = (
    (
        "{x} is on leave until {v}.",
        "When can I reach {x} at work again?",
        "{x} is back in",
        ("Tuesday", "October", "spring", "August", "Friday"),
    ),
    (
        "{x} broke an {v} while climbing.",
        "Which injury does {x} have?",
        "{x} has a broken",
        ("ankle", "elbow", "arm"),
    ),
    (
        "{x} keeps the spare laptop behind the {v}.",
        "Where is the second computer of {x}?",
        "It is behind the",
        ("printer", "fridge", "piano", "sofa", "aquarium"),
    ),
    (
        "{x} grew up speaking {v}.",
        "What is the mother tongue of {x}?",
        "The mother tongue of {x} is",
        ("Finnish", "Catalan", "Welsh", "Basque", "Maltese"),
    ),
    (
        "{x} flies to {v} on Monday.",
        "What is the destination of the next trip of {x}?",
        "The next trip of {x} goes to",
        ("Oslo", "Cairo", "Lima", "Quito", "Seoul"),
    ),
)


def _values(rng: random.Random, names: dict[str, list[str]], n_lookalikes: int) -> Fact:
    """Four values of one key, told one by one."""
    name, *others = (names["repositories"].pop() for _ in range(1 + n_lookalikes))
    ports = [str(port) for port in rng.sample(range(7000, 7999), 4)]
    said = [f"allowed port of {name}: {port}" for port in ports]
    return Fact(
        kind="values",
        statement=said[0],
        parts=tuple(said[1:]),
        question=f"Which four ports of {name} are allowed?",
        prefix=f"The allowed ports of {name} are",
        value=f"{', '.join(ports[:3])} and {ports[3]}",
        lookalikes=tuple(f"allowed port of {x}: {rng.randrange(7000, 7999)}" for x in others),
    )


def _hop(rng: random.Random, names: dict[str, list[str]], n_lookalikes: int) -> Fact:
    """Who has the incident, and where that person works: the question names only the first."""
    incident, person = names["incidents"].pop(), names["engineers"].pop()
    towns = draw(rng, TOWNS, 1 + n_lookalikes)
    others = [names["engineers"].pop() for _ in range(n_lookalikes)]
    return Fact(
        kind="hop",
        statement=f"{incident} was assigned to {person}.",
        parts=(f"{person} works from the office in {towns[0]}.",),
        question=f"In which town is the office of the engineer who has {incident}?",
        prefix=f"{incident} is with {person}, who works from the office in",
        value=towns[0],
        lookalikes=tuple(
            f"{x} works from the office in {town}."
            for x, town in zip(others, towns[1:], strict=True)
        ),
    )


def _count(rng: random.Random, names: dict[str, list[str]], n_lookalikes: int) -> Fact:
    """How often something was told."""
    name, *others = (names["endpoints"].pop() for _ in range(1 + n_lookalikes))
    n = rng.randrange(2, 5)

    def restart(x: str) -> str:
        return f"watchdog: {x} restarted at {rng.randrange(10, 24)}:{rng.randrange(10, 60)}"

    said = [restart(name) for _ in range(n)]
    return Fact(
        kind="count",
        statement=said[0],
        parts=tuple(said[1:]),
        question=f"How many times did the watchdog see that {name} restarted?",
        prefix=f"The number of times that {name} restarted is",
        value=str(n),
        lookalikes=tuple(restart(x) for x in others),
    )


def _updated(rng: random.Random, names: dict[str, list[str]], n_lookalikes: int) -> Fact:
    """The newest of several values; the older ones are the look-alikes, and come first."""
    name = names["repositories"].pop()
    versions = [f"{major}.{rng.randrange(10, 99)}" for major in rng.sample(range(2, 9), 3)]
    return Fact(
        kind="updated",
        statement=f"pinned {name} again, now to version {versions[0]}",
        question=f"To which version is {name} pinned now?",
        prefix=f"{name} is now pinned to version",
        value=versions[0],
        lookalikes=tuple(f"pinned {name} to version {v}" for v in versions[1:])[:n_lookalikes],
    )


Maker = Callable[[random.Random, dict[str, list[str]], int], Fact]
SEVERAL: Final[tuple[Maker, ...]] = (_values, _hop, _count, _updated)


class Agent:
    """Tool calls and results, logs, diffs, shell sessions and notes."""

    name = "agent"

    def opening(self) -> str:
        return "You are a coding agent. Use the tools, and answer from what you have seen."

    def facts(
        self, rng: random.Random, n: int, *, n_lookalikes: int, n_paraphrased: int
    ) -> list[Fact]:
        names = {
            "repositories": draw(rng, REPOSITORIES, len(REPOSITORIES)),
            "incidents": draw(rng, INCIDENTS, len(INCIDENTS)),
            "engineers": draw(rng, ENGINEERS, len(ENGINEERS)),
            "endpoints": draw(rng, ENDPOINTS, len(ENDPOINTS)),
            "branches": draw(rng, BRANCHES, len(BRANCHES)),
        }
        lists = dict(
            zip(SINGLE, (names[k] for k in ("repositories", "endpoints", "branches")), strict=True)
        )
        kinds: list[Form | Maker] = rng.sample([*SINGLE, *SEVERAL], n)
        facts = [
            kind.fact(rng, lists[kind], n_lookalikes)
            if isinstance(kind, Form)
            else kind(rng, names, n_lookalikes)
            for kind in kinds
        ]
        people = draw(rng, COLLEAGUES, len(COLLEAGUES))
        facts += paraphrased(rng, PARAPHRASED, people, n_paraphrased)
        rng.shuffle(facts)
        return facts

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        return self.facts(rng, n, n_lookalikes=0, n_paraphrased=0)

    def turns(self, rng: random.Random) -> list[Turn]:
        kind = rng.choices((tool, logs, diff, shell, notes), weights=(4, 2, 2, 2, 4))[0]
        return kind(rng)

    def prose(self, rng: random.Random) -> list[Turn]:
        return notes(rng)
