"""`kvmem bench speed`: prefill and decode behind a long history, kvmem beside stock llama.cpp.

Three systems hold their history at the same time and are measured in turn, round after round, so
that whatever else the machine does falls on all of them:

    kvmem     a pool of `pool_tokens` cells behind a history of any depth
    stock     the full cache of plain llama.cpp at that depth
    window    plain llama.cpp with only `window_tokens` cells, full: what a bounded cache can reach

A request behind the history, one that nothing is known of (cold) and then one question a round
(warm), shows what retrieval costs: seconds by phase, bytes, and their rate against the machine's
own plain copy.
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
from kvmem.bench.record import gpu_used_bytes
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.config import EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import Prompt, RoleSpan, Span, Tokens
from kvmem.engine.room import make_reply_room
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats
from kvmem.errors import ConfigError
from kvmem.llama.state import restore_state, save_state, state_bytes

__all__ = [
    "OPENING_TOKENS",
    "SYSTEMS",
    "Phase",
    "RequestRecord",
    "SpeedRecord",
    "SpeedSpec",
    "System",
    "make_text",
    "run_speed",
]

I32 = NDArray[np.int32]
Report = Callable[[str, int, int], None]
System = Literal["kvmem", "stock", "window"]
Phase = Literal["prefill", "decode"]

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
READ_TOKENS: Final = 2048
QUESTION_TOKENS: Final = 64
OPENING_TOKENS: Final = 8
"""Of those, what stands for a template's opening of the reply: no part of what is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSpec:
    """What is measured.

    depths: tokens in the history. pool_tokens: cells of kvmem's pool, budget and reserve together;
    reserve_tokens: None for a quarter of it. window_tokens: None for as many as the pool has.
    prefill_tokens, decode_tokens: what one measurement reads or writes.
    batch_tokens, ubatch_tokens: of all three systems.
    repeats: measured rounds; one more is run before them and thrown away.
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
    def reserve(self) -> int:
        """Tokens of the pool that are reserve."""
        quarter = self.pool_tokens // 4 // self.block_tokens * self.block_tokens
        return self.reserve_tokens or max(self.block_tokens, quarter)

    @property
    def most_tokens(self) -> int:
        """Tokens behind the history at any time."""
        return max(self.prefill_tokens, self.decode_tokens, QUESTION_TOKENS + 2)

    def engine(self, system: System, depth: int) -> EngineConfig:
        cells = depth + self.most_tokens
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request behind the history, up to its first token.

    kind: "cold" reads the history too, "warm" a question of QUESTION_TOKENS alone.
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

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase by its name in PhaseTimes, the rest last."""
        counted = {name: float(getattr(self, name)) for name in REQUEST_PHASES}
        return {**counted, "other_s": self.first_token_s - sum(counted.values())}


class _Runner(Protocol):
    read_s: float

    def prefill(self, tokens: I32) -> float: ...

    def decode(self, tokens: I32) -> float: ...

    def ask(self, tokens: I32) -> RequestStats: ...


def run_speed(
    spec: SpeedSpec, *, report: Report = lambda what, done, total: None
) -> Iterator[SpeedRecord | RequestRecord]:
    """All measurements of all depths, round by round; the warm-up round is left out."""
    for depth in spec.depths:
        yield from _run_depth(spec, depth, report)


def _run_depth(
    spec: SpeedSpec, depth: int, report: Report
) -> Iterator[SpeedRecord | RequestRecord]:
    with (
        Engine(spec.engine("kvmem", depth)) as tiered,
        Engine(spec.engine("stock", depth)) as stock,
        Engine(spec.engine("window", depth)) as window,
    ):
        text = make_text(tiered, depth + spec.most_tokens)
        history, more = text[:depth], text[depth:]
        questions = np.random.default_rng(depth).permutation(depth - QUESTION_TOKENS)
        runners: dict[System, _Runner] = {
            "kvmem": _Tiered(tiered, history, report),
            "stock": _Plain(stock, history, "stock", report, spec.most_tokens),
            "window": _Plain(window, history, "window", report, spec.most_tokens),
        }
        assert isinstance(tiered.memory, TieredMemory)
        ceiling = tiered.memory.port.copy_ceiling()[0]
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
            if name != "window":  # it does not hold the history that the question is about
                at = int(questions[turn])
                stats = runners[name].ask(history[at : at + QUESTION_TOKENS])
                yield _request_record(name, depth, turn, runners[name].read_s, stats, ceiling)
        report(f"rounds at {depth}", total, total)


