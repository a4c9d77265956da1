"""`kvmem bench recall`: does the right part of the history come back, and is the answer as good?

For each prompt the history is read once. For each question every policy chooses blocks; the
answer turn (question, forced start, value) is then decoded over exactly those blocks and compared
with full attention over the same stored K and V.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvmem.bench import metrics
from kvmem.bench.history import EXACT_MASS, Answerer, HistoryUnderTest, position_scores
from kvmem.bench.progress import Report, silent
from kvmem.bench.workload import Prompt, Question
from kvmem.kv.query import Query
from kvmem.kv.scorers import Scores

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
QueryKind = Literal["first", "ideal", "none"]

GOLD: Final = "gold"
FULL: Final = "full"
STOCK: Final = "stock"
FREE_TOKENS: Final = 24
"""Length of a free greedy answer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to choose blocks.

    query: `first` sees what is resident when the question arrives (sink and newest), as a server
    does; `ideal` sees the whole history, which no bounded pool can; `none` reads no query rows.
    picked: by the pairs of a calibration (a star in the name), else by all of them.
    neighbours: whether a block brings its neighbour along.
    """

    scorer: str
    query: QueryKind
    picked: bool = False
    neighbours: bool = True

    @property
    def name(self) -> str:
        how = self.scorer + "*" * self.picked + " alone" * (not self.neighbours)
        return how if self.query == "none" else f"{how} @{self.query}"


POLICIES: Final = (
    *(Policy(scorer, "first") for scorer in ("fused", "heads", "mass", "cosine")),
    *(Policy(scorer, "ideal") for scorer in ("fused", "heads", "mass", "cosine")),
    Policy("heads", "ideal", neighbours=False),
    Policy("lexical", "none"),
    Policy("recency", "none"),
)
"""All scorers; the references (gold, full, stock) are always measured beside them."""

CALIBRATED: Final = (
    *(Policy(scorer, "first", picked=True) for scorer in ("fused", "heads")),
    *(Policy(scorer, "ideal", picked=True) for scorer in ("fused", "heads")),
)
"""Measured beside them where the model has a calibration."""

ABLATIONS: Final = (
    *(Policy(s, "first", picked=True, neighbours=False) for s in ("fused", "heads")),
    *(Policy(s, "first", neighbours=False) for s in ("fused", "heads")),
    Policy(EXACT_MASS, "ideal", neighbours=False),
)
"""What a part of the method is worth, and the blocks with the largest exact attention mass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question under one policy. What cannot be measured is NaN.

    depth: where the evidence begins, 0 for the start of the history. parts: places of it.
    selected_blocks: blocks that were visible; gold_recall and gold_rank as in metrics; whole: all
    of the evidence was visible. new_blocks: that the first and newest ones do not hold.
    kl_nats, top1: the answer turn against full attention over the same K and V.
    forced: the value was on top at each step after the forced start; free: the value stands in a
    greedy answer without it, None when it was not tried.
    bytes_in: K and V of the new blocks. bytes_per_token: of what scored them, kept for each token
    of the history. session_recall: as gold_recall, of the sessions that the evidence stands in.
    twin_error: largest difference of a score from its NumPy twin's, as a part of it.
    """

    generator: str
    seed: int
    kind: str
    shares_word: bool
    depth: float
    parts: int
    policy: str
    selected_blocks: int
    new_blocks: int
    score_ms: float
    gold_recall: float
    whole: bool
    gold_rank: float
    kl_nats: float
    top1: float
    forced: bool
    free: bool | None
    bytes_in: float = math.nan
    bytes_per_token: float = math.nan
    session_recall: float = math.nan
    twin_error: float = math.nan


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Logits of the answer turn and, if asked for, the free answer."""

    logits: F32
    text: str | None


def measure(
    prompts: Sequence[Prompt],
    open_history: Callable[[Prompt], HistoryUnderTest],
    open_stock: Callable[[Prompt], Answerer] | None,
    *,
    policies: Sequence[Policy] = POLICIES,
    free: bool = False,
    report: Report = silent,
) -> Iterator[Record]:
    """Records of all questions under all policies and references, prompt by prompt."""
    n_questions = sum(bool(q.gold) for prompt in prompts for q in prompt.questions)
    done = 0
    for prompt in prompts:
        report("questions", done, n_questions)
        history = open_history(prompt)
        stock = open_stock(prompt) if open_stock else None
        asked = [question for question in prompt.questions if question.gold]  # the rest: never told
        for question in asked:
            bench = _QuestionBench(
                prompt, question, history, stock, free=free, check=question is asked[0]
            )
            yield from bench.records(policies)
            done += 1
            report("questions", done, n_questions)


