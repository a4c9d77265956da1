"""One history: what it shares with a request, what is read, what is brought back, and the reply."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import GEN_SUSPENDED, getgeneratorstate
from time import perf_counter
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvmem.engine import retrieve
from kvmem.engine.conversations import Conversations, common_prefix
from kvmem.engine.decode import decode_reply
from kvmem.engine.events import Done, Event, PromptProgress
from kvmem.engine.memory import Memory, PlainMemory, TieredMemory, as_tiered
from kvmem.engine.prompt import Prompt
from kvmem.engine.reading import PromptReader
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.stats import MemoryReport, PhaseTimes, RequestStats
from kvmem.engine.turns import Turns
from kvmem.errors import Cancelled, ContextLengthError, RequestError, StateError
from kvmem.kv.query import Query
from kvmem.kv.scorers import Scores
from kvmem.llama.context import CancelToken
from kvmem.llama.sampler import Sampler
from kvmem.llama.vocab import Vocab

__all__ = ["Session"]

I32 = NDArray[np.int32]


class Session:
    """The history that an engine holds, or several that take turns on the device.

    Made by Engine.session(); calls of several threads take turns. With several, a request goes on
    the one that it fits best; the steps on their own act on the one that is on the device.
    conversations: those of the memory; None without KV memory.
    """

    def __init__(
        self,
        memory: Memory,
        vocab: Vocab,
        workspace_tokens: int,
        turns: Turns,
        conversations: Conversations | None = None,
    ) -> None:
        self._memory = memory
        self._vocab = vocab
        self._turns = turns
        self._workspace_tokens = workspace_tokens
        self._conversations = conversations
        self._reader = None if isinstance(memory, PlainMemory) else PromptReader(memory)
        self._generations: WeakSet[Generator[Event, None, None]] = WeakSet()
        self._closed = False

    def close(self) -> None:
        """Forget the history. A second call does nothing.

        A generation that this thread has not read to its end is closed; for one in another thread
        it waits.
        """
        if not self._closed:
            if self._turns.is_mine:
                for generation in list(self._generations):
                    if getgeneratorstate(generation) == GEN_SUSPENDED:
                        generation.close()
            with self._turns.take():
                if self._conversations is None:
                    self._memory.truncate(0)
                else:
                    self._conversations.clear()
            self._closed = True

    @property
    def memory(self) -> Memory:
        if self._closed:
            raise StateError("the session is closed")
        return self._memory

    @property
    def tiered(self) -> TieredMemory:
        """The memory, where it is tiered. Raises StateError with --no-kvmem."""
        return as_tiered(self.memory)

    @contextmanager
    def _alone(self) -> Iterator[Memory]:
        """The memory for this thread alone, as the last use has left it."""
        with self._turns.take():
            yield self.memory

    @contextmanager
    def _turn(self) -> Iterator[Memory]:
        """The same, and whole: what was broken off before is undone."""
        with self._alone() as memory:
            self.settle()
            yield memory

    def settle(self) -> None:
        """Undo what an interrupt has left half done; nothing where all is whole. For the one whose
        turn it is.
        """
        if self._conversations is None:
            self._memory.settle()
        else:
            self._conversations.settle()

    @property
    def n_tokens(self) -> int:
        return self.memory.n_tokens

    @property
    def tokens(self) -> I32:
        """The history: int32 [n_tokens], a copy."""
        return self.memory.tokens.copy()

    def generate(
        self,
        prompt: Prompt,
        params: GenerateParams | None = None,
        *,
        cancel: CancelToken | None = None,
    ) -> Generator[Event, None, None]:
        """Answer ``prompt``, reading only what the history does not hold yet.

        Yields PromptProgress, then TokenEvents, then one Done; a set ``cancel`` ends it with the
        reason "cancelled".
        The iterator may be dropped at any time: what was read and said stays in the history.

        Raises:
            ContextLengthError: the prompt leaves no room for a reply in the workspace; nothing is
                lost.
            CapacityError: the host limit is reached. DecodeError, TransferError: the history is as
                before the batch.
        """
        params = params or GenerateParams()
        tokens = np.asarray(prompt.tokens, np.int32)
        if len(tokens) == 0:
            raise RequestError("the prompt is empty")
        if len(tokens) >= self._workspace_tokens:
            raise ContextLengthError(len(tokens), self._workspace_tokens)
        generation = self._generate(prompt, tokens, params, cancel)
        self._generations.add(generation)
        return generation

    def _generate(
        self, prompt: Prompt, tokens: I32, params: GenerateParams, cancel: CancelToken | None
    ) -> Generator[Event, None, None]:
        with (
            self._alone() as memory,
            Sampler(self._vocab.model, params.sampling.as_dict()) as sampler,
        ):
            started = perf_counter()
            if isinstance(memory, TieredMemory):
                memory.begin_request()
            stats = RequestStats(prompt_tokens=len(tokens))
            try:
                shared = self._enter(prompt, tokens, stats.memory)
                stats.cached_tokens = stats.memory.reused_tokens = memory.n_tokens
                yield PromptProgress(memory.n_tokens, len(tokens))
                if self._reader is None:
                    yield from self._read_plain(tokens, stats.memory, cancel)
                else:
                    yield from self._reader.read(prompt, tokens, shared, stats.memory, cancel)
                stats.prompt_s = perf_counter() - started
                self._complete(stats.memory.times, stats.prompt_s)
                stats.prompt_times = replace(stats.memory.times)
                reason = yield from decode_reply(
                    memory,
                    self._vocab,
                    sampler,
                    tokens,
                    params,
                    self._workspace_tokens,
                    stats,
                    cancel,
                )
                self._save_checkpoint()
            except Cancelled:
                reason = "cancelled"
            finally:
                if self._conversations is not None:
                    self._conversations.note()
            total_s = perf_counter() - started
            self._complete(stats.memory.times, total_s)
            if stats.prompt_s == 0:  # cancelled before a token came
                stats.prompt_s, stats.prompt_times = total_s, replace(stats.memory.times)
            stats.decode_s = total_s - stats.prompt_s
            self._finish(stats.memory)
            yield Done(reason, stats)

    def _enter(self, prompt: Prompt, tokens: I32, report: MemoryReport) -> int:
        """Make the memory hold what the prompt begins with; returns what it had in common.

        What was broken off before is undone first: what that takes, and what is to be said of it,
        belongs to this request.
        """
        memory = self.memory
        with report.times.measure("switch_s", memory.clock):
            self.settle()
            if self._conversations is not None:
                return self._conversations.enter(prompt, tokens, report)
            shared = min(common_prefix(memory.tokens, tokens), len(tokens) - 1)
            if prompt.is_read_anew:
                shared = 0
            memory.truncate(shared)
            return shared

    @property
    def conversations(self) -> Conversations | None:
        """Those that are kept; None without KV memory."""
        return self._conversations

    def _complete(self, times: PhaseTimes, total_s: float) -> None:
        """Make the phases those of total_s, since the request began."""
        if isinstance(self.memory, TieredMemory):
            times.store_s, times.checkpoint_s = self.memory.store_s, self.memory.checkpoint_s
        times.other_s = total_s - times.counted_s

    def _finish(self, report: MemoryReport) -> None:
        memory = self.memory
        if isinstance(memory, TieredMemory):
            report.device_bytes = memory.device_bytes
            report.host_bytes = memory.host.used
            report.checkpoints = memory.checkpoints.positions
            report.checkpoint_bytes = memory.checkpoints.n_bytes
            report.notes = list(memory.notes)

    def _read_plain(
        self, tokens: I32, report: MemoryReport, cancel: CancelToken | None
    ) -> Iterator[Event]:
        """Plain llama.cpp: batch by batch to the end."""
        memory = self.memory
        while memory.n_tokens < len(tokens):
            start = memory.n_tokens
            end = min(start + memory.context.n_batch, len(tokens))
            with report.times.measure("read_s", memory.clock):
                memory.decode(tokens[start:end], cancel=cancel)
            report.read_tokens += end - start
            yield PromptProgress(end, len(tokens))

    def _save_checkpoint(self) -> None:
        if isinstance(self.memory, TieredMemory):
            self.memory.save_checkpoint()

    # The steps on their own: for benches, and for callers with a policy of their own.

    def read(self, tokens: Sequence[int] | I32, *, cancel: CancelToken | None = None) -> None:
        """Append tokens to the history; it may grow far beyond the pool."""
        array = np.asarray(tokens, np.int32)
        with self._turn() as memory:
            if memory.n_tokens + len(array) > self._workspace_tokens:
                raise ContextLengthError(memory.n_tokens + len(array), self._workspace_tokens)
            if isinstance(memory, TieredMemory):
                memory.read(array, outputs="none", cancel=cancel)
            else:
                for start in range(0, len(array), memory.context.n_batch):
                    memory.decode(
                        array[start : start + memory.context.n_batch], outputs="none", cancel=cancel
                    )

    def truncate(self, n_tokens: int) -> None:
        """Forget the tokens from n_tokens on."""
        with self._turn() as memory:
            memory.truncate(n_tokens)

    def query(self, tokens: Sequence[int] | I32, content: Sequence[int]) -> Query:
        """Q of ``tokens`` at the indices ``content``, read after the history under what is
        resident; nothing is kept.
        """
        array = np.asarray(tokens, np.int32)
        with self._turn():
            memory = self.tiered
            memory.save_checkpoint()
            memory.begin_trial()
            try:
                return retrieve.read_query(memory, array, content, outputs="none")
            finally:
                memory.settle()

    def score(self, query: Query | None, scorer: str) -> Scores:
        """Score every stored block of the history."""
        with self._turn():
            return retrieve.score(self.tiered, query, scorer)

    def select(
        self, scores: Scores, *, budget_blocks: int | None = None, pins: Sequence[int] = ()
    ) -> I32:
        """The blocks to hold for these scores: int32, ascending."""
        with self._turn():
            memory = self.tiered
            return retrieve.choose(
                memory,
                scores,
                n_blocks=memory.working_set.n_blocks,
                budget_blocks=memory.budget_blocks if budget_blocks is None else budget_blocks,
                pins=pins,
            )

    def apply(self, selection: Sequence[int] | I32) -> MemoryReport:
        """Make exactly these blocks resident; the newest must be among them. Returns what moved."""
        report = MemoryReport()
        with self._turn():
            retrieve.apply(self.tiered, np.asarray(selection, np.int32), report)
        return report

    def logits(self, tokens: Sequence[int] | I32, n_last: int) -> NDArray[np.float32]:
        """Logits of the last n_last of ``tokens`` after the history under what is resident: f32
        [n_last, n_vocab].

        Nothing is kept. The tokens must fit in what is free of budget and reserve.
        """
        array = np.asarray(tokens, np.int32)
        with self._turn() as memory:
            self._save_checkpoint()
            model = self._vocab.model
            if isinstance(memory, PlainMemory) and (model.is_hybrid or model.is_recurrent):
                raise StateError(
                    "a recurrent state cannot be rewound: what is read stays in the history"
                )
            start = memory.n_tokens
            n_batch = memory.context.n_batch
            if isinstance(memory, TieredMemory):
                memory.begin_trial()
            rows: list[NDArray[np.float32]] = []
            try:
                for begin in range(0, len(array), n_batch):
                    batch = array[begin : begin + n_batch]
                    wanted = range(max(0, len(array) - n_last - begin), len(batch))
                    if isinstance(memory, TieredMemory):
                        memory.decode(batch, outputs=list(wanted), reply=True)
                    else:
                        memory.decode(batch, outputs=list(wanted))
                    rows += [memory.context.logits(i) for i in wanted]
            finally:
                memory.settle()  # first: a batch that was broken off may still be prepared
                memory.truncate(start)
        return np.stack(rows)
