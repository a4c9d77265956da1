"""Ways through kvmem that no setting has: for recall_heldout.py, to see what each is worth.

Each is a context; while it lasts, the engine of this process does it this way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from kvmem.engine import retrieve
from kvmem.engine.events import PromptProgress
from kvmem.engine.memory import TieredMemory
from kvmem.engine.passage import Passage
from kvmem.engine.prompt import Prompt
from kvmem.engine.reading import PromptReader
from kvmem.engine.retrieve import QueryTap
from kvmem.kv.query import Query
from kvmem.kv.scorers import Scores
from kvmem.kv.select import select

I32 = NDArray[np.int32]
Spans = Sequence[tuple[int, int]]
Path = AbstractContextManager[Any]

LAST_WORDS: Final = 12
"""Tokens: how a reply's sentence begins, up to what it is about to say."""

# What scores a block


@contextmanager
def told(gold: set[int]) -> Iterator[None]:
    """These blocks score above all others, and those beside them come next."""
    plain = retrieve.score
    beside = {block + step for block in gold for step in (-1, 1)} - gold

    def score(*args: Any, **others: Any) -> Scores:
        scores = plain(*args, **others)
        above = np.ptp(scores.blocks) + 1
        for blocks, lift in ((gold, 2 * above), (beside, above)):
            known = [block for block in blocks if 0 <= block < len(scores.blocks)]
            scores.blocks[known] += lift
            scores.edges[known] = 0  # they bring nobody before their like
        return scores

    with patch.object(retrieve, "score", score):
        yield


@contextmanager
def shuffled(seed: int = 0) -> Iterator[None]:
    """Every block has the score of another."""
    plain = retrieve.score
    rng = np.random.default_rng(seed)

    def score(*args: Any, **others: Any) -> Scores:
        scores = plain(*args, **others)
        scores.blocks[:] = rng.permutation(scores.blocks)
        return scores

    with patch.object(retrieve, "score", score):
        yield


@contextmanager
def watched() -> Iterator[list[Scores]]:
    """All scores, in the order in which they were asked for."""
    plain = retrieve.score
    seen: list[Scores] = []

    def score(*args: Any, **others: Any) -> Scores:
        seen.append(plain(*args, **others))
        return seen[-1]

    with patch.object(retrieve, "score", score):
        yield seen


# How a question is read


def _never_returns() -> Path:
    """What was read is not read again: the selection is for the reply alone."""

    def can_return_to(memory: TieredMemory, n_tokens: int) -> bool:
        return n_tokens in (0, memory.n_tokens)

    return patch.object(TieredMemory, "can_return_to", can_return_to)


def _question_alone() -> Path:
    """However far behind a question is: what came since asks nothing."""

    def read(
        reader: PromptReader, passage: Passage, question: Query, tail: int
    ) -> Iterator[PromptProgress]:
        yield from passage.read_to(len(passage.tokens))
        passage.decide("cached_query", "the question alone")

    return patch.object(PromptReader, "_ask_with_end", read)


def _end_too() -> Path:
    """However near a question is: the last tokens ask with it, at each request."""
    name = "_ask_with_end"
    ask_with_end: Callable[..., Iterator[PromptProgress]] = getattr(PromptReader, name)

    def read(reader: PromptReader, passage: Passage) -> Iterator[PromptProgress]:
        memory = passage.memory
        assert memory.active.question is not None
        query = memory.active.question.query
        tail = passage.tail_start(memory.n_tokens)
        yield from passage.read_to(tail)
        passage.apply(passage.choose(query, tail))
        yield from ask_with_end(reader, passage, query, tail)

    return patch.object(PromptReader, "_read_below_question", read)


def _never_kept() -> Path:
    """A known question chooses anew at each request, whether there is room or not."""
    return patch.object(PromptReader, "_is_window_whole", lambda _: False)


def _last_words(*, alone: bool) -> Path:
    """Below a known question the last words choose anew at each request, a reply's words too.

    alone: or the question asks with them.
    """

    def read(reader: PromptReader, passage: Passage) -> Iterator[PromptProgress]:
        memory, n_total = passage.memory, len(passage.tokens)
        question = memory.active.question
        assert question is not None
        start = max(memory.n_tokens, n_total - LAST_WORDS)
        yield from passage.read_to(start)
        memory.save_checkpoint(is_needed=True)
        with QueryTap(memory, passage.tokens, range(start, n_total)) as tap:
            yield from passage.read_to(n_total, phase="query_s", seal=False)
            query = tap.finish()[0]
        if not alone:
            query = question.query.join(query)
        asked = question.span.start
        n_asked = memory.n_blocks_of(n_total) - asked // memory.block_tokens
        fits = n_asked < memory.budget_blocks
        selection = passage.choose(query, start, keep_from=asked if fits else None)
        memory.truncate(start)
        passage.apply(selection)
        yield from passage.read_to(n_total, phase="replay_s")
        passage.decide("query_replay", "the last words")

    return patch.object(PromptReader, "_read_below_question", read)


def _opening_silent() -> Path:
    """What opens the reply asks nothing, where the last tokens ask, either."""
    name = "_content"
    plain: Callable[..., tuple[range, bool, str]] = getattr(PromptReader, name)

    def content(reader: PromptReader, prompt: Prompt) -> tuple[range, bool, str]:
        asked, is_question, why = plain(reader, prompt)
        stop = max(asked.start + 1, min(asked.stop, prompt.spans[-1].span.stop))
        return range(asked.start, stop), is_question, why

    return patch.object(PromptReader, name, content)


