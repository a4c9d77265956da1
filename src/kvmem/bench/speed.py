"""`kvmem bench speed`: prefill and decode behind a long history, kvmem beside stock llama.cpp.

Three systems hold their history at the same time and are measured in turn, round after round, so
that whatever else the machine does falls on all of them:

    kvmem     a pool of `pool_tokens` cells behind a history of any depth
    stock     the full cache of plain llama.cpp at that depth
    window    plain llama.cpp with only `pool_tokens` cells, full: what a bounded cache can reach
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import position_scores
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.config import EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.session import Session
from kvmem.errors import ConfigError

__all__ = ["SYSTEMS", "Phase", "SpeedRecord", "SpeedSpec", "System", "run_speed"]

I32 = NDArray[np.int32]
Report = Callable[[str, int, int], None]
System = Literal["kvmem", "stock", "window"]
Phase = Literal["prefill", "decode"]

SYSTEMS: Final[tuple[System, ...]] = ("kvmem", "stock", "window")
READ_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSpec:
    """What is measured.

    depths: tokens in the history. pool_tokens: cells of kvmem's pool, budget and reserve together;
    a quarter of it is reserve. prefill_tokens, decode_tokens: what one measurement reads or writes.
    repeats: measured rounds; one more is run before them and thrown away.
    """

    model: Path
    depths: tuple[int, ...] = (7168,)
    pool_tokens: int = 1024
    block_tokens: int = 32
    prefill_tokens: int = 512
    decode_tokens: int = 32
    repeats: int = 5
    kv_type: KvType = "q8_0"
    n_threads: int | None = None
    n_gpu_layers: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("repeats", self.repeats, "at least 1")
        needed = self.prefill_tokens + self.decode_tokens + self.block_tokens
        if self.pool_tokens < needed:
            raise ConfigError("pool_tokens", self.pool_tokens, f"at least {needed}")
        for depth in self.depths:
            if depth < self.pool_tokens:
                raise ConfigError("depth", depth, f"at least pool_tokens={self.pool_tokens}")

    @property
    def reserve_tokens(self) -> int:
        return max(
            self.block_tokens, self.pool_tokens // 4 // self.block_tokens * self.block_tokens
        )

    def engine(self, system: System, depth: int) -> EngineConfig:
        cells = self.pool_tokens if system == "window" else depth + self.prefill_tokens
        tiered = system == "kvmem"
        return EngineConfig(
            model=ModelConfig(
                path=self.model, n_gpu_layers=self.n_gpu_layers, n_threads=self.n_threads
            ),
            memory=MemoryConfig(
                enabled=tiered,
                workspace_tokens=cells,
                budget_tokens=self.pool_tokens - self.reserve_tokens if tiered else None,
                reserve_tokens=self.reserve_tokens if tiered else None,
                block_tokens=self.block_tokens,
                type_k=self.kv_type,
                type_v=self.kv_type,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRecord:
    """One measurement."""

    system: System
    phase: Phase
    depth_tokens: int
    round: int
    n_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


class _Runner(Protocol):
    def prefill(self, tokens: I32) -> float: ...

    def decode(self, tokens: I32) -> float: ...


def run_speed(
    spec: SpeedSpec, *, report: Report = lambda what, done, total: None
) -> Iterator[SpeedRecord]:
    """All measurements of all depths, round by round; the warm-up round is left out."""
    for depth in spec.depths:
        yield from _run_depth(spec, depth, report)


def _run_depth(spec: SpeedSpec, depth: int, report: Report) -> Iterator[SpeedRecord]:
    with (
        Engine(spec.engine("kvmem", depth)) as tiered,
        Engine(spec.engine("stock", depth)) as stock,
        Engine(spec.engine("window", depth)) as window,
    ):
        text = _tokens(tiered, depth + spec.prefill_tokens)
        history, more = text[:depth], text[depth:]
        runners: dict[System, _Runner] = {
            "kvmem": _Tiered(tiered, history, report),
            "stock": _Plain(stock, history, "stock", report),
            "window": _Plain(window, history[-spec.pool_tokens :], "window", report),
        }
        total = (spec.repeats + 1) * len(runners)
        for step in range(total):
            turn, system = divmod(step, len(runners))
            name = SYSTEMS[system]
            report(f"rounds at {depth}", step, total)
            for phase, n in (("prefill", spec.prefill_tokens), ("decode", spec.decode_tokens)):
                runner = runners[name]
                seconds = (runner.prefill if phase == "prefill" else runner.decode)(more[:n])
                if turn:
                    yield SpeedRecord(
                        system=name,
                        phase="prefill" if phase == "prefill" else "decode",
                        depth_tokens=depth,
                        round=turn,
                        n_tokens=n,
                        seconds=seconds,
                    )
        report(f"rounds at {depth}", total, total)


def _tokens(engine: Engine, n: int) -> I32:
    """Text of the demo's generator."""
    spec = WorkloadSpec(n_tokens=max(n, 1024), n_facts=1, n_lookalikes=0, plain=True)
    return np.array(make_prompt(Harbor(), engine.vocab, spec, seed=0).history[:n], np.int32)


def _read(session: Session, tokens: I32, what: str, report: Report) -> None:
    for start in range(0, len(tokens), READ_TOKENS):
        session.read(tokens[start : start + READ_TOKENS])
        report(what, min(start + READ_TOKENS, len(tokens)), len(tokens))


class _Tiered:
    """kvmem behind its whole history, budget full of the newest blocks before each measurement."""

    def __init__(self, engine: Engine, history: I32, report: Report) -> None:
        self._session = engine.session()
        _read(self._session, history, "kvmem reads", report)
        self._memory: TieredMemory = self._session.tiered
        self._n_history = len(history)

    def _fill(self) -> None:
        n_blocks = self._memory.n_blocks_of(self._n_history)
        self._session.apply(self._session.select(position_scores(n_blocks)))

    def prefill(self, tokens: I32) -> float:
        self._fill()
        started = perf_counter()
        self._session.read(tokens)
        seconds = perf_counter() - started
        self._session.truncate(self._n_history)
        return seconds

    def decode(self, tokens: I32) -> float:
        self._fill()
        memory = self._memory
        first_own = memory.n_blocks_of(self._n_history)
        started = perf_counter()
        for token in tokens:
            memory.make_reply_room(first_own)
            memory.decode(np.array([token], np.int32), reply=True)
            if memory.n_tokens % memory.block_tokens == 0:
                memory.seal()
            memory.context.logits(-1).argmax()
        seconds = perf_counter() - started
        self._session.truncate(self._n_history)
        return seconds


class _Plain:
    """Plain llama.cpp. What is measured ends where its cells end, so the cache is full by then."""

    def __init__(self, engine: Engine, history: I32, what: str, report: Report) -> None:
        self._session = engine.session()
        self._n_cells = engine.n_ctx
        _read(self._session, history, f"{what} reads", report)
        self._history = history

    def _restart(self, n: int) -> None:
        """Leave room for n tokens: the window holds less, stock its whole history."""
        self._session.truncate(min(len(self._history), self._n_cells - n))

    def prefill(self, tokens: I32) -> float:
        self._restart(len(tokens))
        started = perf_counter()
        self._session.read(tokens)
        return perf_counter() - started

    def decode(self, tokens: I32) -> float:
        self._restart(len(tokens))
        memory = self._session.memory
        started = perf_counter()
        for token in tokens:
            memory.decode(np.array([token], np.int32))
            memory.context.logits(-1).argmax()
        return perf_counter() - started
