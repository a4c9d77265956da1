"""Generator A: a harbour town and the services that run it. Demos and tests use this one."""

import random
from dataclasses import replace

from kvmem.bench.generators.base import Fact, Turn, draw
from kvmem.bench.generators.harbor_facts import PLAIN, harbor_facts
from kvmem.bench.generators.harbor_text import log, source, story, tool_use


class Harbor:
    """Stories, logs, code, tool calls and short acknowledgements."""

    name = "harbor"

    def opening(self) -> str:
        return "You help the harbour office. Read what you are given and answer briefly."

    def facts(
        self, rng: random.Random, n: int, *, n_lookalikes: int, n_paraphrased: int
    ) -> list[Fact]:
        return harbor_facts(rng, n, n_lookalikes=n_lookalikes, n_paraphrased=n_paraphrased)

    def plain_facts(self, rng: random.Random, n: int) -> list[Fact]:
        if n > len(PLAIN):
            raise ValueError(f"n_facts is {n}, but there are {len(PLAIN)} kinds of plain facts")
        names = {form.things: draw(rng, form.things, len(form.things)) for form in PLAIN}
        facts = [form.fact(rng, names[form.things], 0) for form in rng.sample(PLAIN, n)]
        return [replace(fact, confirmed=True) for fact in facts]

    def turns(self, rng: random.Random) -> list[Turn]:
        kind = rng.choices((story, log, source, tool_use), weights=(4, 2, 1, 2))[0]
        return kind(rng)

    def prose(self, rng: random.Random) -> list[Turn]:
        return story(rng)