PATHS: Final[dict[str, tuple[Callable[[], Path], dict[str, str]]]] = {
    "as served": (nullcontext, {}),
    "legacy replay": (nullcontext, {"query_replay": "legacy"}),
    "legacy": (nullcontext, {"query_replay": "legacy", "query_policy": "legacy"}),
    "legacy replay, opening silent": (_opening_silent, {"query_replay": "legacy"}),
    "no replay": (_never_returns, {}),
    "question alone": (_question_alone, {}),
    "never kept": (_never_kept, {}),
    "end too": (_end_too, {}),
    "last words": (partial(_last_words, alone=True), {}),
    "last words too": (partial(_last_words, alone=False), {}),
}
"""By name, with the fields of MemoryConfig that belong to it."""


# Which blocks are taken


@dataclass(frozen=True, slots=True)
class Rule:
    """block, sink, recent: tokens; 0 and None for one block. choice: see choose_by."""

    block: int = 16
    sink: int = 0
    recent: int | None = None
    choice: str = "best"

    @property
    def name(self) -> str:
        """What is not usual, and the size of blocks."""
        parts = [f"units of {self.block}"]
        parts += [f"sink {self.sink}"] * (self.sink > 0)
        parts += [] if self.recent is None else [f"recent {self.recent}"]
        return ", ".join(parts + [self.choice] * (self.choice != "best"))


def choose_by(
    choice: str,
    scores: Scores,
    *,
    n_blocks: int,
    budget_blocks: int,
    block_tokens: int,
    pins: Sequence[int],
    sink_blocks: int,
    recent_blocks: int,
    messages: Sequence[range],
) -> I32:
    """retrieve.choose_blocks by another rule.

    choice: "best" is the product's. "messages": whole messages, by their best block. "spread:4": a
    fourth of the free blocks are spread evenly, the others are the best. messages: their blocks.
    """
    name, _, part = choice.partition(":")
    if name != "best":
        newest = range(max(0, n_blocks - max(1, recent_blocks)), n_blocks)
        n_fixed = len({*pins, *range(min(sink_blocks, n_blocks)), *newest})
        n_held = min(n_fixed, budget_blocks)
        fixed = select(np.zeros(n_blocks), n_blocks, n_held, pins, sink_blocks, recent_blocks)
    if name == "messages":
        values = np.full(n_blocks, -np.inf)
        values[: len(scores.blocks)] = scores.blocks[:n_blocks]
        order = whole_first(values, messages, fixed, budget_blocks)
        values[order] = np.arange(len(order), 0, -1)
        return select(values, n_blocks, budget_blocks, fixed, 0, 0)
    if name == "spread":
        n_even = (budget_blocks - len(fixed)) // int(part)
        even = spread(np.setdiff1d(np.arange(n_blocks), fixed), n_even)
        pins = [*pins, *even.tolist()]
    return retrieve.choose_blocks(
        scores,
        n_blocks=n_blocks,
        budget_blocks=budget_blocks,
        block_tokens=block_tokens,
        pins=pins,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
    )


@contextmanager
def choosing(choice: str, messages: Spans) -> Iterator[None]:
    """Blocks are chosen by this rule. messages: the tokens of each, as [start, stop)."""

    def choose(
        memory: TieredMemory,
        scores: Scores,
        *,
        n_blocks: int,
        budget_blocks: int,
        pins: Sequence[int] = (),
    ) -> I32:
        block = memory.block_tokens
        return choose_by(
            choice,
            scores,
            n_blocks=n_blocks,
            budget_blocks=budget_blocks,
            block_tokens=block,
            pins=pins,
            sink_blocks=memory.sizes.n_sink_blocks,
            recent_blocks=memory.sizes.n_recent_blocks,
            messages=[range(start // block, -(-stop // block)) for start, stop in messages],
        )

    with patch.object(retrieve, "choose", choose):
        yield


def spread(blocks: NDArray[Any], n: int) -> I32:
    """n of these blocks, evenly: the middle of each n-th part."""
    n = min(n, len(blocks))
    middles = ((np.arange(n) + 0.5) * len(blocks) / max(1, n)).astype(np.int64)
    chosen: I32 = blocks[middles].astype(np.int32)
    return chosen


def whole_first(
    values: NDArray[Any], messages: Sequence[range], fixed: NDArray[Any], budget_blocks: int
) -> list[int]:
    """Block ids, those to take first in front: whole messages while they fit, then single blocks.

    values: f32 [n_blocks], their scores. messages: the blocks of each; those without a block below
    n_blocks do not count. fixed: blocks that are in already.
    """
    n_blocks = len(values)
    inside = [[b for b in blocks if b < n_blocks] for blocks in messages]
    inside = sorted((b for b in inside if b), key=lambda blocks: -values[blocks].max())
    taken, order = set(fixed.tolist()), []
    for blocks in inside:
        new = [block for block in blocks if block not in taken]
        if len(taken) + len(new) <= budget_blocks:
            order += new
            taken |= set(new)
    return order + [int(block) for block in np.argsort(-values) if block not in taken]
