"""Ctrl-C anywhere, and again in the repair: the next request is that of an engine that never was
interrupted, and nothing is lost for good.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import WHOLE, Chat, conversations_of
from engines import Recorded, random_tokens, record
from interrupts import Interrupts

from kvmem.engine.calibration import Calibration, Found

# one that hits a generator while Python lets go of it is told, and raised nowhere
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

N_TRIES = int(os.environ.get("TRIES", "25"))


def chats() -> list[Chat]:
    """Three, of which 0 and 1 have one system prompt."""
    return [Chat(random_tokens(70, 7 if i < 2 else 8)) for i in range(3)]


def go_on(recorded: Recorded, ours: list[Chat]) -> Callable[[], object]:
    """The conversation on the device is cut back, in its middle, and goes on."""
    ours[0].ask(recorded.session, random_tokens(60, 1))
    ours[0].ask(recorded.session, random_tokens(40, 2))
    del ours[0].messages[-1:]
    ours[0].messages.append(("assistant", random_tokens(5, 3)))
    return lambda: ours[0].ask(recorded.session, random_tokens(50, 4), max_tokens=4)


def switch(recorded: Recorded, ours: list[Chat]) -> Callable[[], object]:
    """Another one comes back from the host."""
    for i in (0, 2):
        ours[i].ask(recorded.session, random_tokens(60, i))
    return lambda: ours[0].ask(recorded.session, random_tokens(20, 4), max_tokens=4)


def branch(recorded: Recorded, ours: list[Chat]) -> Callable[[], object]:
    """A new one begins like one on the host; a third one has to leave."""
    for i in (0, 2):
        ours[i].ask(recorded.session, random_tokens(60, i))
    Chat(random_tokens(50, 9)).ask(recorded.session, random_tokens(20, 5))
    return lambda: ours[1].ask(recorded.session, random_tokens(20, 4), max_tokens=4)


STORIES = [go_on, switch, branch]


def hit(
    recorded: Recorded, story: Callable[..., Callable[[], object]], first: int, second: int
) -> Interrupts:
    """Play a story in a session without a past, and interrupt its last request."""
    conversations_of(recorded.session).clear()
    shot = story(recorded, chats())
    with Interrupts(first, second) as interrupts:
        try:
            shot()
        except KeyboardInterrupt:
            assert interrupts.n_raised
    return interrupts


def ask_both(recorded: Recorded) -> list[tuple[int, ...]]:
    """What follows: two conversations go on from their beginnings, and all is sound."""
    replies = []
    for i in (0, 2):
        chat = chats()[i]
        for seed in (i, 5):
            replies.append(chat.ask(recorded.session, random_tokens(60, seed), max_tokens=6).tokens)
        conversations_of(recorded.session).check()
    return replies


def try_all(
    path: Path, story: Callable[..., Callable[[], object]], n_tries: int, **settings: Any
) -> None:
    settings = {**WHOLE, "conversations": 3, **settings}
    with record(path, **settings) as recorded:
        expected = ask_both(recorded)
        n_lines = hit(recorded, story, 0, 0).n_lines
        assert n_lines > 500
        random = np.random.default_rng(n_lines)
        firsts = random.permutation(np.arange(1, n_lines + 1))[:n_tries]
        n_twice = 0
        for first in firsts.tolist():
            second = int(random.choice([0, *range(1, 12), *range(20, 60, 3)]))
            n_twice += hit(recorded, story, first, second).n_raised > 1
            recorded.calls.clear()
            assert ask_both(recorded) == expected, f"interrupted at {first} and {second}"
        assert n_twice > n_tries // 10
        conversations_of(recorded.session).clear()
        kept = recorded.memory.working_set.history.table_bytes + recorded.memory.scratch.n_bytes
        assert recorded.memory.host.used == kept, "what was lost on the way is given back"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.parametrize(("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 3)])
def test_the_next_request_is_right(
    kind: str, n_drafts: int, story: Callable[..., Callable[[], object]], tiny: Callable[..., Path]
) -> None:
    try_all(tiny(kind), story, N_TRIES, n_drafts=n_drafts)


def test_an_interrupted_calibration_is_done_or_undone(tiny_llama: Path) -> None:
    """At each of its lines; the conversation on the device goes on behind it."""
    pairs = Calibration(fingerprint="", type_k="f32", type_v="f32", pairs=((1, 0),), slice_tokens=8)
    with record(tiny_llama, **WHOLE) as recorded:
        memory, n_lines, first = recorded.memory, 1, 0
        chats()[0].ask(recorded.session, random_tokens(300, 1))
        seen = set()
        while first <= n_lines:
            found = Found(None if memory.scoring.is_calibrated else pairs, "by the test")
            with Interrupts(first) as interrupts, suppress(KeyboardInterrupt):
                recorded.engine.use_calibration(found)
            n_lines = max(n_lines, interrupts.n_lines)
            recorded.session.truncate(recorded.session.n_tokens)  # as any use, it mends
            conversations_of(recorded.session).check()
            seen.add(memory.scoring.is_calibrated)
            first += 1
        assert n_lines > 50
        assert seen == {True, False}
