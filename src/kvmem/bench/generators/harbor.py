"""Generator A: a harbour town and the services that run it. Demos and tests use this one."""

import random

from kvmem.bench.generators.base import Fact, Turn, digits, draw

PLACES = (
    "lighthouse", "boathouse", "fish market", "old mill", "customs office", "ferry terminal",
    "rope factory", "observatory", "ice cellar", "chapel tower", "salt warehouse", "dry dock",
    "pump station", "signal cabin", "net loft", "town archive", "bakery cellar", "sail workshop",
)  # fmt: skip
FIRST = (
    "Marta", "Jonas", "Ingrid", "Pavel", "Leila", "Oscar", "Nadia", "Felix", "Greta", "Tomas",
    "Helena", "Viktor", "Amina", "Ruben", "Sofia", "Edgar", "Clara", "Bruno",
)  # fmt: skip
LAST = (
    "Lindqvist", "Moreau", "Castellan", "Okafor", "Brandt", "Halvorsen", "Petrova", "Whitlock",
    "Sandoval", "Kessler", "Amadi", "Fontaine", "Rask", "Delgado", "Novak", "Thorne",
)  # fmt: skip
DUTIES = (
    "harbour festival", "night watch", "flood plan", "school choir", "seed library", "bird count",
    "bridge repair", "summer regatta", "tide calendar", "winter market", "museum tour",
    "water survey",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
SERVICES = ("tide-api", "berth-planner", "mailroom", "crane-control", "ledger", "weather-feed")
SETTINGS = (
    "max_open_berths", "crane_idle_minutes", "ledger_batch_rows", "siren_test_hour",
    "fog_horn_seconds", "berth_lock_retries", "tide_cache_entries", "mail_sort_lanes",
)  # fmt: skip
SHIPS = (
    "Albatross", "Meridian", "Northern Star", "Juniper", "Halcyon", "Cormorant", "Silver Wren",
    "Perseverance", "Blue Heron", "Vagabond", "Marigold", "Kingfisher",
)  # fmt: skip
WORDS = (
    "thistle", "quartz", "bramble", "falcon", "cinnamon", "glacier", "lantern", "walnut", "meteor",
    "harpoon", "saffron", "juniper", "cobalt", "orchid",
)  # fmt: skip
CARGO = ("barley", "roof tiles", "sewing machines", "olive oil", "bicycles", "marble", "cork")
COLORS = ("crimson", "turquoise", "ivory", "amber", "violet", "emerald", "charcoal", "scarlet")

PARAPHRASED = (
    (
        "The veterinarian comes by every {value}.",
        "When does the animal doctor visit?",
        "The animal doctor visits every",
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
        "What day does the veterinarian come by?",
    ),
    (
        "Lunch at the canteen today was {value}.",
        "What did people eat at noon?",
        "At noon people ate",
        ("lentil soup", "fried herring", "mushroom pie", "pumpkin stew", "potato salad"),
        "What was lunch at the canteen today?",
    ),
    (
        "Grandfather's armchair was finally repaired by the {value}.",
        "Who fixed the old man's seat?",
        "It was fixed by the",
        ("carpenter", "blacksmith", "schoolteacher", "postman", "beekeeper"),
        "By whom was grandfather's armchair finally repaired?",
    ),
    (
        "Spare keys hang behind the {value}.",
        "Where can I find something to open the door if I am locked out?",
        "You can find it behind the",
        ("barometer", "bookcase", "calendar", "fireplace", "piano"),
        "Where do the spare keys hang?",
    ),
    (
        "Their newborn daughter is called {value}.",
        "What name did the parents give the baby girl?",
        "The baby girl is named",
        ("Isolde", "Beatrix", "Ottilie", "Rosalind", "Philippa"),
        "What is the newborn daughter called?",
    ),
    (
        "The physician prescribed {value} against the cough.",
        "Which medicine did the doctor recommend for the cold?",
        "The doctor recommended",
        ("thyme syrup", "honey drops", "ivy extract", "eucalyptus oil", "ginger tea"),
        "What did the physician prescribe against the cough?",
    ),
)
"""Statement, question without its rare words, answer up to the value, values, plain question."""

OPENERS = (
    "In the morning", "Before noon", "Late in the evening", "After the rain", "On the way back",
    "During the break", "Towards the end of the week", "While the others slept",
)  # fmt: skip
ACTIONS = (
    "counted the crates twice and found one label missing",
    "walked along the quay and talked about the price of diesel",
    "painted the railing and left the brushes to dry on the wall",
    "sorted old photographs into boxes by decade",
    "watched the gulls fight over a heel of bread",
    "carried two chairs upstairs and sat down on neither",
    "wrote a long letter about nothing in particular",
    "argued about which of the two charts was newer",
    "fixed a leaking tap with a strip of bicycle tube",
    "waited for the pilot, who arrived with wet boots and an apology",
)
REMARKS = (
    "Nobody seemed to mind the delay.",
    "The wind had turned by then.",
    "It was not the first time that week.",
    "A radio played somewhere below.",
    "The coffee was cold, but they drank it anyway.",
    "Everyone agreed that it could wait.",
    "The ledger said something else, as it often did.",
    "No one wrote it down.",
    "Only the dog looked worried.",
    "Then the lamps along the pier came on, one after another.",
)
ACKNOWLEDGEMENTS = (
    "Thank you, I have read it.", "Noted. I will keep it in mind.", "Understood, please go on.",
    "I see. Is there more?", "Got it, that is now part of my notes.",
)  # fmt: skip
SUMMARIES = (
    "I ran {name}; there are {n} entries.", "Done: {n} entries on that page.",
    "{n} entries came back, nothing unusual among them.", "That page of {name} has {n} entries.",
)  # fmt: skip
MESSAGES = (
    "request served in {n} ms", "retry {k} of 5 after a timeout", "cache warmed with {n} rows",
    "connection from 10.0.{k}.{m} closed", "queue length is {m}", "checkpoint written, {n} bytes",
    "slow query took {n} ms", "worker {k} took job {n}", "heartbeat ok, drift {m} ms",
)  # fmt: skip
CODE = (
    "def {name}(rows):\n    total = 0\n    for row in rows:\n        if row.kind == {k}:\n"
    "            total += row.weight * {m}\n    return total\n",
    "class {cap}:\n    def __init__(self, limit={n}):\n        self.limit = limit\n"
    "        self.items = []\n\n    def push(self, item):\n"
    "        if len(self.items) < self.limit:\n"
    "            self.items.append(item)\n",
    "async function {name}(url) {{\n  const reply = await fetch(url, {{ timeout: {n} }});\n"
    "  if (!reply.ok) throw new Error('status ' + reply.status);\n  return reply.json();\n}}\n",
)
NAMES = ("sum_weights", "load_berths", "merge_tides", "next_pilot", "trim_queue", "pack_rows")
CAPS = ("Queue", "BerthList", "TideTable", "CrateStack", "PilotRota")


class Harbor:
    """Stories, logs, code, tool calls and short acknowledgements."""

    name = "harbor"

    def opening(self) -> str:
        return "You help the harbour office. Read what you are given and answer briefly."

    def facts(self, rng: random.Random, n: int, *, n_lookalikes: int) -> list[Fact]:
        makers = [_code, _person, _date, _updated, _setting, _tool_result]
        rng.shuffle(makers)
        names = _Names(rng)
        facts = [makers[i % len(makers)](rng, names, n_lookalikes) for i in range(n - n // 3)]
        for items in rng.sample(PARAPHRASED, n // 3):
            facts.append(_paraphrased(rng, items))
        rng.shuffle(facts)
        return facts

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        names = _Names(rng)
        makers = [_code, _password, _captain, _cargo, _colour_of, _date, _color, _person]
        return [makers[i % len(makers)](rng, names, 0) for i in range(n)]

    def turns(self, rng: random.Random) -> list[Turn]:
        kind = rng.choices((_story, _log, _source, _tool_use), weights=(4, 2, 1, 2))[0]
        return kind(rng)


class _Names:
    """Hands out places, people and so on, none twice in one history."""

    def __init__(self, rng: random.Random) -> None:
        self.places = draw(rng, PLACES, len(PLACES))
        self.duties = draw(rng, DUTIES, len(DUTIES))
        self.people = [
            f"{first} {last}"
            for first, last in zip(
                draw(rng, FIRST, len(LAST)), draw(rng, LAST, len(LAST)), strict=True
            )
        ]
        self.settings = draw(rng, SETTINGS, len(SETTINGS))
        self.ships = draw(rng, SHIPS, len(SHIPS))
        self.dates = [f"{month} {rng.randrange(2, 29)}" for month in draw(rng, MONTHS, 12)]
        self.colors = draw(rng, COLORS, len(COLORS))
        self.words = draw(rng, WORDS, len(WORDS))
        self.cargo = draw(rng, CARGO, len(CARGO))


def _code(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(place: str, value: str) -> str:
        return f"The access code for the {place} is {value}."

    place, value = names.places.pop(), digits(rng, 5)
    return Fact(
        kind="code",
        statement=state(place, value),
        question=f"What is the access code for the {place}?",
        prefix=f"The access code for the {place} is",
        value=value,
        lookalikes=tuple(state(names.places.pop(), digits(rng, 5)) for _ in range(n_lookalikes)),
    )


def _person(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(duty: str, person: str) -> str:
        return f"The person in charge of the {duty} is {person}."

    duty, person = names.duties.pop(), names.people.pop()
    return Fact(
        kind="person",
        statement=state(duty, person),
        question=f"Who is in charge of the {duty}?",
        prefix=f"The person in charge of the {duty} is",
        value=person,
        lookalikes=tuple(
            state(names.duties.pop(), names.people.pop()) for _ in range(n_lookalikes)
        ),
    )


def _date(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(place: str, date: str) -> str:
        return f"The inspection of the {place} will be on {date}."

    place, date = names.places.pop(), names.dates.pop()
    return Fact(
        kind="date",
        statement=state(place, date),
        question=f"When will the inspection of the {place} be?",
        prefix=f"The inspection of the {place} will be on",
        value=date,
        lookalikes=tuple(state(names.places.pop(), names.dates.pop()) for _ in range(n_lookalikes)),
    )


def _cargo(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(ship: str, cargo: str) -> str:
        return f"The cargo of the ship {ship} is {cargo}."

    ship, cargo = names.ships.pop(), names.cargo.pop()
    return Fact(
        kind="cargo",
        statement=state(ship, cargo),
        question=f"What is the cargo of the ship {ship}?",
        prefix=f"The cargo of the ship {ship} is",
        value=cargo,
        lookalikes=tuple(state(names.ships.pop(), names.cargo.pop()) for _ in range(n_lookalikes)),
    )


def _password(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(place: str, word: str) -> str:
        return f"The password for the {place} is {word}."

    place, word = names.places.pop(), names.words.pop()
    return Fact(
        kind="password",
        statement=state(place, word),
        question=f"What is the password for the {place}?",
        prefix=f"The password for the {place} is",
        value=word,
        lookalikes=tuple(state(names.places.pop(), names.words.pop()) for _ in range(n_lookalikes)),
    )


def _captain(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(ship: str, person: str) -> str:
        return f"The captain of the ship {ship} is {person}."

    ship, person = names.ships.pop(), names.people.pop()
    return Fact(
        kind="captain",
        statement=state(ship, person),
        question=f"Who is the captain of the ship {ship}?",
        prefix=f"The captain of the ship {ship} is",
        value=person,
        lookalikes=tuple(state(names.ships.pop(), names.people.pop()) for _ in range(n_lookalikes)),
    )


def _colour_of(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(place: str, color: str) -> str:
        return f"The color of the {place} is {color}."

    place, color = names.places.pop(), names.colors.pop()
    return Fact(
        kind="colour2",
        statement=state(place, color),
        question=f"What is the color of the {place}?",
        prefix=f"The color of the {place} is",
        value=color,
        lookalikes=tuple(
            state(names.places.pop(), names.colors.pop()) for _ in range(n_lookalikes)
        ),
    )


def _color(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(place: str, color: str) -> str:
        return f"The door of the {place} is painted {color}."

    place, color = names.places.pop(), names.colors.pop()
    return Fact(
        kind="color",
        statement=state(place, color),
        question=f"What color is the door of the {place} painted?",
        prefix=f"The door of the {place} is painted",
        value=color,
        lookalikes=tuple(
            state(names.places.pop(), names.colors.pop()) for _ in range(n_lookalikes)
        ),
    )


def _updated(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    """The look-alikes say the old value of the same thing; the statement replaces it."""
    ship, old, new = names.ships.pop(), digits(rng, 2), digits(rng, 2)
    while new == old:
        new = digits(rng, 2)
    return Fact(
        kind="updated",
        statement=f"Correction: the berth number of the ship {ship} is now {new}.",
        question=f"What is the current berth number of the ship {ship}?",
        prefix=f"The berth number of the ship {ship} is now",
        value=new,
        lookalikes=(f"The berth number of the ship {ship} is {old}.",)[:n_lookalikes],
    )


def _setting(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(setting: str, value: str) -> str:
        return f"{setting} = {value}"

    setting, value = names.settings.pop(), digits(rng, 3)
    return Fact(
        kind="setting",
        statement=state(setting, value),
        question=f"What is the value of {setting}?",
        prefix=f"The value of {setting} is",
        value=value,
        lookalikes=tuple(state(names.settings.pop(), digits(rng, 3)) for _ in range(n_lookalikes)),
    )


def _tool_result(rng: random.Random, names: _Names, n_lookalikes: int) -> Fact:
    def state(ship: str, value: str) -> str:
        return f'{{"ship": "{ship}", "crew": {digits(rng, 2)}, "draught_cm": {value}}}'

    ship, value = names.ships.pop(), digits(rng, 3)
    return Fact(
        kind="tool",
        statement=state(ship, value),
        question=f"What is the draught_cm of the ship {ship}?",
        prefix=f"The draught_cm of the ship {ship} is",
        value=value,
        lookalikes=tuple(state(names.ships.pop(), digits(rng, 3)) for _ in range(n_lookalikes)),
    )


def _paraphrased(rng: random.Random, items: tuple[str, str, str, tuple[str, ...], str]) -> Fact:
    statement, paraphrase, prefix, values, question = items
    value = rng.choice(values)
    return Fact(
        kind="paraphrase",
        statement=statement.format(value=value),
        question=question,
        paraphrase=paraphrase,
        prefix=prefix,
        value=value,
    )


def _story(rng: random.Random) -> list[Turn]:
    pieces = []
    for _ in range(rng.randrange(3, 6)):
        opener, action = rng.choice(OPENERS), rng.choice(ACTIONS)
        who = " and ".join(draw(rng, FIRST, rng.randrange(1, 3)))
        pieces.append(f"{opener} {who} {action}. {rng.choice(REMARKS)}\n")
    return [Turn("user", tuple(pieces)), Turn("assistant", (rng.choice(ACKNOWLEDGEMENTS),))]


def _log(rng: random.Random) -> list[Turn]:
    service, minute = rng.choice(SERVICES), rng.randrange(60)
    hour = rng.randrange(24)
    lines = [f"Log of {service}:\n"]
    for _ in range(rng.randrange(4, 8)):
        minute = min(59, minute + rng.randrange(0, 4))
        text = rng.choice(MESSAGES).format(
            n=rng.randrange(20, 9000), k=rng.randrange(1, 6), m=rng.randrange(1, 250)
        )
        level = rng.choices(("INFO", "WARN", "DEBUG"), weights=(6, 1, 3))[0]
        lines.append(f"{hour:02d}:{minute:02d}:{rng.randrange(60):02d} {level} {service}: {text}\n")
    return [Turn("user", tuple(lines)), Turn("assistant", (rng.choice(ACKNOWLEDGEMENTS),))]


def _source(rng: random.Random) -> list[Turn]:
    text = rng.choice(CODE).format(
        name=rng.choice(NAMES),
        cap=rng.choice(CAPS),
        n=rng.randrange(10, 900),
        k=rng.randrange(1, 9),
        m=rng.randrange(2, 99),
    )
    return [
        Turn("user", ("Please look at this function.\n", text)),
        Turn("assistant", ("It looks correct. I would add a test for the empty input.",)),
    ]


def _tool_use(rng: random.Random) -> list[Turn]:
    name = rng.choice(("list_files", "read_log", "get_weather", "count_crates"))
    call = f'{{"name": "{name}", "arguments": {{"page": {rng.randrange(1, 9)}}}}}'
    rows = [
        f'{{"id": {rng.randrange(100, 999)}, "state": "{rng.choice(("open", "done", "held"))}", '
        f'"weight": {rng.randrange(5, 90)}}}\n'
        for _ in range(rng.randrange(2, 5))
    ]
    return [
        Turn("user", (f"Run {name} for me.\n",)),
        Turn("assistant", (f"<tool_call>\n{call}\n</tool_call>",)),
        Turn("user", ("<tool_response>\n", *rows, "</tool_response>\n")),
        Turn("assistant", (rng.choice(SUMMARIES).format(n=len(rows), name=name),)),
    ]