class _QuestionBench:
    """All policies on one question."""

    def __init__(
        self,
        prompt: Prompt,
        question: Question,
        history: HistoryUnderTest,
        stock: Answerer | None,
        *,
        free: bool,
        check: bool,
    ) -> None:
        self._prompt = prompt
        self._question = question
        self._history = history
        self._stock = stock
        self._free = free
        self._check = check
        self._newest = np.empty(0, np.int32)

    def records(self, policies: Sequence[Policy]) -> Iterator[Record]:
        """The references first: all else is compared with full attention over the same K, V."""
        history = self._history
        queries = self._queries(policies)
        every = np.arange(history.n_blocks, dtype=np.int32)
        full = self._answer_under(None)
        yield self._record(FULL, every, full, full, scores=None)
        if self._stock is not None:
            stock = self._answer(self._stock)
            yield self._record(STOCK, every, stock, full, scores=None)
        gold = self._gold_selection()
        yield self._record(GOLD, gold, self._answer_under(gold), full, scores=None)
        for policy in policies:
            started = perf_counter()
            scores = history.score(queries[policy.query], policy.scorer, picked=policy.picked)
            score_ms = 1e3 * (perf_counter() - started)
            twin_error = math.nan
            if self._check and policy.scorer == "heads":
                asked = queries[policy.query]
                twin_error = history.twin_error(asked, scores, picked=policy.picked)
            if not policy.neighbours:
                scores = scores._replace(edges=np.zeros_like(scores.edges))
            selection = history.select(scores, self._question)
            outcome = self._answer_under(selection)
            record = self._record(policy.name, selection, outcome, full, scores=scores)
            yield replace(
                record,
                score_ms=score_ms,
                bytes_per_token=history.bytes_per_token(policy.scorer, picked=policy.picked),
                twin_error=twin_error,
            )

    def _queries(self, policies: Sequence[Policy]) -> dict[str, Query]:
        """The queries that the policies need. `none` still carries the question's token ids."""
        history = self._history
        newest = history.select(position_scores(history.n_blocks), self._question)
        history.restrict(newest)
        self._newest = newest
        first = history.ask(self._question)
        queries = {"first": first, "none": first}
        if any(policy.query == "ideal" for policy in policies):
            history.restrict(None)
            queries["ideal"] = history.ask(self._question)
        return queries

    def _gold_selection(self) -> I32:
        """The product's selection when the gold blocks score highest and then the newest."""
        history, question = self._history, self._question
        gold = metrics.gold_blocks(question.gold, history.block_tokens)
        return history.select(position_scores(history.n_blocks, first=gold), question)

    def _answer_under(self, selection: I32 | None) -> _Outcome:
        self._history.restrict(selection)
        return self._answer(self._history)

    def _answer(self, answerer: Answerer) -> _Outcome:
        question = self._question
        tokens = question.tokens + question.prefix + question.value
        n_rows = len(question.prefix) + len(question.value)
        # The last token predicts what comes after the value, so it is not decoded.
        logits = answerer.logits(tokens[:-1], n_rows)
        text = answerer.greedy(question.tokens, FREE_TOKENS).text if self._free else None
        return _Outcome(logits, text)

    def _record(
        self,
        policy: str,
        selection: I32,
        outcome: _Outcome,
        full: _Outcome,
        *,
        scores: Scores | None,
    ) -> Record:
        question, block_tokens = self._question, self._history.block_tokens
        rank = math.nan
        recall = metrics.gold_recall(selection, question.gold, block_tokens)
        if scores is not None:
            rank = metrics.gold_rank(scores.blocks, question.gold, block_tokens)
        sessions = math.nan
        if question.sessions:
            sessions = metrics.gold_recall(selection, question.sessions, block_tokens)
        n_new = int((~np.isin(selection, self._newest)).sum())
        found = None
        if outcome.text is not None:
            found = metrics.states(outcome.text, question.value_text)
        return Record(
            generator=self._prompt.generator,
            seed=self._prompt.seed,
            kind=question.kind,
            shares_word=question.shares_word,
            depth=question.gold[0].start / len(self._prompt.history),
            parts=len(question.gold),
            policy=policy,
            selected_blocks=len(selection),
            new_blocks=n_new,
            score_ms=math.nan,
            gold_recall=recall,
            whole=recall == 1.0,
            gold_rank=rank,
            kl_nats=metrics.kl_divergence(full.logits, outcome.logits),
            top1=metrics.top1_agreement(full.logits, outcome.logits),
            forced=metrics.says_value(outcome.logits, question.value),
            free=found,
            bytes_in=n_new * self._history.block_bytes,
            session_recall=sessions,
        )
