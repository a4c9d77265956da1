"""Agents with drafts and without, beyond the budget, both disturbed at the same places.

What a reply reads, sees and leaves follows from accepted tokens alone, so two engines that differ
in nothing but drafts stay equal in all of it, whatever else happens. Their tokens are the same
where the one without drafts had not two of them side by side.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import Agent, Message, render
from engines import ENDLESS, Recorded, foresee, record
from stock import TIE

from kvmem.engine.draft import Worth
from kvmem.engine.events import Done, PromptProgress, TokenEvent
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.llama.context import CancelToken

SIZES: dict[str, Any] = {
    "workspace_tokens": 4096, "budget_tokens": 512, "reserve_tokens": 64, "conversations": 4,
    "conversations_bytes": 8 << 20, "type_k": "f32", "type_v": "f32",
}  # fmt: skip
REPLY_TOKENS = 20
NOTED = (
    "decision", "reason", "blocks", "n_blocks", "conversation", "conversation_use",
    "reused_tokens", "read_tokens", "replayed_tokens", "reply_blocks_evicted", "checkpoints",
)  # fmt: skip
"""What must be the same of two memory reports."""


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How a request ends early.

    n_read: cancelled at this report of progress. is_behind: only behind the next decode call.
    n_said: dropped after so many tokens of the reply. Both None: it comes to its end.
    """

    n_read: int | None = None
    is_behind: bool = False
    n_said: int | None = None


UNDISTURBED = Disturbance()


@dataclass(frozen=True, slots=True)
class Said:
    """leads: by how much the best logit stood before the next one at each token. done: None where
    the reply was dropped.
    """

    tokens: tuple[int, ...]
    leads: tuple[float, ...]
    done: Done | None

    @property
    def is_whole(self) -> bool:
        return self.done is not None and self.done.reason != "cancelled"


@dataclass
class Engine:
    """One of the two. ahead: what its drafts propose, every fifth token wrong."""

    recorded: Recorded
    ahead: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.recorded.memory.drafter is not None:
            foresee(self.recorded.memory.drafter, self.ahead)

    def ask(self, prompt: Prompt, how: Disturbance) -> Said:
        session, context, cancel = self.recorded.session, self.recorded.context, CancelToken()
        params = GenerateParams(sampling=ENDLESS, max_tokens=REPLY_TOKENS)
        tokens: list[int] = []
        leads: list[float] = []
        done = None
        n_read = 0
        events = session.generate(prompt, params, cancel=cancel)
        for event in events:
            if isinstance(event, PromptProgress):
                n_read += 1
                if n_read == how.n_read and how.is_behind:
                    context.stop_at, context.stop_behind = 1, True
                elif n_read == how.n_read:
                    cancel.set()
            elif isinstance(event, TokenEvent):
                second, best = np.partition(session.memory.context.logits(-1), -2)[-2:]
                tokens.append(event.token)
                leads.append(float(best - second))
                if len(tokens) == how.n_said:
                    events.close()
            elif isinstance(event, Done):
                done = event
        context.stop_at, context.stop_behind = 0, False
        return Said(tuple(tokens), tuple(leads), done)

    @property
    def state(self) -> tuple[Any, ...]:
        memory, session = self.recorded.memory, self.recorded.session
        assert session.conversations is not None
        session.conversations.check()
        self.recorded.calls.clear()
        parked = [(one.n_tokens, one.checkpoints.positions) for one in session.conversations.parked]
        return (
            memory.tokens.tolist(), memory.working_set.resident().tolist(),
            memory.checkpoints.positions, parked,
        )  # fmt: skip


class Parted(Exception):
    """Two blocks scored so nearly alike that the engines chose different ones."""


@dataclass
class Tally:
    """What a run of agents came to."""

    n_requests: int = 0
    n_cut: int = 0
    n_ties: int = 0
    n_parted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    decisions: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.n_requests} requests, {self.n_cut} of them cut off, {self.n_ties} ties, "
            f"{self.n_parted} times other blocks, "
            f"{self.n_accepted} of {self.n_drafted} drafts said, {dict(self.decisions)}"
        )


def draw(random: np.random.Generator) -> Disturbance:
    """How the first try of a turn ends; mostly it is the only one."""
    kind = random.random()
    if kind < 0.15:
        return Disturbance(n_read=int(random.integers(1, 6)), is_behind=bool(random.random() < 0.5))
    if kind < 0.3:
        return Disturbance(n_said=int(random.integers(1, REPLY_TOKENS)))
    return UNDISTURBED


def play(
    path: Path, seed: int, n_turns: int, tally: Tally, *, n_drafts: int = 3, **memory: Any
) -> None:
    """One agent. AssertionError where the two engines differ by more than a tie.

    Keys that differ in their last bits can turn the order of two blocks; from there on the engines
    see different things, so the agent ends.
    """
    agent, random = Agent(seed), np.random.default_rng(5000 + seed)
    settings = {**SIZES, **memory}
    with record(path, **settings) as one, record(path, n_drafts=n_drafts, **settings) as other:
        plain, drafting = Engine(one), Engine(other)
        for _ in range(n_turns):
            prompt = render(agent.next())
            if random.random() < 0.1:
                text = tuple(random.integers(10, 250, 30).tolist())
                title = render([agent.history[0], Message("user", text)])
                compare(plain, drafting, title, UNDISTURBED, tally)
            how = draw(random)
            if how != UNDISTURBED:
                compare(plain, drafting, prompt, how, tally)
            agent.hear(compare(plain, drafting, prompt, UNDISTURBED, tally))


