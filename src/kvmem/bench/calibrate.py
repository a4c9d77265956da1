"""`kvmem calibrate` without its command line: synthetic questions, read by the model itself.

Each history is read under a small budget, so K is as it is prefilled and Q as it is when a question
arrives: made while only the first and the newest blocks are visible.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvmem.bench import metrics
from kvmem.bench.asking import read_in_pieces
from kvmem.bench.conversations import read_conversations
from kvmem.bench.generators.catalogue import GENERATORS
from kvmem.bench.history import EngineHistory, position_scores
from kvmem.bench.pairs import Evidence, Picked, pick_pairs
from kvmem.bench.progress import Report, silent
from kvmem.bench.record import version
from kvmem.bench.twin import scored_slices
from kvmem.bench.workload import Prompt, WorkloadSpec, make_prompts
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.calibration import SLICE_TOKENS, Calibration, file_names, scoring
from kvmem.engine.engine import Engine
from kvmem.engine.fingerprint import fingerprint
from kvmem.errors import ConfigError
from kvmem.paths import cache_folder

__all__ = ["Calibrated", "CalibrationSpec", "calibrate", "discard", "store"]

EVIDENCE: Final = "rows centred, each pair divided by its sum, five paraphrased questions"
"""What is kept of a history; another text makes what was kept before useless."""
ROOM_TOKENS: Final = 512
"""Cells for a question behind the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """What is read. generator: others are left for tests. questions: conversations to use instead.

    model, memory: as the server will have them; sizes of the memory are replaced by these.
    """

    model: ModelConfig
    memory: MemoryConfig
    generator: str = "office"
    questions: Path | None = None
    n_tokens: int = 2048
    n_paraphrased: int = 5
    n_prompts: int = 8
    first_seed: int = 1000
    budget_tokens: int = 512
    block_tokens: int = 32

    def __post_init__(self) -> None:
        if self.n_prompts < 2:
            raise ConfigError("n_prompts", self.n_prompts, "at least 2: some are held out")
        if self.questions is not None:
            return
        if self.budget_tokens >= self.n_tokens:
            rule = f"above budget_tokens={self.budget_tokens}"
            raise ConfigError("n_tokens", self.n_tokens, rule)
        self.workload()

    def workload(self) -> WorkloadSpec:
        """Raises ConfigError: no such history can be made."""
        return WorkloadSpec(n_tokens=self.n_tokens, n_paraphrased=self.n_paraphrased)

    def engine(self) -> EngineConfig:
        """A small budget, no calibration: all pairs are summarised."""
        return EngineConfig(
            model=self.model,
            memory=replace(
                self.memory,
                enabled=True,
                workspace_tokens=None if self.questions else self.n_tokens + ROOM_TOKENS,
                budget_tokens=self.budget_tokens,
                reserve_tokens=ROOM_TOKENS,
                block_tokens=self.block_tokens,
                sink_tokens=0,
                recent_tokens=None,
                scorer="heads",
                calibration="off",
            ),
        )

    def key(self, model_print: str) -> str:
        """Names what was read so far of exactly this."""
        questions = self.questions.read_bytes() if self.questions else b""
        what = (
            EVIDENCE, model_print, self.memory.type_k, self.memory.type_v, self.generator,
            self.n_tokens, self.n_paraphrased, self.n_prompts, self.first_seed, self.budget_tokens,
            self.block_tokens, SLICE_TOKENS, version(),
        )  # fmt: skip
        return hashlib.sha256(repr(what).encode() + questions).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What came out. bytes_per_token: of the summaries, calibrated and not."""

    calibration: Calibration
    picked: Picked
    bytes_per_token: float
    bytes_per_token_whole: float

    @property
    def is_better(self) -> bool:
        """Whether the pairs find at least what all of them find together."""
        return self.picked.recall >= self.picked.recall_whole


def calibrate(spec: CalibrationSpec, *, report: Report = silent) -> Calibrated:
    """Read the histories, pick the pairs. What was read is kept until it is discarded: a second
    call after an interrupt goes on where the first one stopped.

    Raises ConfigError: the questions are too few; and what Engine raises.
    """
    model_print = fingerprint(spec.model.path)
    folder = _scratch(spec, model_print)
    with Engine(spec.engine()) as engine:
        layout = engine.tiered.layout
        pairs = layout.pairs()
        default = scoring(layout, None)
        questions = list(_read_all(spec, engine, folder, report))
        try:
            picked = pick_pairs(questions)
        except ValueError as error:
            raise ConfigError("questions", spec.questions, f"on two histories ({error})") from None
    chosen = [pairs[index] for index in picked.pairs]
    dims = [layout.layers[pair.layer].head_dim_k + 2 for pair in pairs]
    facts: dict[str, Any] = {
        "kvmem": version(),
        "model": spec.model.path.name,
        "read": str(spec.questions.name if spec.questions else spec.generator),
        "histories": picked.n_groups,
        "questions": picked.n_questions,
        "held_out_gold_recall": round(picked.recall, 4),
        "held_out_gold_recall_uncalibrated": round(picked.recall_whole, 4),
        "held_out_paraphrased": _number(picked.paraphrased),
        "held_out_paraphrased_uncalibrated": _number(picked.paraphrased_whole),
        "held_out_gold_recall_by_count": [round(value, 4) for value in picked.by_count],
        "pairs_in_all": len(pairs),
    }
    return Calibrated(
        calibration=Calibration(
            fingerprint=model_print,
            type_k=spec.memory.type_k,
            type_v=spec.memory.type_v,
            pairs=tuple((layout.layers[pair.layer].il, pair.kv_head) for pair in chosen),
            slice_tokens=SLICE_TOKENS,
            report=facts,
        ),
        picked=picked,
        bytes_per_token=sum(dims[index] for index in picked.pairs) / SLICE_TOKENS,
        bytes_per_token_whole=sum(
            dims[index] for index, pair in enumerate(pairs) if pair in default.pairs
        )
        / default.slice_tokens,
    )


def store(spec: CalibrationSpec, calibration: Calibration, path: Path | None = None) -> Path:
    """Write the file: to `path`, else beside the model, else to the cache. Returns where it is."""
    if path is None:
        beside, cached = file_names(spec.model.path, spec.memory, calibration.fingerprint)
        try:
            calibration.save(beside)
            path = beside
        except OSError:  # a model folder that cannot be written is usual
            calibration.save(cached)
            path = cached
    else:
        calibration.save(path)
    return path


def discard(spec: CalibrationSpec, calibration: Calibration) -> None:
    """Forget what was read: its outcome is stored, or not wanted. Not for one that could not be
    stored: the next run, with another file, then reads nothing again.
    """
    shutil.rmtree(_scratch(spec, calibration.fingerprint), ignore_errors=True)


def _number(value: float) -> float | None:
    """For JSON, which knows no NaN."""
    return None if math.isnan(value) else round(value, 4)


def _scratch(spec: CalibrationSpec, model_print: str) -> Path:
    return cache_folder() / "calibration" / f"{spec.key(model_print)}.part"


def _read_all(
    spec: CalibrationSpec, engine: Engine, folder: Path, report: Report
) -> Iterator[Evidence]:
    """Evidence of all questions; that of each history is kept as a file."""
    if spec.questions is None:
        seeds = range(spec.first_seed, spec.first_seed + spec.n_prompts)
        prompts = make_prompts(GENERATORS[spec.generator](), engine.vocab, spec.workload(), seeds)
    else:
        prompts = list(read_conversations(spec.questions, engine.model, engine.vocab))
    folder.mkdir(parents=True, exist_ok=True)
    ends = list(accumulate(map(_n_tokens, prompts), initial=0))
    for group, prompt in enumerate(prompts):
        report("tokens", ends[group], ends[-1])
        kept = folder / f"{group:04}.npz"
        found = _load(kept, group)
        if found is None:
            tell = partial(_tell, report, ends[group], ends[-1])
            found = list(_read(engine, prompt, group, tell))
            _save(kept, found)
        yield from found
    report("tokens", ends[-1], ends[-1])


def _n_tokens(prompt: Prompt) -> int:
    """What is read of a history and its questions."""
    return len(prompt.history) + sum(len(question.tokens) for question in prompt.questions)


def _tell(report: Report, before: int, total: int, n_read: int) -> None:
    report("tokens", before + n_read, total)


def _read(
    engine: Engine, prompt: Prompt, group: int, tell: Callable[[int], None]
) -> Iterator[Evidence]:
    """What every pair says of the slices of one history, for each of its questions.

    tell: called with the tokens that were read so far.
    """
    session = engine.session()
    piece = session.tiered.chunk_tokens  # so that nothing is read otherwise than in one go
    read_in_pieces(
        session, prompt.history, "", lambda what, done, total: tell(done), piece_tokens=piece
    )
    history = EngineHistory(engine, session)
    n_read = len(prompt.history)
    default = scoring(engine.tiered.layout, None)  # in the same slices
    fine = history.summaries(slice_tokens=SLICE_TOKENS)
    in_default = [pair in default.pairs for pair in fine.pairs]
    per_block = fine.slices_per_block
    for question in prompt.questions:
        tell(n_read)
        n_read += len(question.tokens)
        if not question.gold:
            continue
        newest = history.select(position_scores(history.n_blocks), question)
        history.restrict(newest)
        query = history.ask(question)
        fixed = history.fixed_blocks(question)
        free = np.setdiff1d(np.arange(fine.n_blocks), fixed)
        gold = np.unique(metrics.gold_tokens(question.gold) // SLICE_TOKENS)
        gold = gold[np.isin(gold // per_block, free)]
        if len(gold) == 0:
            continue
        scores = scored_slices(query, fine)
        yield Evidence(
            scores=_equal(scores),
            whole=scores[in_default].sum(axis=0).astype(np.float32),
            gold=gold,
            free=(free[:, None] * per_block + np.arange(per_block)).ravel(),
            n_free=max(1, len(newest) - len(fixed)),
            slices_per_block=per_block,
            group=group,
            shares_word=question.shares_word,
        )


def _equal(scores: NDArray[np.float64]) -> NDArray[np.float32]:
    """What each pair says, divided by its sum: as calibrated pairs score."""
    totals = scores.sum(axis=1, keepdims=True)
    return (scores / np.where(totals > 0, totals, 1)).astype(np.float32)


def _save(path: Path, questions: list[Evidence]) -> None:
    arrays: dict[str, Any] = {}
    for i, question in enumerate(questions):
        for name in ("scores", "whole", "gold", "free"):
            arrays[f"{name}{i}"] = getattr(question, name)
        arrays[f"counts{i}"] = np.array(
            [question.n_free, question.slices_per_block, question.shares_word]
        )
    part = path.with_suffix(".tmp.npz")
    np.savez_compressed(part, **arrays)
    part.replace(path)


def _load(path: Path, group: int) -> list[Evidence] | None:
    """What was kept of a history; None if nothing whole is there."""
    try:
        with np.load(path) as arrays:
            return [
                Evidence(
                    scores=arrays[f"scores{i}"],
                    whole=arrays[f"whole{i}"],
                    gold=arrays[f"gold{i}"],
                    free=arrays[f"free{i}"],
                    n_free=int(arrays[f"counts{i}"][0]),
                    slices_per_block=int(arrays[f"counts{i}"][1]),
                    group=group,
                    shares_word=bool(arrays[f"counts{i}"][2]),
                )
                for i in range(len(arrays.files) // 5)
            ]
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        return None
