"""Agents over a hundred turns on a hybrid model: each reply is right, and little is read for it.

A seeded agent does what agents do to their history, and is disturbed; its twin, on an engine of its
own, sends the same requests without any disturbance. Their replies are the same after every turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from agents import Agent, Message, Tokens, generate, render, require_tie_in_sight
from engines import make_config, random_tokens, record
from stock import require_tie

from kvmem.engine.conversations import common_prefix
from kvmem.engine.engine import Engine

SIZES = {
    "workspace_tokens": 4096, "reserve_tokens": 64, "conversations": 4,
    "conversations_bytes": 8 << 20, "type_k": "f32", "type_v": "f32",
}  # fmt: skip
ENOUGH, LITTLE = 4096, 512


@dataclass
class Reading:
    """What the turns of an agent cost, in tokens."""

    new: int = 0
    read: int = 0
    replayed: int = 0
    longest_gap: int = 0

    def add(self, n_new: int, n_read: int, n_replayed: int) -> None:
        self.new += n_new
        self.read += n_read
        self.replayed += n_replayed
        self.longest_gap = max(self.longest_gap, n_read - n_new)


def play(path: Path, seed: int, n_turns: int, *, stops: bool, **memory: object) -> Reading:
    """An agent that is disturbed, and its twin that is not. Checks every turn.

    It is disturbed by requests for a title, below the same system prompt, and by first tries that
    are cancelled, before a decode call or right behind it (stops).
    """
    agent, twin = Agent(seed), Agent(seed)
    reading, disturbing = Reading(), np.random.default_rng(1000 + seed)
    settings = {**SIZES, **memory}
    before: Tokens = ()  # what the history holds, as far as its client knows
    saved: list[int] = []  # points that it can go back to
    n_ties = 0
    with record(path, **settings) as recorded, Engine(make_config(path, **settings)) as alone:
        session, other = recorded.session, alone.session()
        for turn in range(n_turns):
            messages = agent.next()
            prompt = render(messages)
            kind = disturbing.random()
            if kind < 0.1:
                title = [
                    agent.history[0],
                    Message("user", tuple(disturbing.integers(10, 250, 30).tolist())),
                ]
                generate(session, render(title))
            elif kind < 0.25 and stops:
                recorded.context.stop_at = int(disturbing.integers(1, 6))
                recorded.context.stop_behind = bool(disturbing.random() < 0.5)
                stopped = generate(session, prompt)
                recorded.context.stop_at = 0
                assert stopped.done.reason in ("cancelled", "length")
            reply = generate(session, prompt)
            assert session.conversations is not None
            session.conversations.check()
            recorded.calls.clear()

            shared = common_prefix(
                np.array(before, np.int32), np.array(prompt.tokens[:-1], np.int32)
            )
            at = max((n for n in saved if n <= shared), default=0)
            held = shared if shared == len(before) else at
            assert reply.stats.memory.decision != "replay_skipped"
            n_read = reply.stats.prompt_tokens - reply.stats.cached_tokens
            assert n_read <= len(prompt.tokens) - held, f"turn {turn}"
            reading.add(len(prompt.tokens) - shared, n_read, reply.stats.memory.replayed_tokens)
            before = (*prompt.tokens, *reply.tokens[:-1])
            saved = reply.stats.memory.checkpoints

            assert render(twin.next()) == prompt
            expected = generate(other, prompt)
            if reply.tokens != expected.tokens:
                if memory.get("n_drafts"):
                    require_tie(path, tuple(prompt.tokens), reply.tokens, expected.tokens)
                else:
                    require_tie_in_sight(reply, expected)
                n_ties += 1
            agent.hear(expected.tokens)
            twin.hear(expected.tokens)
    assert n_ties <= 1 + n_turns // 20
    return reading


def play_all(path: Path, seeds: range, n_turns: int, budget: int, n_drafts: int = 0) -> None:
    """Prints what each agent's turns cost, and holds all of it to what was new.

    Where the history is beyond the budget, what was read in other pieces has other blocks in sight.
    So no turn is cancelled there, and no title takes the place of a branch that a turn goes on.
    """
    kept = {} if budget == ENOUGH else {"conversations": 128, "conversations_bytes": 128 << 20}
    n_replayed = 0
    for seed in seeds:
        reading = play(
            path, seed, n_turns, stops=budget == ENOUGH, budget_tokens=budget, n_drafts=n_drafts,
            **kept,
        )  # fmt: skip
        print(
            f"agent {seed}: {n_turns} turns, {reading.new / n_turns:.0f} tokens new, "
            f"{reading.read / n_turns:.0f} read and {reading.replayed / n_turns:.1f} of them twice "
            f"a turn, at most {reading.longest_gap} beside what is new"
        )
        assert reading.read < reading.new + 3 * n_turns
        n_replayed += reading.replayed
    assert n_replayed <= 12 * n_turns * len(seeds)


def test_a_chain_that_is_read_whole_is_gone_back_to_its_question(
    tiny_qwen35: Path,
) -> None:
    """No turn of it was a request of its own: a history that is loaded, or whose conversation left.
    The next question drops the thinking of the whole chain.
    """

    def text(n: int, seed: int) -> Tokens:
        return random_tokens(n, seed)

    chain = [Message("system", text(100, 1)), Message("user", text(30, 2))]
    for seed in range(3, 9, 3):
        chain += [
            Message("assistant", text(20, seed), thinking=text(30, seed + 1)),
            Message("tool", text(400, seed + 2)),
        ]
    with record(tiny_qwen35, **SIZES, budget_tokens=ENOUGH) as recorded:
        prompt = render(chain)
        reply = generate(recorded.session, prompt)
        assert prompt.query_span is not None
        assert prompt.query_span.stop in reply.stats.memory.checkpoints
        chain += [Message("assistant", reply.tokens), Message("user", text(20, 9))]
        after = generate(recorded.session, render(chain))
        assert after.stats.cached_tokens == prompt.query_span.stop
        recorded.memory.check(recorded.session.conversations.parked)  # type: ignore[union-attr]


TRIALS = [("qwen35", ENOUGH, 0), ("qwen35", LITTLE, 0), ("qwen35_mtp", ENOUGH, 3)]


@pytest.mark.parametrize(("kind", "budget", "n_drafts"), TRIALS)
def test_20_turns_of_two_agents(
    kind: str, budget: int, n_drafts: int, tiny: Callable[..., Path]
) -> None:
    play_all(tiny(kind), range(2), 20, budget, n_drafts)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget", "n_drafts"), TRIALS)
def test_100_turns_of_ten_agents(
    kind: str, budget: int, n_drafts: int, tiny: Callable[..., Path]
) -> None:
    play_all(tiny(kind), range(10), 100, budget, n_drafts)
