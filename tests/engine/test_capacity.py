"""No request fails because the pool or the reserve is full; every invariant holds all the time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import ENDLESS, Recorded, random_tokens, record

from kvmem.engine.events import Done
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import CapacityError
from kvmem.llama.context import CancelToken

BLOCK = 8


def live(recorded: Recorded, seed: int, n_requests: int) -> None:
    """Random conversations: growing, cut back, unrelated, repeated, dropped and cancelled."""
    rng = np.random.default_rng(seed)
    history: tuple[int, ...] = ()
    for _ in range(n_requests):
        kind = rng.choice(["grow", "cut", "new", "again"])
        if kind == "cut":
            history = history[: int(rng.integers(0, len(history) + 1))]
        elif kind == "new":
            history = ()
        if kind != "again" or not history:
            history += random_tokens(
                int(rng.choice([1, 7, 8, 9, 60, 200])), int(rng.integers(1_000_000))
            )
        span = None
        if rng.random() < 0.7:
            start, stop = sorted(rng.integers(0, len(history) + 1, 2).tolist())
            span = Span(start, stop)
        cancel = CancelToken()
        stop_after = int(rng.integers(1, 60)) if rng.random() < 0.3 else None
        params = GenerateParams(sampling=ENDLESS, max_tokens=int(rng.choice([0, 1, 9, 70])))
        said = []
        generation = recorded.session.generate(
            Prompt(tokens=history, query_span=span), params, cancel=cancel
        )
        done = None
        for n_events, event in enumerate(generation):
            recorded.memory.check()
            if hasattr(event, "token"):
                said.append(event.token)
            if n_events == stop_after:
                cancel.set()
            done = event
        assert isinstance(done, Done)
        if done.reason == "cancelled":
            assert stop_after is not None
        else:
            assert done.reason == "length"
            assert done.stats.completion_tokens == params.max_tokens
            assert len(done.stats.memory.blocks) <= 2 + 1  # budget and reserve
            np.testing.assert_array_equal(
                recorded.session.tokens, [*history, *said[: max(0, len(said) - 1)]]
            )
        if rng.random() < 0.7:
            history += tuple(said)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_two_blocks_and_a_reserve_of_one_serve_everything(
    kind: str, seed: int, ordered: bool, tiny: Callable[..., Path]
) -> None:
    with record(
        tiny(kind, n_layers=2),
        budget_tokens=2 * BLOCK,
        reserve_tokens=BLOCK,
        block_tokens=BLOCK,
        batch_tokens=16,
        ordered=ordered,
    ) as recorded:
        live(recorded, seed, n_requests=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_two_blocks_serve_a_long_life(seed: int, tiny_llama: Path) -> None:
    with record(
        tiny_llama,
        budget_tokens=2 * BLOCK,
        reserve_tokens=BLOCK,
        block_tokens=BLOCK,
        batch_tokens=16,
        ordered=seed % 3 == 0,
        scorer=["fused", "heads", "recency", "lexical"][seed % 4],
    ) as recorded:
        live(recorded, seed, n_requests=60)


def test_the_host_limit_is_an_error_that_leaves_a_valid_session(tiny_llama: Path) -> None:
    with record(tiny_llama, host_limit_bytes=1 << 20) as recorded:
        session = recorded.session
        n_read = 0
        with pytest.raises(CapacityError, match="host limit"):
            for seed in range(100):
                session.read(random_tokens(500, seed))
                n_read += 500
        assert 500 <= n_read < 4000
        recorded.memory.check()
        assert recorded.memory.host.used <= 1 << 20
        for _ in range(3):  # the same again, at the same place
            with pytest.raises(CapacityError, match="host limit"):
                session.read(random_tokens(2000))
            recorded.memory.check()
        session.truncate(200)  # room again
        session.read(random_tokens(300))
        assert session.n_tokens == 500
        recorded.memory.check()
