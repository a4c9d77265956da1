"""The facts of generator A, and the names that they are about."""

import random
from typing import Final

from kvmem.bench.generators.base import Fact, Form, digits, draw, paraphrased

PLACES: Final = (
    "lighthouse", "boathouse", "fish market", "old mill", "customs office", "ferry terminal",
    "rope factory", "observatory", "ice cellar", "chapel tower", "salt warehouse", "dry dock",
    "pump station", "signal cabin", "net loft", "town archive", "bakery cellar", "sail workshop",
)  # fmt: skip
FIRST: Final = (
    "Marta", "Jonas", "Ingrid", "Pavel", "Leila", "Oscar", "Nadia", "Felix", "Greta", "Tomas",
    "Helena", "Viktor", "Amina", "Ruben", "Sofia", "Edgar", "Clara", "Bruno",
)  # fmt: skip
LAST: Final = (
    "Lindqvist", "Moreau", "Castellan", "Okafor", "Brandt", "Halvorsen", "Petrova", "Whitlock",
    "Sandoval", "Kessler", "Amadi", "Fontaine", "Rask", "Delgado", "Novak", "Thorne",
)  # fmt: skip
DUTIES: Final = (
    "harbour festival", "night watch", "flood plan", "school choir", "seed library", "bird count",
    "bridge repair", "summer regatta", "tide calendar", "winter market", "museum tour",
    "water survey",
)  # fmt: skip
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
SETTINGS: Final = (
    "max_open_berths", "crane_idle_minutes", "ledger_batch_rows", "siren_test_hour",
    "fog_horn_seconds", "berth_lock_retries", "tide_cache_entries", "mail_sort_lanes",
)  # fmt: skip
SHIPS: Final = (
    "Albatross", "Meridian", "Northern Star", "Juniper", "Halcyon", "Cormorant", "Silver Wren",
    "Perseverance", "Blue Heron", "Vagabond", "Marigold", "Kingfisher",
)  # fmt: skip
CLUBS: Final = ("rowing club", "chess club", "brass band", "garden society")
TRAINS: Final = ("night train", "mail boat", "express bus", "cable car")
OFFICES: Final = ("museum", "library", "bank", "post office")
HEAVY: Final = ("ship's bell", "bronze cannon", "mill stone", "spare anchor")
BUILT: Final = ("new bridge", "town bell", "market roof", "harbour statue")
MATERIALS: Final = ("copper", "granite", "oak", "brick", "steel", "marble", "bamboo", "glass")
WARM: Final = ("swimming pool", "greenhouse", "cheese cellar", "hot spring")
TRADES: Final = ("dentist", "plumber", "tailor", "florist", "locksmith")
TOWNSFOLK: Final = FIRST[:6]
"""Who the stories are about; each is named in many places of a history."""
PEOPLE: Final = tuple(f"{first} {last}" for first, last in zip(FIRST[6:], LAST, strict=False))
"""Names that stand in facts alone."""


def _date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randrange(2, 29)}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(1, 12)}:{rng.randrange(10, 60)}"


FORMS: Final = (
    Form.short("code", "access code for the {x}", PLACES, lambda rng: digits(rng, 5)),
    Form.short("height", "height of the {x}", PLACES, lambda rng: digits(rng, 2), " metres"),
    Form.short("phone", "phone number of the {x}", TRADES, lambda rng: f"555-{digits(rng, 4)}"),
    Form.short("year", "founding year of the {x}", CLUBS, lambda rng: f"18{digits(rng, 2)}"),
    Form.short("time", "departure time of the {x}", TRAINS, _clock),
    Form.short("hour", "opening hour of the {x}", OFFICES, _clock),
    Form(
        "person",
        "The person in charge of the {x} is {v}.",
        "Who is in charge of the {x}?",
        "The person in charge of the {x} is",
        DUTIES,
        lambda rng: rng.choice(PEOPLE),
    ),
    Form(
        "date",
        "The inspection of the {x} will be on {v}.",
        "When will the inspection of the {x} be?",
        "The inspection of the {x} will be on",
        PLACES,
        _date,
    ),
    Form(
        "setting",
        "{x} = {v}",
        "What is the value of {x}?",
        "The value of {x} is",
        SETTINGS,
        lambda rng: digits(rng, 3),
    ),
    Form(
        "tool",
        '{{"ship": "{x}", "flag": "green", "draught_cm": {v}}}',
        "What is the draught_cm of the ship {x}?",
        "The draught_cm of the ship {x} is",
        SHIPS,
        lambda rng: digits(rng, 3),
    ),
)
"""Facts that have look-alikes; `updated` below is one more kind."""

