"""Engines over tiny models, prompts for them, and a record of every decode call that they make."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import devices
import numpy as np
from numpy.typing import NDArray

from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import engine as engine_module
from kvmem.engine.draft import Drafter
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.memory import Memory, TieredMemory
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats
from kvmem.errors import Cancelled
from kvmem.llama.context import CancelToken, Context

I32 = NDArray[np.int32]

N_PLAIN_TOKENS = 256
"""Ids below this are bytes in the tiny vocabulary: no specials among them."""

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)

SIZES: dict[str, Any] = {
    "workspace_tokens": 4096,
    "budget_tokens": 256,
    "reserve_tokens": 64,
    "block_tokens": 32,
    "batch_tokens": 128,
    "host_limit_bytes": 256 << 20,
}
"""A pool of ten blocks: prompts of a few hundred tokens are far beyond it."""


def make_config(path: Path, **memory: Any) -> EngineConfig:
    """SIZES, changed by ``memory``. One thread: ggml's threads spin, and tests share the cores.

    Among them may be n_drafts: proposals of a step at most; 0 for no drafts. And mtp_state, p_min
    and n_min.
    """
    n_drafts, state = memory.pop("n_drafts", 0), memory.pop("mtp_state", "snapshots")
    least: dict[str, Any] = {name: memory.pop(name, 0) for name in ("p_min", "n_min")}
    draft = DraftConfig()
    if n_drafts:
        draft = DraftConfig(spec_type="draft-mtp", n_max=n_drafts, state=state, **least)
    return EngineConfig(
        model=ModelConfig(path=path, n_gpu_layers=devices.n_gpu_layers(path), n_threads=1),
        memory=MemoryConfig(**{**SIZES, **memory}),
        draft=draft,
    )


def random_tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, N_PLAIN_TOKENS, n).tolist())


@dataclass(frozen=True, slots=True)
class Reply:
    """What a generation gave. Its last token is sampled, but not in the history."""

    tokens: tuple[int, ...]
    done: Done

    @property
    def stats(self) -> RequestStats:
        return self.done.stats


def ask(
    session: Session,
    tokens: Sequence[int],
    *,
    span: tuple[int, int] | None = None,
    max_tokens: int | None = 8,
    cancel: CancelToken | None = None,
) -> Reply:
    """Greedy, without end tokens. span: where the question stands in the prompt."""
    prompt = Prompt(tokens=tuple(tokens), query_span=None if span is None else Span(*span))
    params = GenerateParams(sampling=ENDLESS, max_tokens=max_tokens)
    events = list(session.generate(prompt, params, cancel=cancel))
    done = events[-1]
    assert isinstance(done, Done)
    assert not any(isinstance(event, Done) for event in events[:-1])
    return Reply(tuple(e.token for e in events if isinstance(e, TokenEvent)), done)


@dataclass(slots=True)
class Call:
    """One decode call as it went to llama.cpp.

    visible: blocks that attention saw beside the batch itself; None without tiers.
    logits: f32 [n_vocab] of the last output, None if the call kept none.
    n_stays: tokens that are left of a batch whose drafts were rejected; None for all.
    """

    tokens: I32
    pos: I32
    outputs: Any
    visible: tuple[int, ...] | None = None
    logits: NDArray[np.float32] | None = None
    n_stays: int | None = None

    @property
    def start(self) -> int:
        return int(self.pos[0])


class RecordingContext(Context):
    """A Context that remembers what it was given, and what came out.

    stop_at: the n-th decode call from now on is cancelled; 0 for none. stop_behind: only after it
    has decoded its tokens, so that they lie in the cache and nobody has heard of them.
    on_decode: called before each decode call.
    """

    calls: list[Call]
    watched: Memory | None = None
    stop_at: int = 0
    stop_behind: bool = False
    on_decode: Callable[[], object] | None = None

    def decode(self, tokens: I32, pos: I32, *, outputs: Any = "last", **others: Any) -> None:
        if self.on_decode is not None:
            self.on_decode()
        if self.stop_at:
            self.stop_at -= 1
            if self.stop_at == 0:
                if self.stop_behind:
                    super().decode(tokens, pos, outputs=outputs, **others)
                raise Cancelled("by the test")
        visible = None
        if isinstance(self.watched, TieredMemory):
            visible = tuple(self.watched.working_set.resident().tolist())
        call = Call(tokens.copy(), pos.copy(), outputs, visible)
        super().decode(tokens, pos, outputs=outputs, **others)
        if self.n_outputs:
            call.logits = self.logits(-1)
        if self.watched is not None:
            self.calls.append(call)


def foresee(drafter: Drafter, history: Sequence[int]) -> None:
    """Let it propose what the reply will be, but for every fifth token: as random weights never do.

    The head makes its own proposals all the same.
    """
    plain = drafter.propose

    def propose(cells: I32, token: I32, pos: I32, n: int) -> I32:
        plain(cells, token, pos, n)
        start = int(pos[0]) + 1
        ahead = [*history[start : start + n], *[0] * n][:n]
        return np.array([(t + 1) % 250 if (start + i) % 5 == 0 else t
                         for i, t in enumerate(ahead)], np.int32)  # fmt: skip

    drafter.propose = propose  # type: ignore[method-assign]


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def log_records(name: str) -> Iterator[list[logging.LogRecord]]:
    """What a logger and those below it are told, however the program has set them up."""
    logger = logging.getLogger(name)
    handler = ListHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@dataclass(slots=True)
class Recorded:
    """An engine, its session, and the calls so far."""

    engine: Engine
    session: Session
    calls: list[Call]
    context: RecordingContext

    @property
    def memory(self) -> TieredMemory:
        return self.session.tiered


@contextmanager
def record(path: Path, **memory: Any) -> Iterator[Recorded]:
    """An engine whose decode calls are kept, those that failed left out."""
    with patch.object(engine_module, "Context", RecordingContext):
        engine = Engine(make_config(path, **memory))
    with engine:
        context = engine.memory.context
        assert isinstance(context, RecordingContext)
        context.calls, context.watched = [], engine.memory
        yield Recorded(engine, engine.session(), context.calls, context)
