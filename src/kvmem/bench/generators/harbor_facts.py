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
THINGS: Final = ("brass telescope", "silver kettle", "copper lamp", "steam engine")
TRADES: Final = ("dentist", "plumber", "tailor", "florist", "locksmith")
PEOPLE: Final = tuple(f"{first} {last}" for first, last in zip(FIRST, LAST, strict=False))


def _date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randrange(2, 29)}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(1, 12)}:{rng.randrange(10, 60)}"


FORMS: Final = (
    Form(
        "code",
        "The access code for the {x} is {v}.",
        "What is the access code for the {x}?",
        "The access code for the {x} is",
        PLACES,
        lambda rng: digits(rng, 5),
    ),
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
"""Facts that have look-alikes; `updated` below is the sixth kind."""

PLAIN: Final = (
    Form.short("code", "access code for the {x}", PLACES, lambda rng: digits(rng, 5)),
    Form.short("height", "height of the {x}", PLACES, lambda rng: digits(rng, 2), " metres"),
    Form.short("phone", "phone number of the {x}", TRADES, lambda rng: f"555-{digits(rng, 4)}"),
    Form.short("year", "founding year of the {x}", CLUBS, lambda rng: f"18{digits(rng, 2)}"),
    Form.short("time", "departure time of the {x}", TRAINS, _clock),
    Form.short("weight", "weight of the {x}", THINGS, lambda rng: digits(rng, 2), " kilograms"),
)
"""What a model of 135 million parameters can look up; each kind once in a history."""

PARAPHRASED: Final = (
    (
        "The veterinarian comes by every {v}.",
        "When does the animal doctor visit?",
        "The animal doctor visits every",
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    ),
    (
        "Lunch at the canteen today was {v}.",
        "What did people eat at noon?",
        "At noon people ate",
        ("lentil soup", "fried herring", "mushroom pie", "pumpkin stew", "potato salad"),
    ),
    (
        "Grandfather's armchair was finally repaired by the {v}.",
        "Who fixed the old man's seat?",
        "It was fixed by the",
        ("carpenter", "blacksmith", "schoolteacher", "postman", "beekeeper"),
    ),
    (
        "Spare keys hang behind the {v}.",
        "Where can I find something to open the door if I am locked out?",
        "You can find it behind the",
        ("barometer", "bookcase", "calendar", "fireplace", "piano"),
    ),
    (
        "Their newborn daughter is called {v}.",
        "What name did the parents give the baby girl?",
        "The baby girl is named",
        ("Isolde", "Beatrix", "Ottilie", "Rosalind", "Philippa"),
    ),
    (
        "The physician prescribed {v} against the cough.",
        "Which medicine did the doctor recommend for the cold?",
        "The doctor recommended",
        ("thyme syrup", "honey drops", "ivy extract", "eucalyptus oil", "ginger tea"),
    ),
)
"""Statement, question without its rare words, answer up to the value, values."""


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


def harbor_facts(rng: random.Random, n: int, n_lookalikes: int) -> list[Fact]:
    """A third are paraphrased; the others go through all kinds in random order."""
    names = {form.things: draw(rng, form.things, len(form.things)) for form in FORMS}
    kinds: list[Form | None] = rng.sample([*FORMS, None], len(FORMS) + 1)
    facts = [
        updated(names[SHIPS].pop(), rng, n_lookalikes)
        if (form := kinds[index % len(kinds)]) is None
        else form.fact(rng, names[form.things], n_lookalikes)
        for index in range(n - n // 3)
    ]
    facts += paraphrased(rng, PARAPHRASED, n // 3)
    rng.shuffle(facts)
    return facts
