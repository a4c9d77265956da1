"""The filler of generator A: stories, logs, code and tool calls."""

import random

from kvmem.bench.generators.base import Turn, draw
from kvmem.bench.generators.harbor_facts import TOWNSFOLK

SERVICES = ("tide-api", "berth-planner", "mailroom", "crane-control", "ledger", "weather-feed")
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


def story(rng: random.Random) -> list[Turn]:
    """A user tells what happened; the assistant acknowledges."""
    pieces = []
    for _ in range(rng.randrange(3, 6)):
        opener, action = rng.choice(OPENERS), rng.choice(ACTIONS)
        who = " and ".join(draw(rng, TOWNSFOLK, rng.randrange(1, 3)))
        pieces.append(f"{opener} {who} {action}. {rng.choice(REMARKS)}\n")
    return [Turn("user", tuple(pieces)), Turn("assistant", (rng.choice(ACKNOWLEDGEMENTS),))]


def log(rng: random.Random) -> list[Turn]:
    """Lines of a service log."""
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


def source(rng: random.Random) -> list[Turn]:
    """A piece of code, and a remark on it."""
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


def tool_use(rng: random.Random) -> list[Turn]:
    """A tool call, its result and a closing sentence."""
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
