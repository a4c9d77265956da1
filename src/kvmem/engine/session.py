"""One history: what it shares with a request, what is read, what is brought back, and the reply."""

from collections.abc import Generator, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvmem.engine import retrieve
from kvmem.engine.decode import decode_reply
from kvmem.engine.events import Done, Event, PromptProgress
from kvmem.engine.memory import Memory, PlainMemory, TieredMemory
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.stats import Decision, MemoryReport, RequestStats
from kvmem.engine.turns import Turns
from kvmem.errors import Cancelled, ContextLengthError, RequestError, StateError
from kvmem.kv.query import Query
from kvmem.kv.scorers import Scores
from kvmem.llama.context import CancelToken
from kvmem.llama.sampler import Sampler
from kvmem.llama.vocab import Vocab

__all__ = ["Session"]

I32 = NDArray[np.int32]

# Tokens that stand for the question where none is marked: the end of the prompt.
FALLBACK_QUERY_TOKENS = 64


class Session:
    """The history that an engine holds.

    Made by Engine.session(); calls of several threads take turns.
    """

    def __init__(self, memory: Memory, vocab: Vocab, workspace_tokens: int, turns: Turns) -> None:
        self._memory = memory
        self._vocab = vocab
        self._turns = turns
        self._workspace_tokens = workspace_tokens
        self._query: Query | None = None  # of the newest question
        self._query_span: Span | None = None
        self._query_prefix: I32 = np.empty(
            0, np.int32
        )  # the tokens that it was read behind, up to its end
        # the newest prompt beyond the budget, and the blocks that its reply began with
        self._prompt: I32 = np.empty(0, np.int32)
        self._prompt_blocks: I32 = np.empty(0, np.int32)
        self._closed = False

    def close(self) -> None:
        """Forget the history. A second call does nothing."""
        if not self._closed:
            with self._turns.take():
                self._memory.truncate(0)
            self._closed = True

    @property
    def memory(self) -> Memory:
        if self._closed:
            raise StateError("the session is closed")
        return self._memory

    @property
    def tiered(self) -> TieredMemory:
        """The memory, where it is tiered. Raises StateError with --no-kvmem."""
        memory = self.memory
        if isinstance(memory, PlainMemory):
            raise StateError("KV memory is off")
        return memory

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
        return self._generate(prompt, tokens, params, cancel)

    def _generate(
        self, prompt: Prompt, tokens: I32, params: GenerateParams, cancel: CancelToken | None
    ) -> Generator[Event, None, None]:
        with self._turns.take(), Sampler(self._vocab.model, params.sampling.as_dict()) as sampler:
            started = perf_counter()
            memory = self.memory
            stats = RequestStats(prompt_tokens=len(tokens))
            first_token_s: float | None = None
            try:
                shared = min(_common_prefix(memory.tokens, tokens), len(tokens) - 1)
                memory.truncate(shared)
                stats.cached_tokens = stats.memory.reused_tokens = memory.n_tokens
                yield PromptProgress(memory.n_tokens, len(tokens))
                yield from self._read_prompt(prompt, tokens, shared, stats.memory, cancel)
                self._save_checkpoint()
                first_token_s = perf_counter() - started
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
            total_s = perf_counter() - started
            stats.prompt_s = total_s if first_token_s is None else first_token_s
            stats.decode_s = total_s - stats.prompt_s
            self._finish(stats.memory, total_s)
            yield Done(reason, stats)

    def _finish(self, report: MemoryReport, total_s: float) -> None:
        memory = self.memory
        times = report.times
        if isinstance(memory, TieredMemory):
            times.store_s, memory.store_s = memory.store_s, 0.0
            times.checkpoint_s, memory.checkpoint_s = memory.checkpoint_s, 0.0
            report.device_bytes = memory.device_bytes
            report.host_bytes = memory.host.used
        times.other_s = total_s - times.counted_s

    # What is decided before a token is read, and how: docs/memory.md, "The life of a question".

    def _read_prompt(
        self,
        prompt: Prompt,
        tokens: I32,
        shared: int,
        report: MemoryReport,
        cancel: CancelToken | None,
    ) -> Iterator[Event]:
        memory = self.memory
        n_total = len(tokens)
        if isinstance(memory, PlainMemory):
            yield from self._read_to(n_total, tokens, report, cancel)
            return
        is_repeated = self._is_repeated(tokens, shared)
        if memory.is_hybrid and memory.n_tokens < shared and not is_repeated:
            # agents change the end of a prompt again and again: next time there is a checkpoint
            # where this one leaves
            yield from self._read_to(shared, tokens, report, cancel)
            memory.save_checkpoint()
        report.scorer = memory.scorer
        n_blocks = memory.n_blocks_of(n_total)
        if n_blocks <= memory.budget_blocks:
            self._apply(np.arange(memory.working_set.n_blocks, dtype=np.int32), report)
            yield from self._read_to(n_total, tokens, report, cancel)
            self._decide(report, "all_resident", "the whole history fits in the budget")
        elif is_repeated:
            self._apply(self._known_blocks(), report)
            yield from self._read_to(n_total, tokens, report, cancel)
            self._decide(
                report, "unchanged_selection", "the prompt before, once more: its selection stands"
            )
        elif memory.scorer == "recency":
            yield from self._read_to(n_total, tokens, report, cancel)
            self._decide(report, "recency", "the scorer that was asked for")
        elif self._is_cached(prompt.query_span, tokens, memory.n_tokens):
            yield from self._read_by_cached_query(tokens, report, cancel)
        else:
            yield from self._read_by_first_pass(prompt, tokens, report, cancel)
        resident = memory.working_set.resident()
        self._prompt, self._prompt_blocks = tokens, resident
        report.n_blocks = memory.working_set.n_blocks
        report.blocks = resident.tolist()

    def _known_blocks(self) -> I32:
        """The blocks of the newest prompt that the history still has."""
        return self._prompt_blocks[self._prompt_blocks < self.tiered.working_set.n_blocks]

    def _is_repeated(self, tokens: I32, shared: int) -> bool:
        """Whether the newest prompt is asked again and can be shown the same blocks."""
        return (
            shared == len(tokens) - 1
            and np.array_equal(self._prompt, tokens)
            and self.tiered.working_set.n_blocks - 1 in self._known_blocks()
        )

    def _save_checkpoint(self) -> None:
        if isinstance(self.memory, TieredMemory):
            self.memory.save_checkpoint()

    def _is_cached(self, span: Span | None, tokens: I32, n_match: int) -> bool:
        """Whether the prompt continues below the question whose Q is at hand, word by word."""
        return (
            span is not None
            and span == self._query_span
            and span.stop <= n_match
            and np.array_equal(self._query_prefix, tokens[: span.stop])
        )

    def _read_by_cached_query(
        self, tokens: I32, report: MemoryReport, cancel: CancelToken | None
    ) -> Iterator[Event]:
        memory = self.tiered
        tail = self._tail_start(memory.n_tokens, len(tokens))
        yield from self._read_to(tail, tokens, report, cancel)
        selection = self._choose(self._query, tail, len(tokens), report)
        self._apply(selection, report)
        yield from self._read_to(len(tokens), tokens, report, cancel)
        self._decide(report, "cached_query", "new tokens below a question that was read before")

    def _read_by_first_pass(
        self, prompt: Prompt, tokens: I32, report: MemoryReport, cancel: CancelToken | None
    ) -> Iterator[Event]:
        memory = self.tiered
        n_total = len(tokens)
        span = prompt.query_span
        n_match = memory.n_tokens
        start = n_match if span is None else max(n_match, span.start)
        start = self._tail_start(start, n_total)
        yield from self._read_to(start, tokens, report, cancel)
        memory.save_checkpoint()

        content, why = _content_rows(span, start, n_total, prompt.query_fallback)
        seen_before = memory.working_set.resident()
        self._query, self._query_span = None, None
        try:
            with memory.phase(report.times, "query_s"):
                query = retrieve.read_query(memory, tokens[start:], content, cancel=cancel)
            report.read_tokens += n_total - start
            self._replay(tokens, start, query, why, report, cancel)
        except BaseException:
            # half a question is no question: the next request reads it again, from the same window
            memory.truncate(start)
            if memory.n_tokens == start > 0:
                memory.working_set.apply(seen_before)
            raise
        if span is not None:
            self._query, self._query_span, self._query_prefix = (
                query,
                span,
                tokens[: span.stop].copy(),
            )
        yield PromptProgress(n_total, n_total)

    def _replay(
        self,
        tokens: I32,
        start: int,
        query: Query,
        why: str,
        report: MemoryReport,
        cancel: CancelToken | None,
    ) -> None:
        """Choose for the part from `start` on; read it again if its first pass saw other blocks."""
        memory = self.tiered
        seen = memory.working_set.resident()
        selection = self._choose(query, start, len(tokens), report)
        if np.isin(selection, seen).all():
            memory.seal()
            self._decide(
                report,
                "unchanged_selection",
                f"the first pass had seen the chosen blocks; query: {why}",
            )
            return
        memory.truncate(start)
        self._apply(selection, report)
        with memory.phase(report.times, "replay_s"):
            memory.read(tokens[memory.n_tokens :], cancel=cancel)
        report.replayed_tokens += len(tokens) - start
        self._decide(report, "query_replay", f"query: {why}")

    def _tail_start(self, start: int, n_total: int) -> int:
        """Where the part begins that is read under the selection.

        Not before start, and at most half of the budget.
        """
        memory = self.tiered
        return max(start, n_total - max(1, memory.budget_blocks // 2) * memory.block_tokens)

    def _read_to(
        self, stop: int, tokens: I32, report: MemoryReport, cancel: CancelToken | None
    ) -> Iterator[Event]:
        """Read up to `stop`, one chunk at a time, reporting between them."""
        memory = self.memory
        while memory.n_tokens < stop:
            start = memory.n_tokens
            with memory.phase(report.times, "read_s"):
                if isinstance(memory, TieredMemory):
                    end = memory.chunk_end(start, stop)
                    memory.read(tokens[start:end], cancel=cancel)
                    memory.spread_checkpoint()
                else:
                    end = min(start + memory.context.n_batch, stop)
                    memory.decode(tokens[start:end], cancel=cancel)
            report.read_tokens += end - start
            yield PromptProgress(end, len(tokens))

    def _choose(self, query: Query | None, start: int, n_total: int, report: MemoryReport) -> I32:
        """Score, and choose for the history before `start`, leaving room for the tokens from there
        on.
        """
        memory = self.tiered
        n_blocks = memory.n_blocks_of(start)
        with memory.phase(report.times, "score_s"):
            return retrieve.choose(
                memory,
                retrieve.score(memory, query, memory.scorer),
                n_blocks=n_blocks,
                budget_blocks=memory.budget_blocks - (memory.n_blocks_of(n_total) - n_blocks),
            )

    def _apply(self, selection: I32, report: MemoryReport) -> None:
        memory = self.tiered
        if len(selection) == 0:
            return
        with memory.phase(report.times, "move_s"):
            memory.seal()
            transfer = memory.working_set.apply(selection)
        report.blocks_in += transfer.n_in
        report.blocks_out += transfer.n_out
        report.blocks_kept += transfer.n_kept
        report.blocks_moved += transfer.n_moved
        report.bytes_in += transfer.bytes_in
        report.bytes_out += transfer.bytes_out

    def _decide(self, report: MemoryReport, decision: Decision, reason: str) -> None:
        report.decision = decision
        report.reason = reason

    # The steps on their own: for benches, and for callers with a policy of their own.

    def read(self, tokens: Sequence[int] | I32, *, cancel: CancelToken | None = None) -> None:
        """Append tokens to the history; it may grow far beyond the pool."""
        array = np.asarray(tokens, np.int32)
        with self._turns.take():
            memory = self.memory
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
        with self._turns.take():
            self.memory.truncate(n_tokens)

    def query(self, tokens: Sequence[int] | I32, content: Sequence[int]) -> Query:
        """Q of ``tokens`` at the indices ``content``, read after the history under what is
        resident; nothing is kept.
        """
        array = np.asarray(tokens, np.int32)
        with self._turns.take():
            memory = self.tiered
            memory.save_checkpoint()
            start = memory.n_tokens
            resident = memory.working_set.resident()
            try:
                return retrieve.read_query(memory, array, content, outputs="none")
            finally:
                memory.truncate(start)
                if memory.n_tokens == start > 0:
                    memory.working_set.apply(resident)

    def score(self, query: Query | None, scorer: str) -> Scores:
        """Score every stored block of the history."""
        with self._turns.take():
            return retrieve.score(self.tiered, query, scorer)

    def select(
        self, scores: Scores, *, budget_blocks: int | None = None, pins: Sequence[int] = ()
    ) -> I32:
        """The blocks to hold for these scores: int32, ascending."""
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
        with self._turns.take():
            self._apply(np.asarray(selection, np.int32), report)
        return report

    def logits(self, tokens: Sequence[int] | I32, n_last: int) -> NDArray[np.float32]:
        """Logits of the last n_last of ``tokens`` after the history under what is resident: f32
        [n_last, n_vocab].

        Nothing is kept. The tokens must fit in what is free of budget and reserve.
        """
        array = np.asarray(tokens, np.int32)
        with self._turns.take():
            self._save_checkpoint()
            memory = self.memory
            model = self._vocab.model
            if isinstance(memory, PlainMemory) and (model.is_hybrid or model.is_recurrent):
                raise StateError(
                    "a recurrent state cannot be rewound: what is read stays in the history"
                )
            start = memory.n_tokens
            n_batch = memory.context.n_batch
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
                memory.truncate(start)
        return np.stack(rows)


def _common_prefix(first: I32, second: I32) -> int:
    n = min(len(first), len(second))
    differs = first[:n] != second[:n]
    return int(differs.argmax()) if differs.any() else n


def _content_rows(
    span: Span | None, start: int, n_total: int, fallback: str
) -> tuple[list[int], str]:
    """Indices, from `start` on, of the tokens that ask; and what they are, for the report."""
    if span is not None and span.stop > start:
        return list(
            range(max(span.start, start) - start, span.stop - start)
        ), "the last user message"
    n = min(FALLBACK_QUERY_TOKENS, n_total - start)
    why = fallback or (
        "the question is no longer in the part that is read"
        if span is not None
        else "no question is marked"
    )
    return list(range(n_total - start - n, n_total - start)), f"the last {n} tokens ({why})"