PLAIN: Final = (
    *FORMS[1:4],
    Form.short("weight", "weight of the {x}", HEAVY, lambda rng: digits(rng, 3), " kilograms"),
    Form.short("warmth", "temperature of the {x}", WARM, lambda rng: digits(rng, 2), " degrees"),
    Form.short("material", "material of the {x}", BUILT, lambda rng: rng.choice(MATERIALS)),
)
"""What a model of 135 million parameters can look up; each kind once in a history. No two
share a unit, and none is a time of day, which the logs are full of."""

PARAPHRASED: Final = (
    (
        "{x} would like to become a {v} one day.",
        "What is the dream job of {x}?",
        "The dream job of {x} is",
        ("pilot", "dentist", "gardener", "judge", "tailor"),
    ),
    (
        "{x} was born and raised in {v}.",
        "Where does {x} come from?",
        "{x} comes from",
        ("Lisbon", "Dublin", "Vienna", "Prague", "Athens"),
    ),
    (
        "{x} owns two dogs and a {v}.",
        "Which pets live with {x}?",
        "The pets of {x} are two dogs and a",
        ("parrot", "rabbit", "goat", "turtle", "pony"),
    ),
    (
        "{x} gets a rash from {v}.",
        "What is {x} allergic to?",
        "{x} is allergic to",
        ("walnuts", "celery", "pollen", "wool", "shrimp"),
    ),
    (
        "{x} plays the {v} on Sundays.",
        "Which musical instrument belongs to {x}?",
        "The instrument of {x} is the",
        ("trombone", "violin", "flute", "banjo", "cello"),
    ),
    (
        "{x} married a {v} last spring.",
        "What does the husband or wife of {x} do for a living?",
        "The partner of {x} works as a",
        ("baker", "sailor", "nurse", "banker", "painter"),
    ),
)
"""Statement, question, answer up to the value, values. A question shares only {x} with its
statement: a name that the stories are full of."""


def updated(ship: str, rng: random.Random, n_lookalikes: int) -> Fact:
    """A value that replaces an older one; the look-alike says the older one, and comes first."""
    old, new = rng.sample(range(10, 100), 2)
    return Fact(
        kind="updated",
        statement=f"Correction: the berth number of the ship {ship} is now {new}.",
        question=f"What is the current berth number of the ship {ship}?",
        prefix=f"The berth number of the ship {ship} is now",
        value=str(new),
        lookalikes=(f"The berth number of the ship {ship} is {old}.",)[:n_lookalikes],
    )


def harbor_facts(
    rng: random.Random, n: int, *, n_lookalikes: int, n_paraphrased: int
) -> list[Fact]:
    """`n` facts of different kinds, and paraphrased ones about different people."""
    names = {form.things: draw(rng, form.things, len(form.things)) for form in FORMS}
    kinds: list[Form | None] = rng.sample([*FORMS, None], n)
    facts = [
        updated(names[SHIPS].pop(), rng, n_lookalikes)
        if form is None
        else form.fact(rng, names[form.things], n_lookalikes)
        for form in kinds
    ]
    people = draw(rng, TOWNSFOLK, len(TOWNSFOLK))
    facts += paraphrased(rng, PARAPHRASED, people, n_paraphrased)
    rng.shuffle(facts)
    return facts
