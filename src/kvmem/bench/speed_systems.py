"""The systems that `kvmem bench speed` measures: kvmem's memory, and plain llama.cpp."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.asking import ask, read_in_pieces
from kvmem.bench.history import position_scores
from kvmem.bench.progress import Report
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import Prompt, RoleSpan, Span, Tokens
from kvmem.engine.room import make_reply_room
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats
from kvmem.llama.state import restore_state, save_state, state_bytes

__all__ = ["I32", "OPENING_TOKENS", "Measured", "Phase", "Plain", "Runner", "Tiered"]

I32 = NDArray[np.int32]
Phase = Literal["prefill", "decode", "reserve"]
"""reserve: decode, with all of kvmem's cells in use; kvmem's alone."""

OPENING_TOKENS: Final = 8
"""Of a question, what stands for a template's opening of the reply: no part of what is asked."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds of one measurement, and of them those that storing took."""

    seconds: float
    bytes_out: int = 0
    store_s: float = 0.0
    summaries_s: float = 0.0


class Runner(Protocol):
    read_s: float

    def advance(self, history: I32) -> None: ...

    def measure(self, phase: Phase, tokens: I32) -> Measured: ...

    def ask(self, tokens: I32) -> RequestStats: ...


def _ask(session: Session, history: I32, question: I32) -> RequestStats:
    """A request for one token behind the history, whose question is `question`."""
    tokens = Tokens(np.concatenate([history, question]))
    span = Span(len(history), len(tokens) - OPENING_TOKENS)
    prompt = Prompt(tokens=tokens, spans=(RoleSpan("user", span),), query_span=span)
    params = GenerateParams(sampling=SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=1)
    return ask(session, prompt, params).stats


class Tiered:
    """kvmem behind its whole history, budget full of the newest blocks before each measurement."""

    def __init__(self, engine: Engine, report: Report, clock: Callable[[], float]) -> None:
        self._session = engine.session()
        self._clock = clock
        self._memory: TieredMemory = self._session.tiered
        self._report = report
        self._history = np.empty(0, np.int32)
        self.read_s = 0.0

    def advance(self, history: I32) -> None:
        """Read on to the end of this history, which begins with the one before."""
        self.read_s += read_in_pieces(
            self._session, history[len(self._history) :], "kvmem reads", self._report
        )
        self._memory.save_checkpoint()  # a hybrid comes back to here
        self._history = history

    def ask(self, tokens: I32) -> RequestStats:
        self._fill(self._memory.budget_blocks)
        stats = _ask(self._session, self._history, tokens)
        self._session.truncate(len(self._history))
        return stats

    def measure(self, phase: Phase, tokens: I32) -> Measured:
        memory, n_history = self._memory, len(self._history)
        first_own = memory.n_blocks_of(n_history)
        n_blocks = memory.budget_blocks
        if phase == "reserve":  # the reply takes what is left
            n_own = memory.n_blocks_of(n_history + len(tokens)) - first_own
            n_blocks += memory.sizes.n_reserve_blocks - n_own
        self._fill(n_blocks)
        memory.begin_request()  # counts the seconds of storing from here on
        n_sealed = memory.working_set.n_sealed
        started = self._clock()
        if phase == "prefill":
            self._session.read(tokens)
        else:
            self._write(tokens, first_own)
        if self._clock is process_time:
            memory.index.flush()
        seconds = self._clock() - started
        waits = perf_counter()
        memory.index.flush()  # a worker makes the summaries
        summaries_s = perf_counter() - waits
        n_stored = memory.working_set.n_sealed - n_sealed
        measured = Measured(
            seconds=seconds,
            bytes_out=n_stored * memory.port.payload_bytes,
            store_s=memory.store_s,
            summaries_s=summaries_s,
        )
        self._session.truncate(n_history)
        return measured

    def _fill(self, n_blocks: int) -> None:
        scores = position_scores(self._memory.n_blocks_of(len(self._history)))
        self._session.apply(self._session.select(scores, budget_blocks=n_blocks))

    def _write(self, tokens: I32, first_own: int) -> None:
        memory = self._memory
        for token in tokens:
            make_reply_room(memory, first_own)
            memory.decode(np.array([token], np.int32), reply=True)
            if memory.n_tokens % memory.block_tokens == 0:
                memory.seal()
            memory.context.logits(-1).argmax()


class Plain:
    """Plain llama.cpp. The window is filled once, and full by the end of what is measured."""

    def __init__(
        self,
        engine: Engine,
        system: Literal["stock", "window"],
        report: Report,
        clock: Callable[[], float],
        most_tokens: int,
    ) -> None:
        self._session = engine.session()
        self._clock = clock
        self._memory = self._session.memory
        self._system = system
        self._report = report
        self._n_cells = engine.n_ctx
        self._is_hybrid = engine.model.is_hybrid
        self._most_tokens = most_tokens
        self._state: NDArray[np.uint8] | None = None
        self._history = np.empty(0, np.int32)
        self.read_s = 0.0

    def advance(self, history: I32) -> None:
        """Read on to the end of this history, which begins with the one before."""
        if self._system == "window":
            if len(self._history):
                return  # what it costs does not depend on the tokens that it holds
            # the state of a hybrid cannot be rewound, so it leaves room for the longest measurement
            history = history[-(self._n_cells - self._most_tokens * self._is_hybrid) :]
        self._restart(0)
        self.read_s += read_in_pieces(
            self._session,
            history[len(self._history) :],
            f"{self._system} reads",
            self._report,
        )
        self._history = history
        if self._is_hybrid:
            self._state = np.empty(state_bytes(self._memory.context), np.uint8)
            save_state(self._memory.context, self._state)

    def _restart(self, n: int) -> None:
        """Leave room for n tokens: the window holds less, stock its whole history."""
        n_history = len(self._history)
        if self._state is None:
            self._session.truncate(min(n_history, self._n_cells - n))
        elif self._memory.n_tokens > n_history:
            restore_state(self._memory.context, self._state, n_history)
            # the memory asks for the newest position of both halves, and so leaves attention's
            assert self._memory.context.seq_rm(0, n_history, -1)
            self._session.truncate(n_history)
            assert self._memory.n_tokens == n_history

    def ask(self, tokens: I32) -> RequestStats:
        self._restart(len(tokens) + 1)
        return _ask(self._session, self._history, tokens)

    def measure(self, phase: Phase, tokens: I32) -> Measured:
        self._restart(len(tokens))
        memory = self._session.memory
        started = self._clock()
        if phase == "prefill":
            self._session.read(tokens)
        else:
            for token in tokens:
                memory.decode(np.array([token], np.int32))
                memory.context.logits(-1).argmax()
        return Measured(seconds=self._clock() - started)
