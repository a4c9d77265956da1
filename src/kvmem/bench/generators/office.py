"""Generator B: tickets, minutes, mails and configuration of an office. For calibration.

It shares no sentence, name or form of question with generator A, so that what is fitted on one
can be tested on the other.
"""

import random
from typing import Final

from kvmem.bench.generators.base import Fact, Form, Turn, digits, draw, paraphrased

PROJECTS: Final = (
    "Basalt", "Hummingbird", "Papyrus", "Tundra", "Zephyr", "Monsoon", "Gondola", "Larkspur",
    "Obsidian", "Pinecone", "Sextant", "Trellis",
)  # fmt: skip
CUSTOMERS: Final = (
    "Brightwater Dairy", "Kestrel Optics", "Polar Textiles", "Union Bakers", "Vantage Rail",
    "Acorn Insurance", "Delta Ceramics", "Foxglove Press", "Mosaic Travel", "Quill Stationers",
)  # fmt: skip
STAFF: Final = (
    "Priya", "Mateus", "Yuki", "Dorothea", "Kwame", "Annika", "Rafael", "Siobhan", "Tariq",
    "Wanda", "Emil", "Noor", "Gideon", "Lucia",
)  # fmt: skip
TOPICS: Final = (
    "the new scanner", "parking permits", "the release notes", "travel expenses", "the help desk",
    "two broken monitors", "the onboarding page", "backup tapes", "the fire drill", "old invoices",
)  # fmt: skip
VERDICTS: Final = (
    "was moved to next week", "needs a second opinion", "is blocked by the vendor",
    "can be closed", "was discussed at length without result", "looks better than last month",
    "should be split in two", "went to the wrong department",
)  # fmt: skip
HOSTS: Final = (
    "atlas",
    "bison",
    "coral",
    "dingo",
    "ember",
    "finch",
    "grove",
    "heron",
    "ibis",
    "jackal",
)
TABLES: Final = ("orders", "invoices", "shipments", "tickets", "contacts", "refunds")
COLUMNS: Final = ("created_at", "status", "amount", "owner_id", "region", "priority")
STATES: Final = ("open", "waiting", "resolved", "reopened")
CITIES: Final = ("Rotterdam", "Porto", "Gdansk", "Bergen", "Trieste", "Malmo", "Cork", "Split")
FLOORS: Final = ("ground", "second", "third", "fourth", "fifth", "sixth")
REPLIES: Final = (
    "Filed.", "Added to the summary.", "All right, I have that.", "Received and sorted.",
    "Okay. Send the next one when you are ready.",
)  # fmt: skip

FORMS: Final = (
    Form(
        "amount",
        "Ticket note: invoice total for {x} came to {v} euros.",
        "How many euros was the invoice total for {x}?",
        "The invoice total for {x} was",
        CUSTOMERS,
        lambda rng: digits(rng, 4),
    ),
    Form(
        "city",
        "{x} ships from the depot in {v}.",
        "Which city does {x} ship from?",
        "{x} ships from",
        CUSTOMERS,
        lambda rng: rng.choice(CITIES),
    ),
    Form(
        "secret",
        "Root password of host {x} was rotated, it starts with {v} now.",
        "What does the root password of host {x} start with?",
        "The root password of host {x} starts with",
        HOSTS,
        lambda rng: "".join(rng.choices("bcdfghjkmnpqrstvwxz", k=4)),
    ),
    Form(
        "owner",
        "Project {x} reports to {v} from now on.",
        "Whom does project {x} report to?",
        "Project {x} reports to",
        PROJECTS,
        lambda rng: rng.choice(STAFF),
    ),
    Form(
        "config",
        "deploy.{x}.replicas: {v}",
        "How many replicas does deploy.{x} have?",
        "The replicas of deploy.{x} are",
        HOSTS,
        lambda rng: digits(rng, 2),
    ),
    Form(
        "tool",
        '<result job="{x}" exit="0" rows="{v}"/>',
        "How many rows did job {x} give?",
        "The rows that job {x} gave are",
        PROJECTS,
        lambda rng: digits(rng, 4),
    ),
)

