"""`kvmem bench recall` without its command line: engines, prompts and records."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvmem.bench.conversations import read_conversations
from kvmem.bench.generators.catalogue import GENERATORS
from kvmem.bench.history import Answerer, EngineHistory, StockHistory
from kvmem.bench.longmemeval import read_longmemeval
from kvmem.bench.progress import Report, silent
from kvmem.bench.quality import CALIBRATED, POLICIES, Policy, Record, measure
from kvmem.bench.record import environment
from kvmem.bench.workload import Prompt, WorkloadSpec, make_prompts
from kvmem.config import EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.calibration import Calibration, Found, find
from kvmem.engine.engine import Engine
from kvmem.errors import ConfigError
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

ANSWER_TOKENS: Final = 512
"""Room for a question and its answer behind the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallSpec:
    """What is measured: `n_prompts` histories of `n_tokens`, the budget, and how to choose.

    calibration: as MemoryConfig has it; `policies` None: all, and the calibrated ones where there
    is a calibration. by_chunk: what is visible while the history is read, see EngineHistory.read.
    questions: a file in place of a generator: conversations (JSON lines), or LongMemEval's (.json).
    Those of at most n_tokens and more
    than half of it are asked.
    """

    model: Path
    generator: str = "harbor"
    n_tokens: int = 3072
    n_prompts: int = 8
    n_facts: int = 6
    n_lookalikes: int = 2
    n_paraphrased: int = 2
    first_seed: int = 0
    budget_tokens: int = 512
    block_tokens: int = 32
    recent_tokens: int | None = None
    kv_type: KvType = "q8_0"
    n_threads: int | None = None
    n_gpu_layers: int = 0
    policies: tuple[Policy, ...] | None = None
    calibration: str = "auto"
    by_chunk: bool = False
    questions: Path | None = None
    stock: bool = True
    shuffle: bool = False
    free: bool = False

    def __post_init__(self) -> None:
        if self.generator not in GENERATORS:
            raise ConfigError("generator", self.generator, f"one of {', '.join(GENERATORS)}")
        if self.n_prompts < 1:
            raise ConfigError("n_prompts", self.n_prompts, "at least 1")
        if self.budget_tokens >= self.n_tokens:
            rule = f"above budget_tokens={self.budget_tokens}"
            raise ConfigError("n_tokens", self.n_tokens, rule)
        if self.questions is None:
            self.workload()

    def workload(self) -> WorkloadSpec:
        """Raises ConfigError: no such history can be made."""
        return WorkloadSpec(
            n_tokens=self.n_tokens,
            n_facts=self.n_facts,
            n_lookalikes=self.n_lookalikes,
            n_paraphrased=self.n_paraphrased,
        )

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.n_prompts)

    def engine(self, *, tiered: bool, whole: bool = False) -> EngineConfig:
        """The tiered engine reads under the budget and can show the whole history in its reserve;
        the other one is plain llama.cpp with a full cache. whole: the budget holds everything."""
        room = self.n_tokens + ANSWER_TOKENS
        budget = room if whole else self.budget_tokens
        return EngineConfig(
            model=ModelConfig(
                path=self.model, n_gpu_layers=self.n_gpu_layers, n_threads=self.n_threads
            ),
            memory=MemoryConfig(
                enabled=tiered,
                workspace_tokens=room,
                budget_tokens=budget // self.block_tokens * self.block_tokens if tiered else None,
                reserve_tokens=-(-room // self.block_tokens) * self.block_tokens,
                block_tokens=self.block_tokens,
                recent_tokens=self.recent_tokens,
                type_k=self.kv_type,
                type_v=self.kv_type,
                calibration="off",  # all pairs are summarised; the bench picks from them
            ),
        )

    def find_calibration(self) -> Found:
        """The pairs that a server with these KV types would score with."""
        memory = MemoryConfig(
            type_k=self.kv_type, type_v=self.kv_type, calibration=self.calibration
        )
        return find(EngineConfig(model=ModelConfig(path=self.model), memory=memory))


def first_line(spec: RecallSpec, bench: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of a kept run: where and with what it ran, and the pairs that a star scores with."""
    picked, source = spec.find_calibration()
    # of a path the name is enough: a record may be shown to others
    source = re.sub(r"(?<=: )[^:]*/", "", source) if picked is None else Path(source).name
    return {
        **environment(spec.model, settings, bench),
        "calibration": {
            "source": source,
            "pairs": picked and picked.pairs,
            "slice_tokens": picked and picked.slice_tokens,
        },
    }


def read_questions(spec: RecallSpec, model: Model, vocab: Vocab) -> list[Prompt]:
    """The histories of the spec's length in its file, from `first_seed` on, as many as there are.

    Raises ConfigError: there is none.
    """
    path = spec.questions
    assert path is not None
    lengths = range(spec.n_tokens // 2 + 1, spec.n_tokens + 1)
    if path.suffix == ".json":
        every = read_longmemeval(path, vocab, lengths)
    else:
        every = read_conversations(path, model, vocab, lengths)
    found = list(islice(every, spec.seeds.stop))
    if not found:
        rule = f"a file with a history of {lengths.start} to {spec.n_tokens} tokens"
        raise ConfigError("questions", path, rule)
    if spec.first_seed >= len(found):
        rule = f"below {len(found)}, the histories of that length in {path}"
        raise ConfigError("first_seed", spec.first_seed, rule)
    return found[spec.first_seed :]


def run_recall(
    spec: RecallSpec,
    prompts: Sequence[Prompt] | None = None,
    *,
    report: Report = silent,
) -> Iterator[Record]:
    """Records of all questions, prompt by prompt. Loads the model twice; the weights are mapped.

    prompts: these, in place of those that the spec names.
    """
    calibration = spec.find_calibration().calibration
    policies = spec.policies
    if policies is None:
        policies = (*POLICIES, *CALIBRATED) if calibration else POLICIES
    with ExitStack() as opened:
        tiered = opened.enter_context(Engine(spec.engine(tiered=True)))
        open_stock: Callable[[Prompt], Answerer] | None = None
        if spec.stock:
            open_stock = _stock(spec, opened, is_hybrid=tiered.model.is_hybrid)
        yield from measure(
            _prompts(spec, tiered) if prompts is None else prompts,
            lambda prompt: _read(spec, tiered, prompt, calibration),
            open_stock,
            policies=policies,
            free=spec.free,
            report=report,
        )


def _read(
    spec: RecallSpec, engine: Engine, prompt: Prompt, calibration: Calibration | None
) -> EngineHistory:
    history = EngineHistory.read(
        engine, prompt.history, calibration=calibration, by_chunk=spec.by_chunk
    )
    if spec.shuffle:
        history.mix_up(prompt.seed)
    return history


def _stock(spec: RecallSpec, opened: ExitStack, *, is_hybrid: bool) -> Callable[[Prompt], Answerer]:
    """Plain llama.cpp. A recurrent state cannot be rewound there, so a hybrid has our memory with
    a budget that holds everything, which gives the same logits (tests/differential)."""
    if is_hybrid:
        whole = opened.enter_context(Engine(spec.engine(tiered=True, whole=True)))
        return lambda prompt: EngineHistory.read(whole, prompt.history)
    plain = opened.enter_context(Engine(spec.engine(tiered=False)))
    return lambda prompt: StockHistory(plain, prompt.history)


def _prompts(spec: RecallSpec, engine: Engine) -> list[Prompt]:
    if spec.questions is not None:
        return read_questions(spec, engine.model, engine.vocab)
    return make_prompts(GENERATORS[spec.generator](), engine.vocab, spec.workload(), spec.seeds)
