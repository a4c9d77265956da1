"""`kvmem demo` without its output: six facts in a long history, a question for each.

Each is asked three times: with kvmem's bounded working set, with the newest blocks of the same
stored history, and with the full cache of plain llama.cpp.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EngineHistory, position_scores
from kvmem.bench.metrics import gold_blocks, states
from kvmem.bench.workload import Prompt, Question, WorkloadSpec, make_prompt
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import prompt as engine_prompt
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats

__all__ = ["Asked", "DemoSpec", "Result", "run_demo", "strip"]

Report = Callable[[str, int, int], None]

ANSWER_TOKENS = 24
READ_TOKENS = 256
"""Tokens between two reports of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpec:
    """Sizes of the demo.

    n_tokens: length of the history; room_tokens: workspace behind it for a question and an answer.
    """

    model: Path
    seed: int = 0
    n_tokens: int = 3072
    budget_tokens: int = 512
    reserve_tokens: int = 128
    block_tokens: int = 32
    room_tokens: int = 256
    n_threads: int | None = None

    def engine(self, *, tiered: bool) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(path=self.model, n_gpu_layers=0, n_threads=self.n_threads),
            memory=MemoryConfig(
                enabled=tiered,
                workspace_tokens=self.n_tokens + self.room_tokens,
                budget_tokens=self.budget_tokens,
                reserve_tokens=self.reserve_tokens,
                block_tokens=self.block_tokens,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question and its answer. visible: the blocks that the answer could see."""

    question: str
    value: str
    answer: str
    right: bool
    visible: tuple[int, ...]
    gold: tuple[int, ...]
    decode_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way to hold the history. device_bytes: K and V on the device, at any time."""

    name: str
    n_blocks: int
    read_s: float
    device_bytes: int
    asked: tuple[Asked, ...]

    @property
    def n_right(self) -> int:
        return sum(asked.right for asked in self.asked)


def run_demo(
    spec: DemoSpec,
    *,
    report: Report = lambda what, done, total: None,
    on_asked: Callable[[Asked, int], None] = lambda asked, n_blocks: None,
) -> Iterator[Result]:
    """Results of kvmem, recency and the full cache. on_asked: each answer of kvmem as it comes."""
    with Engine(spec.engine(tiered=True)) as engine:
        workload = WorkloadSpec(n_tokens=spec.n_tokens, n_lookalikes=0, plain=True)
        prompt = make_prompt(Harbor(), engine.vocab, workload, spec.seed)
        session = engine.session()
        read_s = _read(session, prompt, "kvmem reads", report)
        memory = session.tiered
        n_blocks = memory.n_blocks_of(spec.n_tokens)
        asked = []
        for question in prompt.questions:
            text, stats = _generate(session, prompt, question)
            answered = _asked(question, text, stats.memory.blocks, stats.decode_per_s, spec)
            on_asked(answered, n_blocks)
            asked.append(answered)
        yield Result(
            name="kvmem",
            n_blocks=n_blocks,
            read_s=read_s,
            device_bytes=memory.device_bytes,
            asked=tuple(asked),
        )
        session.truncate(spec.n_tokens)
        history = EngineHistory(engine, session)
        yield Result(
            name="newest blocks",
            n_blocks=n_blocks,
            read_s=read_s,
            device_bytes=memory.device_bytes,
            asked=tuple(_ask_newest(history, question, spec) for question in prompt.questions),
        )
    with Engine(spec.engine(tiered=False)) as engine:
        session = engine.session()
        read_s = _read(session, prompt, "full cache reads", report)
        every = list(range(n_blocks))
        asked = []
        for question in prompt.questions:
            text, stats = _generate(session, prompt, question)
            asked.append(_asked(question, text, every, stats.decode_per_s, spec))
        yield Result(
            name="full cache",
            n_blocks=n_blocks,
            read_s=read_s,
            device_bytes=engine.facts.kv_bytes_per_token * engine.n_ctx,
            asked=tuple(asked),
        )


def strip(asked: Asked, n_blocks: int, n_sink: int = 1, n_newest: int = 4) -> str:
    """One character a block of the history.

    `.` on the host only, `=` always visible (the first and the newest), `+` brought back,
    `#` brought back and holding the fact, `!` holding the fact and missed.
    """
    blocks = np.full(n_blocks, ".")
    visible = [block for block in asked.visible if block < n_blocks]
    blocks[visible] = "+"
    blocks[:n_sink] = "="
    blocks[n_blocks - n_newest :] = "="
    for block in asked.gold:
        blocks[block] = "#" if block in asked.visible else "!"
    return "".join(blocks)


def _read(session: Session, prompt: Prompt, what: str, report: Report) -> float:
    started = perf_counter()
    total = len(prompt.history)
    for start in range(0, total, READ_TOKENS):
        session.read(prompt.history[start : start + READ_TOKENS])
        report(what, min(start + READ_TOKENS, total), total)
    return perf_counter() - started


def _generate(session: Session, prompt: Prompt, question: Question) -> tuple[str, RequestStats]:
    """What a server does with the question as the newest user message."""
    before = len(prompt.history)
    request = engine_prompt.Prompt(
        tokens=prompt.history + question.tokens,
        query_span=engine_prompt.Span(
            before + question.content.start, before + question.content.stop
        ),
    )
    pieces: list[bytes] = []
    stats = RequestStats()
    for event in session.generate(request, GenerateParams(max_tokens=ANSWER_TOKENS)):
        if isinstance(event, TokenEvent):
            pieces.append(event.piece)
        elif isinstance(event, Done):
            stats = event.stats
    return b"".join(pieces).decode(errors="replace"), stats


def _ask_newest(history: EngineHistory, question: Question, spec: DemoSpec) -> Asked:
    selection = history.select(position_scores(history.n_blocks), question)
    history.restrict(selection)
    reply = history.greedy(question.tokens, ANSWER_TOKENS)
    return _asked(question, reply.text, selection.tolist(), 1 / reply.step_s, spec)


def _asked(
    question: Question, text: str, visible: list[int], decode_per_s: float, spec: DemoSpec
) -> Asked:
    text = " ".join(text.split())
    return Asked(
        question=question.text,
        value=question.value_text,
        answer=text,
        right=states(text, question.value_text),
        visible=tuple(visible),
        gold=tuple(gold_blocks(question.gold, spec.block_tokens).tolist()),
        decode_per_s=decode_per_s,
    )
