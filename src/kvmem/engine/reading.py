"""How a prompt comes into the memory: what is chosen for its question, when, and at what cost.

docs/memory.md, "The life of a question", has the decisions in order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.conversation import MAX_KNOWN, Question, Window
from kvmem.engine.events import PromptProgress
from kvmem.engine.marks import Marks, find_marks
from kvmem.engine.memory import TieredMemory
from kvmem.engine.passage import Passage
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.retrieve import QueryTap
from kvmem.engine.room import room_beside_reply
from kvmem.engine.stats import Decision, MemoryReport
from kvmem.kv.query import Query
from kvmem.llama.context import CancelToken

__all__ = ["PromptReader"]

I32 = NDArray[np.int32]

# Tokens that stand for the question where none is marked: the end of the prompt.
FALLBACK_QUERY_TOKENS = 64

NO_STATE = "the host limit holds no state to go back to"


class _Said(NamedTuple):
    """What the report says of a choice after a first pass."""

    unchanged: tuple[Decision, str]
    replayed: str
    skipped: str


class PromptReader:
    """Reads prompts into one memory, whose conversation knows its newest question and window."""

    def __init__(self, memory: TieredMemory) -> None:
        self._memory = memory

    @property
    def _question(self) -> Question | None:
        return self._memory.active.question

    @property
    def _window(self) -> Window | None:
        return self._memory.active.window

    def read(
        self,
        prompt: Prompt,
        tokens: I32,
        shared: int,
        report: MemoryReport,
        cancel: CancelToken | None,
    ) -> Iterator[PromptProgress]:
        """Append what the memory does not hold of ``tokens``, and make visible what is chosen.

        shared: tokens that the history had in common with the prompt before it was cut back.
        """
        memory = self._memory
        if prompt.query_span is not None and len(prompt.query_span) == 0:
            prompt = replace(prompt, query_span=None, query_fallback="the question is empty")
        is_repeated = self._is_repeated(tokens, shared)
        marks = Marks()
        if memory.is_hybrid:
            marks = find_marks(prompt, shared=0 if is_repeated else shared)
            if prompt.query_span is not None:
                memory.checkpoints.asked = prompt.query_span.stop
        passage = Passage(memory, tokens, marks, report, cancel)
        report.scorer = memory.scorer
        report.scoring = str(memory.scoring)
        span = prompt.query_span if memory.query_policy == "user" else None
        is_short = memory.n_blocks_of(len(tokens)) <= memory.budget_blocks
        if memory.query_replay == "legacy" and memory.scorer != "recency":
            yield from self._read_twice(passage, prompt)
        elif is_short:
            yield from self._read_all(passage, self._may_ask(prompt))
        elif is_repeated:
            yield from self._keep_window(passage)
        elif memory.scorer == "recency":
            yield from passage.read_to(len(tokens))
            passage.decide("recency", "the scorer that was asked for")
        elif self._is_known(span, tokens, shared):
            yield from self._read_below_question(passage)
        elif span is not None and memory.n_tokens < span.stop <= passage.tail_start(0):
            yield from self._read_question_early(passage, self._may_ask(prompt))
        else:
            yield from self._read_twice(passage, prompt)
        resident = memory.working_set.resident()
        n_blocks = memory.working_set.n_blocks
        memory.active.window = Window(tokens, self._question, resident, n_blocks)
        report.n_blocks = n_blocks
        report.blocks = resident.tolist()

    # What is known

    def _is_known(self, span: Span | None, tokens: I32, shared: int) -> bool:
        """Whether the prompt continues below a question whose Q is at hand, word by word: that one
        is asked again.
        """
        memory = self._memory
        for question in memory.active.known:
            if (
                span == question.span
                and question.query.covers(memory.summaries.pairs)
                and question.span.stop <= shared
                and np.array_equal(question.prefix, tokens[: question.span.stop])
            ):
                memory.active.ask(question)
                return True
        return False

    def _is_repeated(self, tokens: I32, shared: int) -> bool:
        """Whether the newest prompt is asked again and can be shown the same blocks."""
        window, memory = self._window, self._memory
        if window is None or shared != len(tokens) - 1 or not np.array_equal(window.prompt, tokens):
            return False
        # what is read again must have been visible to its end
        first = max(0, memory.working_set.n_blocks - 1)
        return bool(np.isin(np.arange(first, memory.n_blocks_of(len(tokens))), window.blocks).all())

    def _is_window_whole(self) -> bool:
        """Whether all that was chosen for the newest question, or read since, is still visible."""
        window, working_set = self._window, self._memory.working_set
        if window is None or window.question is not self._question:
            return False
        wanted = window.blocks[window.blocks < working_set.n_blocks]
        since = np.arange(min(window.n_blocks, working_set.n_blocks), working_set.n_blocks)
        return bool(np.isin(np.concatenate([wanted, since]), working_set.resident()).all())

    def _may_ask(self, prompt: Prompt) -> tuple[Span, ...]:
        """The user messages whose Q is kept: the question, and those before it, which are the
        question once what stands behind them is taken back, as agents do with reminders.
        """
        question = prompt.query_span
        if question is None or self._memory.query_policy != "user":
            return ()
        before = [
            item.span
            for item in prompt.spans
            if item.role == "user" and len(item.span) and item.span.stop <= question.start
        ]
        return (*before[1 - MAX_KNOWN :], question)

    @contextmanager
    def _noting(self, passage: Passage, spans: Sequence[Span]) -> Iterator[None]:
        """Learn the Q of these messages where they are decoded inside, for what is asked below
        them. The last one is what is asked now.
        """
        n_tokens = self._memory.n_tokens
        unread = [span for span in spans if span.stop > n_tokens]
        if not unread or not self._memory.may_overflow:
            yield
            return
        contents = [range(max(span.start, n_tokens), span.stop) for span in unread]
        with QueryTap(self._memory, passage.tokens, *contents) as tap:
            try:
                yield
            finally:  # also after a cancel behind the question
                if tap.is_complete:
                    for query, rows, span in zip(tap.finish(), tap.rows, unread, strict=True):
                        start = max(span.start, n_tokens)
                        question = self._whole(query, rows, start, passage, span)
                        self._memory.active.ask(question)

    def _whole(self, query: Query, rows: I32, start: int, passage: Passage, span: Span) -> Question:
        """The question with the Q of all its tokens, where those from `start` on were read now.

        What stands before them was read with an earlier one, as where a reminder at its end was
        replaced. Where the Q of that is not at hand, its end asks alone.
        """
        memory = self._memory
        prefix = passage.tokens[: span.stop]
        for known in memory.active.known:
            if (
                known.span.start == span.start < start <= known.span.stop
                and known.query.covers(memory.summaries.pairs)
                and np.array_equal(known.prefix[:start], prefix[:start])
            ):
                query, rows = known.extend(query, rows, start)
                break
        return Question(query, rows, span, prefix.copy())

    # The decisions: each reads the prompt to its end. The first three choose nothing.

    def _read_all(self, passage: Passage, spans: Sequence[Span]) -> Iterator[PromptProgress]:
        passage.apply(np.arange(self._memory.working_set.n_blocks, dtype=np.int32))
        with self._noting(passage, spans):
            yield from passage.read_to(len(passage.tokens))
        passage.decide("all_resident", "the whole history fits in the budget")

    def _keep_window(self, passage: Passage) -> Iterator[PromptProgress]:
        assert self._window is not None
        blocks = self._window.blocks
        passage.apply(blocks[blocks < self._memory.working_set.n_blocks])
        yield from passage.read_to(len(passage.tokens), keep=True)
        passage.decide("keep_selected", "the prompt before, once more: its selection stands")

    def _read_below_question(self, passage: Passage) -> Iterator[PromptProgress]:
        """Below a question that was read before: its Q chooses before a token is read."""
        memory = self._memory
        assert self._question is not None
        n_since = memory.n_tokens - self._question.span.stop
        is_stale = n_since > memory.budget_blocks * memory.block_tokens
        has_room = passage.n_new <= room_beside_reply(memory)
        if not is_stale and has_room and self._is_window_whole():
            yield from passage.read_to(len(passage.tokens), keep=True)
            passage.decide("keep_selected", "the same question: its blocks are visible, with room")
            return
        tail = passage.tail_start(memory.n_tokens)
        yield from passage.read_to(tail)
        passage.apply(passage.choose(self._question.query, tail))
        if not is_stale:
            yield from passage.read_to(len(passage.tokens))
            passage.decide("cached_query", "new tokens below a question that was read before")
        else:
            yield from self._ask_with_end(passage, self._question.query, tail)

    def _ask_with_end(
        self, passage: Passage, question: Query, tail: int
    ) -> Iterator[PromptProgress]:
        """More than the budget was read since the question: what the end asks counts as well.

        The question alone does not know what a long chain of tools has come to. Its end is read
        again if it saw other blocks than both together choose; the tail stays visible.
        """
        memory = self._memory
        n_total = len(passage.tokens)
        start = max(tail, n_total - FALLBACK_QUERY_TOKENS)
        yield from passage.read_to(start)
        memory.save_checkpoint(is_needed=True)
        # what opens the reply asks nothing
        opening = passage.marks.opening
        stop = n_total if opening is None else max(start + 1, opening)
        with QueryTap(memory, passage.tokens, range(start, stop)) as tap:
            yield from passage.read_to(stop, phase="query_s", seal=False)
            query = question.join(tap.finish()[0])
        said = _Said(
            ("cached_query", "its end asked for nothing that the question had not"),
            f"query: the question and the last {n_total - start} tokens",
            NO_STATE,
        )
        yield from self._settle_on(passage, query, start, tail, said)

    def _read_question_early(
        self, passage: Passage, spans: Sequence[Span]
    ) -> Iterator[PromptProgress]:
        """The question stands before the part that would be read twice: once is enough."""
        tail = passage.tail_start(self._memory.n_tokens)
        with self._noting(passage, spans):
            yield from passage.read_to(tail)
        assert self._question is not None
        passage.apply(passage.choose(self._question.query, tail))
        yield from passage.read_to(len(passage.tokens))
        passage.decide("early_query", "the question was read on the way, before the part below it")

    def _read_twice(self, passage: Passage, prompt: Prompt) -> Iterator[PromptProgress]:
        """Read the question for its Q, choose, and read it again if it saw other blocks."""
        memory = self._memory
        n_total = len(passage.tokens)
        content, is_question, why = self._content(prompt)
        question = None
        begin = memory.n_tokens
        if prompt.query_span is not None:
            begin = max(begin, prompt.query_span.start)
            if memory.is_hybrid and passage.marks.question is not None:
                begin = max(memory.n_tokens, passage.marks.question)
        start = passage.tail_start(begin)
        with self._noting(passage, self._may_ask(prompt)[:-1]):
            yield from passage.read_to(min(start, content.start))
        with QueryTap(memory, passage.tokens, content) as tap:
            yield from passage.read_to(start)
            memory.save_checkpoint(is_needed=True)
            memory.begin_trial()  # half a question is no question: the next request reads it again
            memory.active.question = None
            try:
                is_legacy = memory.query_replay == "legacy"
                stop = n_total if is_legacy else passage.first_pass_end(content.stop)
                yield from passage.read_to(stop, phase="query_s", seal=False)
                query = tap.finish()[0]
                if is_question and prompt.query_span is not None:
                    question = self._whole(
                        query, tap.rows[0], content.start, passage, prompt.query_span
                    )
                    query = question.query
                seen = f"the first pass had seen the chosen blocks; query: {why}"
                said = _Said(
                    ("unchanged_selection", seen), f"query: {why}", f"{NO_STATE}; query: {why}"
                )
                yield from self._settle_on(passage, query, start, start, said)
            except BaseException:
                memory.settle()
                raise
            memory.end_trial()
        if question is not None:
            memory.active.ask(question)

    def _settle_on(
        self, passage: Passage, query: Query, start: int, keep_from: int, said: _Said
    ) -> Iterator[PromptProgress]:
        """Choose after a first pass from ``start`` on, and read that again if it saw other blocks.

        keep_from: as in Passage.choose; ``start`` keeps none.
        """
        memory = self._memory
        selection = passage.choose(query, start, keep_from=keep_from)
        is_seen = np.isin(selection, memory.working_set.resident()).all()
        if is_seen and memory.query_replay != "legacy":
            passage.decide(*said.unchanged)
        elif memory.can_return_to(start):
            memory.truncate(start)
            passage.apply(selection)
            yield from passage.read_to(len(passage.tokens), phase="replay_s")
            passage.decide("query_replay", said.replayed)
            return
        else:
            selection = passage.choose_for_reply(query, keep_from)
            passage.apply(selection)
            passage.decide("replay_skipped", said.skipped)
        yield from passage.read_rest(selection, start)

    def _content(self, prompt: Prompt) -> tuple[range, bool, str]:
        """The tokens that ask, whether they are the last user message, and why, for the report."""
        n_tokens, n_total = self._memory.n_tokens, len(prompt.tokens)
        span = prompt.query_span
        if span is not None and span.stop > n_tokens:
            start = max(span.start, n_tokens)
            if self._memory.query_policy == "legacy":
                return range(start, n_total), False, "all from the last user message on"
            return range(start, span.stop), True, "the last user message"
        why = prompt.query_fallback or "no question is marked"
        if span is not None:
            why = "the question is no longer in the part that is read"
        n = min(FALLBACK_QUERY_TOKENS, n_total - n_tokens)
        return range(n_total - n, n_total), False, f"the last {n} tokens ({why})"