def _request_record(
    system: System, depth: int, turn: int, read_s: float, stats: RequestStats, ceiling: float
) -> RequestRecord:
    """The first round's is the cold one: its time and that of reading the history."""
    memory, times = stats.memory, stats.prompt_times
    cold = turn == 0
    rate = memory.bytes_in / times.move_s if memory.bytes_in and times.move_s else None
    return RequestRecord(
        system=system,
        kind="cold" if cold else "warm",
        depth_tokens=depth,
        round=turn,
        first_token_s=stats.prompt_s + read_s * cold,
        decision=memory.decision,
        read_tokens=memory.read_tokens + depth * cold,
        replayed_tokens=memory.replayed_tokens,
        query_s=times.query_s,
        score_s=times.score_s,
        move_s=times.move_s,
        replay_s=times.replay_s,
        read_s=times.read_s + read_s * cold,
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
    )


def make_text(engine: Engine, n: int) -> I32:
    """Text of the demo's generator."""
    spec = WorkloadSpec(n_tokens=max(n, 1024), n_facts=1, n_lookalikes=0, plain=True)
    return np.array(make_prompt(Harbor(), engine.vocab, spec, seed=0).history[:n], np.int32)


def _read(session: Session, tokens: I32, what: str, report: Report) -> float:
    """Seconds that it took."""
    started = perf_counter()
    for start in range(0, len(tokens), READ_TOKENS):
        session.read(tokens[start : start + READ_TOKENS])
        report(what, min(start + READ_TOKENS, len(tokens)), len(tokens))
    return perf_counter() - started


def _ask(session: Session, history: I32, question: I32) -> RequestStats:
    """A request for one token behind the history, whose question is `question`."""
    tokens = Tokens(np.concatenate([history, question]))
    span = Span(len(history), len(tokens) - OPENING_TOKENS)
    prompt = Prompt(tokens=tokens, spans=(RoleSpan("user", span),), query_span=span)
    params = GenerateParams(sampling=SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=1)
    *_, done = session.generate(prompt, params)
    assert isinstance(done, Done)
    return done.stats


class _Tiered:
    """kvmem behind its whole history, budget full of the newest blocks before each measurement."""

    def __init__(self, engine: Engine, history: I32, report: Report) -> None:
        self._session = engine.session()
        self.read_s = _read(self._session, history, "kvmem reads", report)
        self._memory: TieredMemory = self._session.tiered
        self._memory.save_checkpoint()  # a hybrid comes back to here
        self._history = history
        self._n_history = len(history)

    def ask(self, tokens: I32) -> RequestStats:
        self._fill()
        stats = _ask(self._session, self._history, tokens)
        self._session.truncate(self._n_history)
        return stats

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
            make_reply_room(memory, first_own)
            memory.decode(np.array([token], np.int32), reply=True)
            if memory.n_tokens % memory.block_tokens == 0:
                memory.seal()
            memory.context.logits(-1).argmax()
        seconds = perf_counter() - started
        self._session.truncate(self._n_history)
        return seconds


class _Plain:
    """Plain llama.cpp. What is measured ends where its cells end, so the cache is full by then."""

    def __init__(
        self, engine: Engine, history: I32, what: str, report: Report, most_tokens: int
    ) -> None:
        self._session = engine.session()
        self._memory = self._session.memory
        self._n_cells = engine.n_ctx
        self._state: NDArray[np.uint8] | None = None
        is_hybrid = engine.model.is_hybrid
        # the state of a hybrid cannot be rewound, so it leaves room for the longest measurement
        self._history = history[-(self._n_cells - most_tokens * is_hybrid) :]
        self.read_s = _read(self._session, self._history, f"{what} reads", report)
        if is_hybrid:
            self._state = np.empty(state_bytes(self._memory.context), np.uint8)
            save_state(self._memory.context, self._state)

    def _restart(self, n: int) -> None:
        """Leave room for n tokens: the window holds less, stock its whole history."""
        n_history = len(self._history)
        if self._state is None:
            self._session.truncate(min(n_history, self._n_cells - n))
        elif self._memory.n_tokens > n_history:
            restore_state(self._memory.context, self._state)
            # the memory asks for the newest position of both halves, and so leaves attention's
            assert self._memory.context.seq_rm(0, n_history, -1)
            self._session.truncate(n_history)
            assert self._memory.n_tokens == n_history

    def ask(self, tokens: I32) -> RequestStats:
        self._restart(len(tokens) + 1)
        return _ask(self._session, self._history, tokens)

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
