"""`kvmem bench speed`: prefill and decode behind a long history, kvmem beside stock llama.cpp.

Three systems hold their history at the same time and are measured in turn, round after round, so
that whatever else the machine does falls on all of them:

    kvmem     a pool of `pool_tokens` cells behind a history of any depth
    stock     the full cache of plain llama.cpp at that depth
    window    plain llama.cpp with only `window_tokens` cells, full: what a bounded cache can reach

With several depths each reads on from one to the next. A depth that the budget holds as a whole is
measured without a window, which would be stock's cache.

A request behind the history, one that nothing is known of (cold) and then one question a round
(warm), shows what retrieval costs: seconds by phase, bytes, and their rate against the machine's
own plain copy. Behind the rounds each system answers as many questions in a row, while the others
rest, as a server with one system does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.progress import Report, silent
from kvmem.bench.record import gpu_used_bytes
from kvmem.bench.speed_systems import I32, Measured, Phase, Plain, Runner, Tiered
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.config import EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.stats import RequestStats
from kvmem.errors import ConfigError

__all__ = [
    "SYSTEMS",
    "RequestRecord",
    "SpeedRecord",
    "SpeedSpec",
    "System",
    "make_text",
    "run_speed",
]

System = Literal["kvmem", "stock", "window"]

SYSTEMS: Final[tuple[System, ...]] = ("kvmem", "stock", "window")
REQUEST_PHASES: Final = (
    "switch_s",
    "read_s",
    "query_s",
    "score_s",
    "move_s",
    "replay_s",
    "store_s",
    "checkpoint_s",
)
"""What comes before a first token, but for the rest."""
QUESTION_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSpec:
    """What is measured.

    depths: tokens in the history, ascending: more than the pool, or so few that the budget holds
    them and what is measured behind them. pool_tokens: cells of kvmem's pool, budget and reserve
    together; reserve_tokens: None for a quarter of it. window_tokens: None for as many as the pool
    has. prefill_tokens, decode_tokens: what one measurement reads or writes.
    batch_tokens, ubatch_tokens: of all three systems.
    repeats: measured rounds; round 0 comes before them and warms up.
    alone: one system is loaded at a time, where they do not fit together; rounds are then not side
    by side. cpu_time: reading and writing are counted in the CPU time of this process, which a busy
    machine changes little; with one thread, since others wait by spinning.
    """

    model: Path
    depths: tuple[int, ...] = (7168,)
    pool_tokens: int = 1024
    reserve_tokens: int | None = None
    window_tokens: int | None = None
    block_tokens: int = 32
    batch_tokens: int = 512
    ubatch_tokens: int = 512
    prefill_tokens: int = 512
    decode_tokens: int = 32
    repeats: int = 5
    kv_type: KvType = "q8_0"
    n_threads: int | None = None
    n_gpu_layers: int = 0
    alone: bool = False
    cpu_time: bool = False

    def __post_init__(self) -> None:
        if self.cpu_time and self.n_threads != 1:
            raise ConfigError("threads", self.n_threads, "1 where CPU time is counted")
        if self.repeats < 1:
            raise ConfigError("repeats", self.repeats, "at least 1")
        needed = self.prefill_tokens + self.decode_tokens + self.block_tokens
        if self.pool_tokens < needed:
            raise ConfigError("pool_tokens", self.pool_tokens, f"at least {needed}")
        if list(self.depths) != sorted(set(self.depths)):
            raise ConfigError("depths", self.depths, "ascending, each once")
        most = self.pool_tokens - self.reserve - self.most_tokens
        for depth in self.depths:
            if depth < self.pool_tokens and not self.is_within(depth):
                rule = f"at least pool_tokens={self.pool_tokens}, or at most {most}: within it"
                raise ConfigError("depth", depth, rule)
            if depth <= QUESTION_TOKENS:
                raise ConfigError("depth", depth, f"over {QUESTION_TOKENS}")

    @property
    def clock(self) -> Callable[[], float]:
        return process_time if self.cpu_time else perf_counter

    @property
    def reserve(self) -> int:
        """Tokens of the pool that are reserve."""
        quarter = self.pool_tokens // 4 // self.block_tokens * self.block_tokens
        return self.reserve_tokens or max(self.block_tokens, quarter)

    @property
    def most_tokens(self) -> int:
        """Tokens behind the history at any time."""
        return max(self.prefill_tokens, self.decode_tokens, QUESTION_TOKENS + 2)

    def is_within(self, depth: int) -> bool:
        """Whether the budget holds such a history, and what is measured behind it."""
        n_blocks = -(-(depth + self.most_tokens) // self.block_tokens)
        return n_blocks <= (self.pool_tokens - self.reserve) // self.block_tokens

    def systems(self, depth: int) -> tuple[System, ...]:
        return SYSTEMS[:2] if self.is_within(depth) else SYSTEMS

    def engine(self, system: System) -> EngineConfig:
        cells = max(self.depths) + self.most_tokens
        if system == "window":
            cells = self.window_tokens or self.pool_tokens
        tiered = system == "kvmem"
        return EngineConfig(
            model=ModelConfig(
                path=self.model, n_gpu_layers=self.n_gpu_layers, n_threads=self.n_threads
            ),
            memory=MemoryConfig(
                enabled=tiered,
                workspace_tokens=cells,
                budget_tokens=self.pool_tokens - self.reserve if tiered else None,
                reserve_tokens=self.reserve if tiered else None,
                block_tokens=self.block_tokens,
                batch_tokens=self.batch_tokens,
                ubatch_tokens=self.ubatch_tokens,
                type_k=self.kv_type,
                type_v=self.kv_type,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRecord:
    """One measurement; of round 0 nothing is summarised.

    bytes_out: of the blocks that were stored on the way. to_host_per_s: over the seconds that
    storing took; of_ceiling: over the machine's plain copy to the host. None where none was, and
    in old records.
    summaries_s: what a worker still took, behind `seconds`, for the summaries of these blocks, as
    it does while more is read; CPU time has them in `seconds`.
    """

    system: System
    phase: Phase
    depth_tokens: int
    round: int
    n_tokens: int
    seconds: float
    bytes_out: int = 0
    to_host_per_s: float | None = None
    of_ceiling: float | None = None
    summaries_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request behind the history, up to its first token.

    kind: "cold" reads the history too, "warm" a question of QUESTION_TOKENS alone. in_a_row: behind
    the rounds, with no other system in between; these are counted from 0, and the first belongs to
    them.
    first_token_s: all of it. The phases are those of PhaseTimes, and add up to it; old records lack
    some, whose seconds are in `other_s`. to_device_per_s: of the moved bytes, of_ceiling: over the
    machine's plain copy; both None where nothing moved.
    device_bytes: K and V. gpu_used_bytes: on all GPUs, by anyone; 0 without one.
    """

    system: System
    kind: Literal["cold", "warm"]
    depth_tokens: int
    round: int
    first_token_s: float
    decision: str
    read_tokens: int
    replayed_tokens: int
    query_s: float
    score_s: float
    move_s: float
    replay_s: float
    read_s: float
    bytes_in: int
    bytes_out: int
    to_device_per_s: float | None
    of_ceiling: float | None
    device_bytes: int
    host_bytes: int
    gpu_used_bytes: int
    switch_s: float = 0.0
    store_s: float = 0.0
    checkpoint_s: float = 0.0
    in_a_row: bool = False

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase by its name in PhaseTimes, the rest last."""
        counted = {name: float(getattr(self, name)) for name in REQUEST_PHASES}
        return {**counted, "other_s": self.first_token_s - sum(counted.values())}


@dataclass(slots=True, kw_only=True)
class _Loaded:
    """Systems that are in memory at the same time. ceilings: kvmem's, to the device and back."""

    spec: SpeedSpec
    report: Report
    text: I32
    runners: dict[System, Runner] = field(default_factory=dict)
    ceilings: tuple[float, float] = (1.0, 1.0)

    def rounds(self, depth: int) -> Iterator[SpeedRecord | RequestRecord]:
        """All of one depth, round by round, and then question by question."""
        spec = self.spec
        history, more = self.text[:depth], self.text[depth:]
        names = [name for name in spec.systems(depth) if name in self.runners]
        for name in names:
            self.runners[name].advance(history)
        questions = np.random.default_rng(depth).permutation(depth - QUESTION_TOKENS)
        steps = [(turn, name) for turn in range(spec.repeats + 1) for name in names]
        what = f"rounds at {depth}"
        for step, (turn, name) in enumerate(steps):
            self.report(what, step, len(steps))
            phases: list[tuple[Phase, int]] = [
                ("prefill", spec.prefill_tokens),
                ("decode", spec.decode_tokens),
            ]
            if name == "kvmem" and not spec.is_within(depth):
                phases.append(("reserve", spec.decode_tokens))
            for phase, n in phases:
                measured = self.runners[name].measure(phase, more[:n])
                yield self._record(name, phase, depth, turn, n, measured)
            if name != "window":  # it does not hold the history that the question is about
                yield self._ask(name, depth, turn, questions)
        for name in names:
            if name != "window":
                for turn in range(spec.repeats + 1):
                    yield self._ask(name, depth, turn, questions[::-1], in_a_row=True)
        self.report(what, len(steps), len(steps))

    def _record(
        self, name: System, phase: Phase, depth: int, turn: int, n: int, measured: Measured
    ) -> SpeedRecord:
        rate = measured.bytes_out / measured.store_s if measured.bytes_out else None
        return SpeedRecord(
            system=name,
            phase=phase,
            depth_tokens=depth,
            round=turn,
            n_tokens=n,
            seconds=measured.seconds,
            bytes_out=measured.bytes_out,
            to_host_per_s=rate,
            of_ceiling=None if rate is None else rate / self.ceilings[1],
            summaries_s=measured.summaries_s,
        )

    def _ask(
        self,
        name: System,
        depth: int,
        turn: int,
        questions: NDArray[np.int64],
        *,
        in_a_row: bool = False,
    ) -> RequestRecord:
        at = int(questions[turn % len(questions)])
        runner = self.runners[name]
        stats = runner.ask(self.text[at : at + QUESTION_TOKENS])
        read_s = runner.read_s if turn == 0 and not in_a_row else None
        return _request_record(name, depth, turn, read_s, stats, self.ceilings[0], in_a_row)


