"""`kvmem bench turns`: one session, many questions: what leaves, what comes back, what is moved.

A history is read, then its questions are asked in turn, all of them and again from the first, each
behind the questions and replies before it. So what one turn had in sight is out of sight when
another fact is asked for, and is wanted again later.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvmem.bench import metrics
from kvmem.bench.asking import ask
from kvmem.bench.details import clusters
from kvmem.bench.generators.catalogue import GENERATORS
from kvmem.bench.metrics import Interval, bootstrap
from kvmem.bench.progress import Report, silent
from kvmem.bench.workload import Prompt, Question, WorkloadSpec, frame_for, make_prompts
from kvmem.config import EngineConfig, KvType, MemoryConfig, ModelConfig, Scorer
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt as Request
from kvmem.engine.prompt import Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.session import Session
from kvmem.errors import ConfigError

__all__ = ["Play", "TurnRecord", "TurnRow", "TurnSpec", "run_turns", "summarise_turns"]

QUESTION_TOKENS: Final = 64
"""Room for a question with its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """What is played: `n_prompts` histories of `n_tokens`, `n_turns` questions behind each."""

    model: Path
    generator: str = "harbor"
    n_tokens: int = 3072
    n_prompts: int = 2
    n_turns: int = 16
    first_seed: int = 0
    budget_tokens: int = 512
    block_tokens: int = 32
    reply_tokens: int = 16
    kv_type: KvType = "q8_0"
    scorer: Scorer = "fused"
    calibration: str = "auto"
    n_threads: int | None = None
    n_gpu_layers: int = 0

    def __post_init__(self) -> None:
        if self.generator not in GENERATORS:
            raise ConfigError("generator", self.generator, f"one of {', '.join(GENERATORS)}")
        for name in ("n_prompts", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        if self.n_turns < 2:
            raise ConfigError("n_turns", self.n_turns, "at least 2")
        if self.budget_tokens >= self.n_tokens:
            raise ConfigError(
                "budget_tokens", self.budget_tokens, f"below n_tokens={self.n_tokens}"
            )
        WorkloadSpec(n_tokens=self.n_tokens)

    def engine(self) -> EngineConfig:
        """As a server has it."""
        turn = QUESTION_TOKENS + self.reply_tokens
        return EngineConfig(
            model=ModelConfig(
                path=self.model, n_gpu_layers=self.n_gpu_layers, n_threads=self.n_threads
            ),
            memory=MemoryConfig(
                workspace_tokens=self.n_tokens + self.n_turns * turn,
                budget_tokens=self.budget_tokens,
                reserve_tokens=max(128, self.block_tokens + turn),
                block_tokens=self.block_tokens,
                type_k=self.kv_type,
                type_v=self.kv_type,
                scorer=self.scorer,
                calibration=self.calibration,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn. What cannot be measured is NaN.

    is_repeated: the question was asked before in this session.
    blocks: visible to the reply's first token. new_blocks: those of them that were not visible when
    the turn before ended. returned_blocks: those of the new ones that an earlier turn had in sight.
    away: share of the evidence's tokens that were out of sight when the turn before ended.
    resurrected: share of those that came back; NaN if none were away.
    bytes_in, bytes_out: copied for the selection, to the device and from it.
    """

    generator: str
    seed: int
    turn: int
    kind: str
    shares_word: bool
    is_repeated: bool
    history_tokens: int
    decision: str
    blocks: int
    new_blocks: int
    returned_blocks: int
    gold_recall: float
    away: float
    resurrected: float
    bytes_in: int
    bytes_out: int
    replayed_tokens: int
    answered: bool

    @property
    def churn(self) -> float:
        """Share of the visible blocks that changed since the turn before."""
        return self.new_blocks / self.blocks


def run_turns(spec: TurnSpec, *, report: Report = silent) -> Iterator[TurnRecord]:
    """Play all sessions, one behind the other, in this process."""
    n_all = spec.n_prompts * spec.n_turns
    with Engine(spec.engine()) as engine:
        seeds = range(spec.first_seed, spec.first_seed + spec.n_prompts)
        workload = WorkloadSpec(n_tokens=spec.n_tokens)
        prompts = make_prompts(GENERATORS[spec.generator](), engine.vocab, workload, seeds)
        for number, prompt in enumerate(prompts):
            report("turns", number * spec.n_turns, n_all)
            session = engine.session()
            session.read(prompt.history)
            for record in Play(spec, engine, session, prompt).records():
                report("turns", number * spec.n_turns + record.turn + 1, n_all)
                yield record


class Play:
    """One session, whose history was read."""

    def __init__(self, spec: TurnSpec, engine: Engine, session: Session, prompt: Prompt) -> None:
        self._spec = spec
        self._vocab = engine.vocab
        self._session = session
        self._prompt = prompt
        self._said = list(prompt.history)
        self._closing = self._vocab.tokenize(frame_for(self._vocab).closed, parse_special=True)
        self._in_sight = self._resident()
        self._earlier: set[int] = set()

    def records(self) -> Iterator[TurnRecord]:
        """Those of all turns, as they are played."""
        questions = self._prompt.questions
        for turn in range(self._spec.n_turns):
            question = questions[turn % len(questions)]
            yield self.ask(turn, question, is_repeated=turn >= len(questions))

    def _resident(self) -> set[int]:
        return set(self._session.tiered.working_set.resident().tolist())

    def ask(self, turn: int, question: Question, *, is_repeated: bool) -> TurnRecord:
        """Ask behind all that was said so far, and let the reply stay."""
        start = len(self._said)
        self._said += question.tokens
        request = Request(
            tokens=tuple(self._said),
            query_span=Span(start + question.content.start, start + question.content.stop),
        )
        params = GenerateParams(
            sampling=SamplingParams(temperature=0.0), max_tokens=self._spec.reply_tokens
        )
        asked = ask(self._session, request, params)
        reply = list(asked.tokens)
        if reply and self._vocab.is_eog(reply[-1]):  # what closes a message begins with it
            del reply[-1]
        self._said += [*reply, *self._closing]

        memory = asked.stats.memory
        now = set(memory.blocks)
        new = now - self._in_sight
        block_tokens = self._spec.block_tokens
        gold = metrics.gold_tokens(question.gold) // block_tokens
        away = ~np.isin(gold, list(self._in_sight))
        back = np.isin(gold[away], list(now))
        record = TurnRecord(
            generator=self._prompt.generator,
            seed=self._prompt.seed,
            turn=turn,
            kind=question.kind,
            shares_word=question.shares_word,
            is_repeated=is_repeated,
            history_tokens=start,
            decision=memory.decision,
            blocks=len(now),
            new_blocks=len(new),
            returned_blocks=len(new & self._earlier),
            gold_recall=metrics.gold_recall(memory.blocks, question.gold, block_tokens),
            away=float(away.mean()),
            resurrected=float(back.mean()) if len(back) else float("nan"),
            bytes_in=memory.bytes_in,
            bytes_out=memory.bytes_out,
            replayed_tokens=memory.replayed_tokens,
            answered=metrics.states(
                self._vocab.detokenize(reply, special=False), question.value_text
            ),
        )
        self._earlier |= now
        self._in_sight = self._resident()
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """Some turns together. Intervals are 95 %, bootstrap over sessions.

    resurrected: over the n_away turns whose evidence was out of sight at least in part.
    returned: share of the new blocks that an earlier turn had in sight. bytes_in: the mean of a
    turn. answered: share of replies that state the value.
    """

    name: str
    n: int
    n_away: int
    gold_recall: Interval
    resurrected: Interval
    churn: Interval
    returned: float
    bytes_in: float
    answered: float


def summarise_turns(records: Sequence[TurnRecord]) -> list[TurnRow]:
    """All turns; the first time of each question, and the second; paraphrased questions."""
    parts: tuple[tuple[str, Callable[[TurnRecord], bool]], ...] = (
        ("all turns", lambda r: True),
        ("asked first", lambda r: not r.is_repeated),
        ("asked again", lambda r: r.is_repeated),
        ("paraphrased", lambda r: not r.shares_word),
    )
    chosen = [(name, [r for r in records if belongs(r)]) for name, belongs in parts]
    return [_row(name, part) for name, part in chosen if part]


def _row(name: str, records: Sequence[TurnRecord]) -> TurnRow:
    away = [r for r in records if r.away > 0]
    n_new = sum(r.new_blocks for r in records)
    return TurnRow(
        name=name,
        n=len(records),
        n_away=len(away),
        gold_recall=bootstrap([r.gold_recall for r in records], clusters(records)),
        resurrected=bootstrap([r.resurrected for r in away], clusters(away)),
        churn=bootstrap([r.churn for r in records], clusters(records)),
        returned=sum(r.returned_blocks for r in records) / n_new if n_new else 0.0,
        bytes_in=statistics.fmean(r.bytes_in for r in records),
        answered=statistics.fmean(r.answered for r in records),
    )
