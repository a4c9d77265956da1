"""`kvmem demo` without its output: six facts in a long history, a question for each.

Each is asked three times: with kvmem's bounded working set, with the newest blocks of the same
stored history, and with the full cache of plain llama.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmem.bench.asking import ask, read_in_pieces
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EngineHistory, position_scores
from kvmem.bench.metrics import gold_blocks, states
from kvmem.bench.progress import Report, silent
from kvmem.bench.workload import Prompt, Question, WorkloadSpec, make_prompt
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import prompt as engine_prompt
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.session import Session
from kvmem.engine.stats import RequestStats

__all__ = ["Asked", "DemoSpec", "Result", "Sight", "run_demo", "strip"]

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
                calibration="off",  # what a fresh machine shows, so that a seed gives one result
            ),
        )


@dataclass(frozen=True, slots=True)
class Sight:
    """What an answer could see: the visible blocks, and the bytes of K and V on the device.

    sink_stop, newest_start: blocks before and from there on are visible whatever is asked.
    """

    visible: tuple[int, ...]
    sink_stop: int
    newest_start: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question and its answer. gold: the blocks that state the fact."""

    question: str
    value: str
    answer: str
    right: bool
    gold: tuple[int, ...]
    sight: Sight
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
    report: Report = silent,
    on_asked: Callable[[Asked, int], None] = lambda asked, n_blocks: None,
) -> Iterator[Result]:
    """Results of kvmem, recency and the full cache. on_asked: each answer of kvmem as it comes."""
    with Engine(spec.engine(tiered=True)) as engine:
        workload = WorkloadSpec(n_tokens=spec.n_tokens, n_lookalikes=0, plain=True)
        prompt = make_prompt(Harbor(), engine.vocab, workload, spec.seed)
        session = engine.session()
        read_s = read_in_pieces(
            session, prompt.history, "kvmem reads", report, piece_tokens=READ_TOKENS
        )
        memory = session.tiered
        n_blocks = memory.n_blocks_of(spec.n_tokens)
        asked = []
        for question in prompt.questions:
            text, stats = _generate(session, prompt, question)
            sight = _sight(memory, spec, question, stats.memory.blocks)
            answered = _asked(question, text, sight, stats.decode_per_s, spec)
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
            asked=tuple(
                _ask_newest(history, memory, question, spec) for question in prompt.questions
            ),
        )
    with Engine(spec.engine(tiered=False)) as engine:
        session = engine.session()
        read_s = read_in_pieces(
            session, prompt.history, "full cache reads", report, piece_tokens=READ_TOKENS
        )
        device_bytes = engine.facts.kv_bytes_per_token * engine.n_ctx
        sight = Sight(tuple(range(n_blocks)), n_blocks, n_blocks, device_bytes)
        asked = []
        for question in prompt.questions:
            text, stats = _generate(session, prompt, question)
            asked.append(_asked(question, text, sight, stats.decode_per_s, spec))
        yield Result(
            name="full cache",
            n_blocks=n_blocks,
            read_s=read_s,
            device_bytes=device_bytes,
            asked=tuple(asked),
        )


def strip(asked: Asked, n_blocks: int) -> str:
    """One character a block of the history.

    `.` on the host only, `=` always visible (the first and the newest), `+` brought back,
    `#` brought back and holding the fact, `!` holding the fact and missed.
    """
    sight = asked.sight
    marks = ["."] * n_blocks
    for block in sight.visible:
        if block < n_blocks:
            marks[block] = "+" if sight.sink_stop <= block < sight.newest_start else "="
    for block in asked.gold:
        marks[block] = "#" if block in sight.visible else "!"
    return "".join(marks)


def _generate(session: Session, prompt: Prompt, question: Question) -> tuple[str, RequestStats]:
    """What a server does with the question as the newest user message."""
    before = len(prompt.history)
    request = engine_prompt.Prompt(
        tokens=prompt.history + question.tokens,
        query_span=engine_prompt.Span(
            before + question.content.start, before + question.content.stop
        ),
    )
    asked = ask(session, request, GenerateParams(max_tokens=ANSWER_TOKENS))
    return b"".join(asked.pieces).decode(errors="replace"), asked.stats


def _sight(
    memory: TieredMemory, spec: DemoSpec, question: Question, visible: Sequence[int]
) -> Sight:
    # The recent part is counted from the question's own first block, as a session counts it.
    n_blocks = memory.n_blocks_of(spec.n_tokens + question.content.start)
    return Sight(
        visible=tuple(visible),
        sink_stop=memory.sizes.n_sink_blocks,
        newest_start=n_blocks - memory.sizes.n_recent_blocks,
        device_bytes=memory.device_bytes,
    )


def _ask_newest(
    history: EngineHistory, memory: TieredMemory, question: Question, spec: DemoSpec
) -> Asked:
    selection = history.select(position_scores(history.n_blocks), question)
    history.restrict(selection)
    reply = history.greedy(question.tokens, ANSWER_TOKENS)
    sight = _sight(memory, spec, question, selection.tolist())
    return _asked(question, reply.text, sight, 1 / reply.step_s, spec)


def _asked(
    question: Question, text: str, sight: Sight, decode_per_s: float, spec: DemoSpec
) -> Asked:
    text = " ".join(text.split())
    return Asked(
        question=question.text,
        value=question.value_text,
        answer=text,
        right=states(text, question.value_text),
        gold=tuple(gold_blocks(question.gold, spec.block_tokens).tolist()),
        sight=sight,
        decode_per_s=decode_per_s,
    )
