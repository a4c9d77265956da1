"""Several callers, use after close, and what an engine leaves behind."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
from engines import ENDLESS, Reply, ask, make_config, random_tokens, record

from kvmem.config import EngineConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import ConfigError, ModelError, StateError
from kvmem.llama.context import CancelToken

LONG = random_tokens(700, seed=1)


def rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_two_callers_take_turns(tiny_llama: Path) -> None:
    """Eight threads ask 40 prompts of one engine; each reply is that of a run on its own."""
    prompts = [random_tokens(20 + 17 * i, seed=i) for i in range(40)]
    spans = [(len(prompt) - 10, len(prompt)) for prompt in prompts]
    with record(tiny_llama) as recorded:
        alone = []
        for prompt, span in zip(prompts, spans, strict=True):
            recorded.session.truncate(0)
            alone.append(ask(recorded.session, prompt, span=span).tokens)

    def run(i: int) -> Reply:
        return ask(session, prompts[i], span=spans[i])

    with Engine(make_config(tiny_llama)) as engine, ThreadPoolExecutor(8) as pool:
        session = engine.session()
        replies = list(pool.map(run, range(40)))
    assert [reply.tokens for reply in replies] == alone


def test_one_that_raises_does_not_stop_the_others(tiny_llama: Path) -> None:
    def run(i: int) -> int | None:
        try:
            return len(ask(session, LONG[: 0 if i % 3 == 0 else 100 + i]).tokens)
        except Exception:
            return None

    with Engine(make_config(tiny_llama)) as engine, ThreadPoolExecutor(8) as pool:
        session = engine.session()
        assert list(pool.map(run, range(24))) == [None if i % 3 == 0 else 8 for i in range(24)]


def test_tasks_take_turns_and_a_cancelled_one_stops_nobody(tiny_llama: Path) -> None:
    """The same prompts from asyncio tasks; every third is cancelled while it waits or writes."""
    prompts = [random_tokens(20 + 17 * i, seed=i) for i in range(40)]
    spans = [(len(prompt) - 10, len(prompt)) for prompt in prompts]
    cancelled = set(range(0, 40, 3))
    with Engine(make_config(tiny_llama)) as engine:
        session = engine.session()
        alone = []
        for prompt, span in zip(prompts, spans, strict=True):
            session.truncate(0)
            alone.append(ask(session, prompt, span=span).tokens)

        async def run(i: int) -> Reply:
            cancel = CancelToken()
            n_tokens = None if i in cancelled else 8
            asked = asyncio.to_thread(
                ask, session, prompts[i], span=spans[i], max_tokens=n_tokens, cancel=cancel
            )
            if i in cancelled:
                asyncio.get_running_loop().call_later(0.02 * i, cancel.set)
            return await asked

        async def run_all() -> list[Reply]:
            return await asyncio.wait_for(asyncio.gather(*map(run, range(40))), 60)

        replies = asyncio.run(run_all())
        for i, reply in enumerate(replies):
            if i in cancelled:
                assert reply.done.reason == "cancelled"
            else:
                assert reply.tokens == alone[i]
        engine.memory.check()  # type: ignore[union-attr]


def test_a_thread_that_would_wait_for_itself_is_told(tiny_llama: Path) -> None:
    with Engine(make_config(tiny_llama)) as engine:
        session = engine.session()
        generation = session.generate(Prompt(tokens=LONG))
        next(generation)
        for use in (
            lambda: ask(session, LONG),
            lambda: session.read(LONG),
            lambda: session.truncate(0),
        ):
            with pytest.raises(StateError, match="still open in this thread"):
                use()
        generation.close()
        assert len(ask(session, LONG).tokens) == 8


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
@pytest.mark.parametrize("n_events", [1, 3, 12])
def test_closing_ends_what_this_thread_has_half_read(
    n_events: int, kind: str, tiny: Callable[..., Path]
) -> None:
    """Wherever it stands: at its start, between two batches of the prompt, in the reply."""
    for close in (Engine.close, lambda engine: engine.session()):
        with Engine(make_config(tiny(kind))) as engine:
            session = engine.session()
            generation = session.generate(Prompt(tokens=LONG))
            for _ in range(n_events):
                next(generation)
            close(engine)
            assert list(generation) == []
            with pytest.raises(StateError, match="the session is closed"):
                ask(session, LONG)
            if close is not Engine.close:
                assert len(ask(engine.session(), LONG).tokens) == 8


def test_an_error_in_the_middle_of_a_reply_is_the_one_that_is_told(tiny_llama: Path) -> None:
    with pytest.raises(ZeroDivisionError), Engine(make_config(tiny_llama)) as engine:
        for _ in engine.session().generate(Prompt(tokens=LONG)):
            raise ZeroDivisionError


def test_closing_from_within_a_generation_is_refused(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        told: list[str] = []

        def close() -> None:
            with pytest.raises(StateError) as caught:
                recorded.engine.close()
            told.append(str(caught.value))

        recorded.context.on_decode = close
        assert len(ask(recorded.session, LONG[:50], max_tokens=1).tokens) == 1
        assert "still open in this thread" in told[0]


def test_another_thread_waits_for_an_open_generation(tiny_llama: Path) -> None:
    with Engine(make_config(tiny_llama)) as engine:
        session = engine.session()
        generation = session.generate(
            Prompt(tokens=LONG), GenerateParams(sampling=ENDLESS, max_tokens=4)
        )
        next(generation)
        began, replies = Event(), []

        def other() -> None:
            began.set()
            replies.append(ask(session, LONG[:50]))

        thread = Thread(target=other)
        thread.start()
        began.wait()
        assert len(list(generation)) > 4
        thread.join()
        assert len(replies[0].tokens) == 8


def test_closed_engines_and_sessions_raise(tiny_llama: Path) -> None:
    engine = Engine(make_config(tiny_llama))
    first = engine.session()
    ask(first, LONG)
    second = engine.session()  # the engine holds one history
    uses = (
        lambda s: ask(s, LONG),
        lambda s: s.read(LONG),
        lambda s: s.truncate(0),
        lambda s: s.n_tokens,
        lambda s: s.tokens,
        lambda s: s.memory,
        lambda s: s.tiered,
        lambda s: s.apply([0]),
        lambda s: s.logits(LONG, 1),
        lambda s: s.query(LONG[:9], range(9)),
    )
    for use in uses:
        with pytest.raises(StateError, match="closed"):
            use(first)
    generation = second.generate(Prompt(tokens=LONG))  # not begun
    engine.close()
    engine.close()
    second.close()
    for use in uses:
        with pytest.raises(StateError, match="closed"):
            use(second)
    with pytest.raises(StateError, match="closed"):
        next(generation)
    for attribute in ("memory", "session"):
        with pytest.raises(StateError, match="closed"):
            value = getattr(engine, attribute)
            value()


def test_steps_that_need_tiers_say_so(tiny_llama: Path) -> None:
    with Engine(make_config(tiny_llama, enabled=False)) as engine:
        session = engine.session()
        with pytest.raises(StateError, match="KV memory is off"):
            session.query(LONG[:9], range(9))


def test_without_tiers_a_recurrent_state_cannot_be_asked_and_rewound(tiny_qwen35: Path) -> None:
    with Engine(make_config(tiny_qwen35, enabled=False)) as engine:
        session = engine.session()
        session.read(LONG[:100])
        with pytest.raises(StateError, match="recurrent"):
            session.logits(LONG[:9], 1)
        assert session.n_tokens == 100


def test_engines_that_cannot_start_leave_nothing(
    tiny_llama: Path, tiny_gemma3: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        with pytest.raises(ModelError):
            Engine(tmp_path / "absent.gguf")
        with pytest.raises(ModelError, match="gemma3"):
            Engine(make_config(tiny_gemma3))
        with pytest.raises(ConfigError, match="is 40, but must be at least two blocks"):
            Engine(make_config(tiny_llama, budget_tokens=40))
        assert gc.collect() >= 0


def test_memory_is_back_after_close(tiny_llama: Path) -> None:
    """Twenty engines made, used and closed, with a bad path in between: RSS stays where it was."""
    sizes = []
    for _ in range(20):
        with Engine(make_config(tiny_llama)) as engine:
            assert len(ask(engine.session(), LONG, max_tokens=20).tokens) == 20
        with pytest.raises(ModelError):
            Engine("absent.gguf")
        gc.collect()
        sizes.append(rss_bytes())
    assert sizes[-1] < 1.05 * sizes[1]


def test_dropped_engines_are_freed(tiny_llama: Path) -> None:
    sizes = []
    for i in range(12):
        engine = Engine(make_config(tiny_llama))
        ask(engine.session(), LONG)
        if i % 2:
            engine.itself = engine  # type: ignore[attr-defined]
        del engine
        gc.collect()
        sizes.append(rss_bytes())
    assert sizes[-1] < 1.05 * sizes[1]


EXIT = """
from engines import make_config, random_tokens
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt
engine = Engine(make_config({path!r}))
session = engine.session()
generation = session.generate(Prompt(tokens=random_tokens(700)))
for _ in range({n_events}):
    next(generation)
"""


@pytest.mark.parametrize("n_events", [0, 1, 3, 12])
def test_an_interpreter_with_an_open_engine_exits_cleanly(
    n_events: int, tiny_llama: Path, root: Path
) -> None:
    code = EXIT.format(path=str(tiny_llama), n_events=n_events)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([str(root / "tests"), *sys.path]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_engine_takes_a_path(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        Engine("absent.gguf")
    assert EngineConfig(model=ModelConfig(path=tiny_llama)).memory.enabled