def run_speed(spec: SpeedSpec, *, report: Report = silent) -> Iterator[SpeedRecord | RequestRecord]:
    """All measurements of all depths, round by round."""
    groups: Sequence[Sequence[System]] = [[name] for name in SYSTEMS] if spec.alone else [SYSTEMS]
    for group in groups:
        wanted = [name for name in group if any(name in spec.systems(d) for d in spec.depths)]
        with ExitStack() as stack:
            loaded: _Loaded | None = None
            for name in wanted:
                engine = stack.enter_context(Engine(spec.engine(name)))
                if loaded is None:
                    text = make_text(engine, max(spec.depths) + spec.most_tokens)
                    loaded = _Loaded(spec=spec, report=report, text=text)
                if name == "kvmem":
                    loaded.runners[name] = Tiered(engine, report, spec.clock)
                    assert isinstance(engine.memory, TieredMemory)
                    loaded.ceilings = engine.memory.port.copy_ceiling()
                else:
                    loaded.runners[name] = Plain(engine, name, report, spec.clock, spec.most_tokens)
            if loaded is not None:
                for depth in spec.depths:
                    yield from loaded.rounds(depth)


def _request_record(
    system: System,
    depth: int,
    turn: int,
    history_s: float | None,
    stats: RequestStats,
    ceiling: float,
    in_a_row: bool,
) -> RequestRecord:
    """history_s: that of reading the history, for the cold one; None for others."""
    memory, times = stats.memory, stats.prompt_times
    cold, read_s = history_s is not None, history_s or 0.0
    rate = memory.bytes_in / times.move_s if memory.bytes_in and times.move_s else None
    return RequestRecord(
        system=system,
        kind="cold" if cold else "warm",
        depth_tokens=depth,
        round=turn,
        first_token_s=stats.prompt_s + read_s,
        decision=memory.decision,
        read_tokens=memory.read_tokens + depth * cold,
        replayed_tokens=memory.replayed_tokens,
        query_s=times.query_s,
        score_s=times.score_s,
        move_s=times.move_s,
        replay_s=times.replay_s,
        read_s=times.read_s + read_s,
        bytes_in=memory.bytes_in,
        bytes_out=memory.bytes_out,
        to_device_per_s=rate,
        of_ceiling=None if rate is None else rate / ceiling,
        device_bytes=memory.device_bytes,
        host_bytes=memory.host_bytes,
        gpu_used_bytes=gpu_used_bytes(),
        switch_s=times.switch_s,
        store_s=times.store_s,
        checkpoint_s=times.checkpoint_s,
        in_a_row=in_a_row,
    )


def make_text(engine: Engine, n: int) -> I32:
    """Text of the demo's generator."""
    spec = WorkloadSpec(n_tokens=max(n, 1024), n_facts=1, n_lookalikes=0, plain=True)
    return np.array(make_prompt(Harbor(), engine.vocab, spec, seed=0).history[:n], np.int32)