PARAPHRASED: Final = (
    (
        "{x} has a violin lesson at {v} o'clock.",
        "When is {x} taught to make music?",
        "{x} is taught at",
        ("three", "four", "five", "seven", "eight"),
    ),
    (
        "{x} left the badge under the {v}.",
        "Where should I look for the thing that lets {x} in?",
        "It is under the",
        ("teapot", "doormat", "typewriter", "flowerpot", "radio"),
    ),
    (
        "{x} bought a {v} for the kids.",
        "Which pet do the children of {x} have?",
        "They have a",
        ("hamster", "parrot", "tortoise", "rabbit", "pony"),
    ),
    (
        "{x} cannot digest {v}.",
        "Which food makes {x} ill?",
        "{x} gets ill from",
        ("peanuts", "shellfish", "strawberries", "sesame", "celery"),
    ),
    (
        "{x} will move to {v} after retiring.",
        "In which town will {x} live when old?",
        "{x} will live in",
        CITIES,
    ),
    (
        "{x} always arrives by {v}.",
        "What kind of transport does {x} take to work?",
        "{x} takes the",
        ("bicycle", "tram", "ferry", "scooter", "bus"),
    ),
    (
        "{x} was awarded a medal for {v}.",
        "Which sport is {x} so good at?",
        "{x} is good at",
        ("rowing", "fencing", "archery", "judo", "sailing"),
    ),
    (
        "{x} will get married in {v}.",
        "In which month is the wedding of {x}?",
        "The wedding of {x} is in",
        ("March", "April", "June", "July", "September"),
    ),
    (
        "{x} is scared of {v}.",
        "What frightens {x} the most?",
        "{x} is frightened by",
        ("spiders", "thunder", "snakes", "needles", "mice"),
    ),
    (
        "{x} spent last summer in {v}.",
        "Which country did {x} see on holiday?",
        "{x} was on holiday in",
        ("Iceland", "Morocco", "Peru", "Japan", "Kenya"),
    ),
)


class Office:
    """Tickets, meeting minutes, mails, table dumps and YAML."""

    name = "office"

    def opening(self) -> str:
        return "Office assistant. Keep track of everything that is sent and reply in one line."

    def facts(
        self, rng: random.Random, n: int, *, n_lookalikes: int, n_paraphrased: int
    ) -> list[Fact]:
        names = {form.things: draw(rng, form.things, len(form.things)) for form in FORMS}
        forms = rng.sample(FORMS, n)
        facts = [form.fact(rng, names[form.things], n_lookalikes) for form in forms]
        staff = draw(rng, STAFF, len(STAFF))
        facts += paraphrased(rng, PARAPHRASED, staff, n_paraphrased)
        rng.shuffle(facts)
        return facts

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        return self.facts(rng, n, n_lookalikes=0, n_paraphrased=0)

    def turns(self, rng: random.Random) -> list[Turn]:
        kind = rng.choices((_minutes, _mail, _ticket, _table, _yaml), weights=(3, 3, 2, 2, 1))[0]
        return [Turn("user", kind(rng)), Turn("assistant", (rng.choice(REPLIES),))]

    def prose(self, rng: random.Random) -> list[Turn]:
        return [Turn("user", _mail(rng)), Turn("assistant", (rng.choice(REPLIES),))]


def _minutes(rng: random.Random) -> tuple[str, ...]:
    lines = [f"Minutes, week {rng.randrange(1, 53)}, present: {', '.join(draw(rng, STAFF, 3))}\n"]
    for number in range(1, rng.randrange(4, 8)):
        lines.append(f"{number}. {rng.choice(TOPICS).capitalize()} {rng.choice(VERDICTS)}.\n")
    return tuple(lines)


def _mail(rng: random.Random) -> tuple[str, ...]:
    sender, reader = draw(rng, STAFF, 2)
    return (
        f"From: {sender}\nTo: {reader}\nSubject: {rng.choice(TOPICS)}\n",
        f"Hi {reader}, a short word on {rng.choice(TOPICS)}: it {rng.choice(VERDICTS)}.\n",
        f"I heard that {rng.choice(TOPICS)} {rng.choice(VERDICTS)}, which surprised me.\n",
        f"Could you ask {rng.choice(STAFF)} on the {rng.choice(FLOORS)} floor? Thanks, {sender}\n",
    )


def _ticket(rng: random.Random) -> tuple[str, ...]:
    lines = [f"#{rng.randrange(1000, 9999)} [{rng.choice(STATES)}] {rng.choice(TOPICS)}\n"]
    for _ in range(rng.randrange(2, 5)):
        day, hour = rng.randrange(1, 29), rng.randrange(8, 18)
        lines.append(f"  {day:02d}/{hour:02d}h {rng.choice(STAFF)}: {rng.choice(VERDICTS)}\n")
    return tuple(lines)


def _table(rng: random.Random) -> tuple[str, ...]:
    columns = draw(rng, COLUMNS, 3)
    lines = [f"SELECT {', '.join(columns)} FROM {rng.choice(TABLES)} LIMIT 6;\n"]
    for _ in range(rng.randrange(3, 7)):
        cells = (str(rng.randrange(1, 5000)), rng.choice(STATES), rng.choice(STAFF).lower())
        lines.append(" | ".join(cells) + "\n")
    return tuple(lines)


def _yaml(rng: random.Random) -> tuple[str, ...]:
    lines = [f"{rng.choice(TABLES)}_worker:\n"]
    for key in draw(rng, ("timeout", "retries", "memory_mb", "queue", "log_level", "shards"), 4):
        lines.append(f"  {key}: {rng.randrange(1, 900)}\n")
    return tuple(lines)