def compare(
    plain: Engine, drafting: Engine, prompt: Prompt, how: Disturbance, tally: Tally
) -> tuple[int, ...]:
    """Ask both, and hold one to the other. Returns what the one without drafts said."""
    where = f"request {tally.n_requests}, {how}"
    expected = plain.ask(prompt, how)
    drafting.ahead[:] = [*prompt.tokens, *expected.tokens]
    said = drafting.ask(prompt, how)
    assert said.is_whole == expected.is_whole, where
    tally.n_requests += 1
    tally.n_cut += not said.is_whole
    differ = [
        i for i, (a, b) in enumerate(zip(said.tokens, expected.tokens, strict=True)) if a != b
    ]
    if said.done is not None and expected.done is not None:
        blocks, others = (one.done.stats.memory.blocks for one in (said, expected))  # type: ignore[union-attr]
        if len(set(blocks) ^ set(others)) == 2:
            tally.n_parted += 1
            raise Parted
    if differ:
        assert expected.leads[differ[0]] < TIE, f"{where}, token {differ[0]}"
        tally.n_ties += 1
        for engine in (plain, drafting):  # both forget the reply, and go on from the same tokens
            engine.recorded.session.truncate(len(prompt.tokens))
    if said.done is not None and expected.done is not None:
        stats, others = said.done.stats, expected.done.stats
        tally.n_drafted += stats.draft_n
        tally.n_accepted += stats.draft_n_accepted
        tally.decisions[stats.memory.decision] += 1
        for name in NOTED:
            ours, theirs = getattr(stats.memory, name), getattr(others.memory, name)
            assert ours == theirs, f"{where}: {name}"
    assert drafting.state == plain.state, where
    return expected.tokens


def play_all(path: Path, seeds: range, n_turns: int, **memory: Any) -> Iterator[Tally]:
    for seed in seeds:
        tally = Tally()
        with suppress(Parted):
            play(path, seed, n_turns, tally, **memory)
        print(f"agent {seed}: {tally}")
        yield tally


@pytest.mark.parametrize("mtp_state", ["snapshots", "replay"])
def test_20_turns_of_two_agents(mtp_state: str, tiny: Callable[..., Path]) -> None:
    tallies = list(play_all(tiny("qwen35_mtp"), range(2), 20, mtp_state=mtp_state))
    assert sum(tally.n_accepted for tally in tallies) > 300
    assert sum(tally.n_cut for tally in tallies) > 5
    assert sum(tally.n_ties for tally in tallies) <= 3


@pytest.mark.parametrize(("n_drafts", "mtp_state"), [(1, "replay"), (5, "snapshots")])
def test_10_turns_with_few_drafts_and_with_many(
    n_drafts: int, mtp_state: str, tiny: Callable[..., Path]
) -> None:
    settings: dict[str, Any] = {"n_drafts": n_drafts, "mtp_state": mtp_state}
    tallies = list(play_all(tiny("qwen35_mtp"), range(2, 4), 10, **settings))
    assert sum(tally.n_accepted for tally in tallies) > 150
    assert sum(tally.n_cut for tally in tallies) > 2
    assert sum(tally.n_ties for tally in tallies) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mtp_state", "n_drafts", "n_agents"), [
    ("qwen35_mtp", "snapshots", 3, 8), ("qwen35_mtp", "replay", 3, 8),
    ("qwen3next_mtp", "snapshots", 3, 8),
    # as many drafts as few have; the agents are the first of those above
    ("qwen35_mtp", "snapshots", 1, 3), ("qwen35_mtp", "snapshots", 2, 3),
    ("qwen35_mtp", "replay", 2, 3), ("qwen35_mtp", "snapshots", 5, 3),
    ("qwen35_mtp", "replay", 5, 3), ("qwen3next_mtp", "replay", 5, 3),
])  # fmt: skip
def test_40_turns_of_agents(
    kind: str, mtp_state: str, n_drafts: int, n_agents: int, tiny: Callable[..., Path]
) -> None:
    settings: dict[str, Any] = {"n_drafts": n_drafts, "mtp_state": mtp_state}
    tallies = list(play_all(tiny(kind), range(30, 30 + n_agents), 40, **settings))
    assert sum(tally.n_ties for tally in tallies) <= n_agents * 40 // 20
    assert sum(tally.n_parted for tally in tallies) <= (2 if n_agents == 8 else 1)
    decisions = sum((tally.decisions for tally in tallies), Counter[str]())
    assert {"all_resident", "query_replay", "cached_query", "keep_selected"} <= set(decisions)
