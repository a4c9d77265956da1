"""Whatever goes wrong, in any order: each reply that comes to its end is that of an engine of its
own, every invariant holds, and all memory is given back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from chats import WHOLE, Chat, conversations_of, generate
from engines import ENDLESS, Recorded, make_config, random_tokens, record
from interrupts import Interrupts
from stock import require_tie

from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import DecodeError, KvmemError, StateError
from kvmem.kv.budget import Charge

# one that hits a generator while Python lets go of it is told, and raised nowhere
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HOST_BYTES = 5 << 20


class Adversary:
    """Asks for replies of one engine, and spoils some of them."""

    def __init__(self, recorded: Recorded, seed: int) -> None:
        self.recorded = recorded
        self.random = np.random.default_rng(seed)
        self.n_spoilt = 0

    @contextmanager
    def nothing(self) -> Iterator[None]:
        yield

    @contextmanager
    def cancels(self) -> Iterator[None]:
        context = self.recorded.context
        context.stop_at, context.stop_behind = self.pick(1, 12), bool(self.pick(0, 1))
        yield
        context.stop_at = 0

    @contextmanager
    def copies_fail(self) -> Iterator[None]:
        self.recorded.memory.port.fail(self.pick(1, 25))
        with self.spoiling():
            yield
        self.recorded.memory.port.fail(0)

    @contextmanager
    def batches_fail(self) -> Iterator[None]:
        n_left = self.pick(1, 12)

        def count() -> None:
            nonlocal n_left
            n_left -= 1
            if n_left == 0:
                raise DecodeError("by the adversary")

        self.recorded.context.on_decode = count
        with self.spoiling():
            yield
        self.recorded.context.on_decode = None

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        with self.spoiling(), Interrupts(self.pick(1, 1200), self.pick(0, 40)):
            yield

    @contextmanager
    def host_is_full(self) -> Iterator[None]:
        host = self.recorded.memory.host
        n_bytes = max(0, host.free - self.pick(0, 1 << 20))
        charge = Charge(host, n_bytes, "the adversary")
        with self.spoiling():
            yield
        charge.release()

    @contextmanager
    def spoiling(self) -> Iterator[None]:
        try:
            yield
        except (KvmemError, KeyboardInterrupt):
            self.n_spoilt += 1

    def pick(self, least: int, most: int) -> int:
        return int(self.random.integers(least, most, endpoint=True))

    def drop(self, prompt: Prompt) -> None:
        """Read a part of a generation, try a second one beside it, and let go of both."""
        params = GenerateParams(sampling=ENDLESS, max_tokens=12)
        generation = self.recorded.session.generate(prompt, params)
        for _ in islice(generation, self.pick(1, 12)):
            pass
        if self.random.random() < 0.5 and generation.gi_frame is not None:  # type: ignore[attr-defined]
            with pytest.raises(StateError, match="still open"):
                generate(self.recorded.session, prompt)
        generation.close()


def play(path: Path, seed: int, n_turns: int, n_drafts: int) -> None:
    settings = {**WHOLE, "conversations": 3, "n_drafts": n_drafts}
    with (
        record(path, **settings, host_limit_bytes=HOST_BYTES) as recorded,
        Engine(make_config(path, **settings)) as alone,
    ):
        twin = alone.session()
        adversary = Adversary(recorded, seed)
        harms = [
            adversary.nothing,
            adversary.cancels,
            adversary.copies_fail,
            adversary.batches_fail,
            adversary.interrupts,
            adversary.host_is_full,
        ]
        many = conversations_of(recorded.session)
        chats = [Chat(random_tokens(60 + 40 * i, 7 if i < 2 else i)) for i in range(5)]
        n_told = n_ties = 0
        for _ in range(n_turns):
            chat = chats[adversary.pick(0, 4)]
            if len(chat.messages) > 8 or adversary.random.random() < 0.15:
                del chat.messages[adversary.pick(0, len(chat.messages)) // 2 * 2 :]
            text = random_tokens(adversary.pick(5, 120), adversary.pick(0, 1000))
            chat.messages.append(("user", text))
            prompt = chat.prompt()
            if adversary.random.random() < 0.15:
                adversary.drop(prompt)
            reply = None
            with harms[adversary.pick(0, len(harms) - 1)]():
                reply = generate(recorded.session, prompt)
            if reply is None or reply.done.reason == "cancelled":
                chat.messages.pop()
                continue
            many.check()
            conversations_of(twin).clear()
            expected = generate(twin, prompt).tokens
            if reply.tokens != expected:
                require_tie(path, tuple(prompt.tokens), reply.tokens, expected)
                n_ties += 1
            chat.messages.append(("assistant", reply.tokens))
            n_told += 1
        assert n_told > n_turns // 3
        assert adversary.n_spoilt > n_turns // 20
        assert n_ties <= 1 + n_told // 20
        many.clear()
        kept = recorded.memory.working_set.history.table_bytes + recorded.memory.scratch.n_bytes
        assert recorded.memory.host.used == kept


@pytest.mark.parametrize(("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 3)])
def test_replies_are_right_between_faults(
    kind: str, n_drafts: int, tiny: Callable[..., Path]
) -> None:
    play(tiny(kind), 1, 40, n_drafts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [8, 9, 11])
@pytest.mark.parametrize(("kind", "n_drafts"), [("llama", 0), ("qwen35", 0), ("qwen35_mtp", 3)])
def test_replies_are_right_between_many_faults(
    kind: str, n_drafts: int, seed: int, tiny: Callable[..., Path]
) -> None:
    play(tiny(kind), seed, 120, n_drafts)
