"""Several clients at once, drawn at random: no reply contains another conversation (case R05)."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from chats import WHOLE, Chat, conversations_of
from engines import Reply, make_config, random_tokens, record
from stock import require_tie

from kvmem.engine.engine import Engine
from kvmem.engine.session import Session


@dataclass
class Player:
    """A client of the random trial: its turns are drawn, and depend on its own replies alone."""

    number: int
    chat: Chat
    random: np.random.Generator
    lock: threading.Lock = field(default_factory=threading.Lock)
    replies: list[tuple[int, ...]] = field(default_factory=list)

    def play(self, session: Session) -> Reply:
        n = int(self.random.integers(5, 60))
        text = tuple(self.random.integers(0, 256, n).tolist())
        if len(self.chat.messages) > 14:
            self.chat.messages.clear()  # a compaction: the system prompt alone stays
        elif self.chat.messages and self.random.random() < 0.2:
            del self.chat.messages[-2:]  # the last turn is asked anew
        reply = self.chat.ask(session, text, max_tokens=16)
        self.replies.append(reply.tokens)
        return reply


def players() -> list[Player]:
    """Six, of which 0, 1 and 2 have one system prompt."""
    return [
        Player(i, Chat(random_tokens(130, 7 if i < 3 else 100 + i)), np.random.default_rng(i))
        for i in range(6)
    ]


def random_trial(path: Path, n_requests: int, n_drafts: int = 0) -> None:
    """Case R05: each reply is that of the client alone, and what was read is what is said."""
    settings = {
        **WHOLE, "conversations": 4, "conversations_bytes": 3 << 20, "n_drafts": n_drafts
    }  # fmt: skip
    ours = players()
    order = iter(np.random.default_rng(5).integers(0, 6, n_requests).tolist())
    taking = threading.Lock()
    stats: list[tuple[int, int, int]] = []
    faults: list[BaseException] = []

    def work(session: Session) -> None:
        while True:
            with taking:
                picked = next(order, None)
                if picked is None or faults:
                    return
                ours[picked].lock.acquire()
            try:
                reply = ours[picked].play(session)
                told = reply.stats
                stats.append((told.prompt_tokens, told.cached_tokens, told.completion_tokens))
            except BaseException as fault:
                faults.append(fault)
                raise
            finally:
                ours[picked].lock.release()

    with record(path, **settings) as recorded, ThreadPoolExecutor(4) as pool:
        recorded.context.on_decode = lambda: None
        for result in [pool.submit(work, recorded.session) for _ in range(4)]:
            result.result()
        many = conversations_of(recorded.session)
        many.check()
        assert many.n_evicted > 0
        n_decoded = sum(len(call.tokens) for call in recorded.calls)
    assert len(stats) == n_requests
    n_told = sum(prompt - cached + reply - 1 for prompt, cached, reply in stats)
    assert n_decoded == n_told or (n_drafts and n_decoded > n_told), "drafts are decoded too"
    assert any(cached for _, cached, _ in stats) and any(not cached for _, cached, _ in stats)
    for player, twin in zip(ours, players(), strict=True):
        with Engine(make_config(path, **WHOLE)) as engine:
            session = engine.session()
            n_ties = 0
            for expected in player.replies:
                reply = twin.play(session).tokens
                if reply != expected:
                    twin.chat.messages.pop()
                    require_tie(path, tuple(twin.chat.prompt().tokens), reply, expected)
                    twin.chat.messages.append(("assistant", expected))
                    n_ties += 1
            assert n_ties <= 1 + len(player.replies) // 20, f"player {player.number}"


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_no_reply_contains_another_conversation(tiny: Callable[..., Path], kind: str) -> None:
    random_trial(tiny(kind), 40)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 3)])
def test_no_reply_of_two_hundred_contains_another(
    tiny: Callable[..., Path], kind: str, n_drafts: int
) -> None:
    random_trial(tiny(kind), 200, n_drafts)
