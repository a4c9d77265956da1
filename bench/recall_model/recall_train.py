"""Train the recall model: one GPU, one schedule, a time limit.

    python bench/recall_model/recall_train.py OUT --seconds 300

OUT gets checkpoint.pt (`--resume` goes on from it), recall.gguf and train.jsonl, each time that a
checkpoint is due. Needs torch, tokenizers and gguf, which `pip install "kvmem[train]"` installs;
kvmem itself is not used.

What makes the model recall through attention: in most rows the DeltaNet states are emptied at
random places, and attention is never cut. A fact that is older than a few hundred tokens can then
only be had from K and V. Nothing is emptied when the model runs.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from recall_conversations import Kind
from recall_gguf import load, save
from recall_qwen35 import Qwen35, Shape
from recall_score import read_items, score
from recall_tokens import MODEL, Vocabulary, training_row
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WEIGHTS: Final[dict[Kind, float]] = {
    Kind.PLAIN: 0.5,
    Kind.ANSWER: 3.0,
    Kind.NO_RECORD: 5.0,
    Kind.VALUE: 10.0,
    Kind.NEWEST: 10.0,
    Kind.PLACE: 20.0,
    Kind.HOP_VALUE: 10.0,
}
"""What a token counts in the loss: most of a transcript is noise that cannot be foreseen."""

RESET_SHARE: Final = 0.7
RESET_TOKENS: Final = (128, 640)
"""Rows whose states are emptied, and the least and most tokens between two times."""

DRAFT_WEIGHT: Final = 0.3
LATER_DRAFT_WEIGHT: Final = 0.15
LATER_DRAFT_ROWS: Final = 8
"""One row in so many is drafted for deeper than one token."""

WARMUP_STEPS: Final = 150
CHECKPOINT_S: Final = 60.0
LOG_STEPS: Final = 50
QUICK_LIMIT: Final = 4
"""Conversations of each length that are asked while a run goes on."""
SEEDS_APART: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Part of a run. until: the share of the run at which it ends. lengths: tokens of a row to
    the share of batches. decays: the rate falls to nothing at its end."""

    until: float
    rate: float
    lengths: dict[int, float]
    draft_depth: int = 1
    decays: bool = False


SCHEDULE: Final = (
    Phase(until=0.15, rate=2e-3, lengths={512: 0.6, 1024: 0.4}),
    Phase(until=0.40, rate=2e-3, lengths={512: 0.15, 1024: 0.45, 2048: 0.4}),
    Phase(until=0.60, rate=1.5e-3, lengths={1024: 0.2, 2048: 0.35, 4096: 0.45}),
    # a little longer than 4,096, since questions there stand behind the whole history
    Phase(
        until=1.0,
        rate=1.2e-3,
        lengths={1024: 0.15, 2048: 0.3, 4608: 0.55},
        draft_depth=3,
        decays=True,
    ),
)


def phase_at(done: float) -> int:
    """The index of the phase when this share of a run is done."""
    return next(i for i, phase in enumerate(SCHEDULE) if done < phase.until or phase.until == 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, kinds: int64 [b, t]. resets: bool [b, t]."""

    tokens: Tensor
    kinds: Tensor
    resets: Tensor

    def to(self, device: str) -> "Batch":
        return Batch(
            self.tokens.to(device).long(), self.kinds.to(device).long(), self.resets.to(device)
        )


class Batches(IterableDataset[Batch]):
    """Endless batches of about batch_tokens, of the lengths of the phase that `phase` names."""

    def __init__(self, seed: int, batch_tokens: int, phase: "Synchronized[int]") -> None:
        self._seed = seed
        self._batch_tokens = batch_tokens
        self._phase = phase

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first = self._seed * 1000 + (worker.id if worker else 0)
        rng = np.random.default_rng(first)
        vocabulary = Vocabulary()
        tokenize = vocabulary.tokenizer()
        n_done = 0
        while True:
            lengths = SCHEDULE[self._phase.value].lengths
            n_tokens = int(rng.choice(list(lengths), p=list(lengths.values())))
            n_rows = max(1, self._batch_tokens // n_tokens)
            seeds = (first * SEEDS_APART + n_done + i for i in range(n_rows))
            rows = [training_row(seed, n_tokens, tokenize, vocabulary.lengths) for seed in seeds]
            n_done += n_rows
            yield Batch(
                torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int16)),
                torch.from_numpy(np.stack([row.kinds for row in rows]).astype(np.uint8)),
                torch.from_numpy(np.stack([draw_resets(n_tokens, rng) for _ in rows])),
            )


def draw_resets(n_tokens: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where the states of a row are emptied: bool [n_tokens]; nowhere in some rows."""
    resets = np.zeros(n_tokens, np.bool_)
    if rng.random() < RESET_SHARE:
        low, high = RESET_TOKENS
        places = np.cumsum(rng.integers(low, high, n_tokens // low + 1))
        resets[places[places < n_tokens]] = True
    return resets


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over the weights of the tokens, and the norm of the gradient before it was clipped."""

    trunk: Tensor
    draft: Tensor
    gradient: Tensor


class Trainer:
    """A model and its optimizer."""

    def __init__(self, model: Qwen35, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.device = device
        self._weights = torch.tensor([WEIGHTS[kind] for kind in Kind], device=device)
        matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        decayed = set(map(id, matrices))
        others = [p for p in model.parameters() if id(p) not in decayed]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=device != "cpu",
        )

    def step(self, batch: Batch, rate: float, draft_depth: int = 1) -> Losses:
        """Learn from one batch. rate: the learning rate. draft_depth: most tokens of a draft."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        model, tokens = self.model, batch.tokens
        weights = self._weights[batch.kinds]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            hidden = model(tokens, batch.resets)
            trunk = self._loss(hidden, tokens, weights, 0)
            draft = self._loss(model.drafts(tokens, hidden, 1)[0], tokens, weights, 1)
            total = trunk + DRAFT_WEIGHT * draft
            if draft_depth > 1:
                few = slice(max(1, len(tokens) // LATER_DRAFT_ROWS))
                later = model.drafts(tokens[few], hidden[few], draft_depth)[1:]
                for n, rows in enumerate(later, 2):
                    loss = self._loss(rows, tokens[few], weights[few], n)
                    total = total + LATER_DRAFT_WEIGHT * loss
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        gradient = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        return Losses(trunk.detach(), draft.detach(), gradient.detach())

    def _loss(self, rows: Tensor, tokens: Tensor, weights: Tensor, n_before: int) -> Tensor:
        """Of rows that are for the next token; the first n_before have nothing to go by."""
        logits = self.model.head(rows[:, n_before:-1]).float().flatten(0, 1)
        wanted, weights = tokens[:, n_before + 1 :], weights[:, n_before + 1 :].flatten()
        each = F.cross_entropy(logits, wanted.flatten(), reduction="none")
        return (each * weights).sum() / weights.sum()


class Run:
    """A run with its clock and its files."""

    def __init__(self, options: argparse.Namespace, trainer: Trainer) -> None:
        self._out: Path = options.out
        self._seconds: float = options.seconds
        self._steps: int | None = options.steps
        self._trainer = trainer
        self._started = time.perf_counter()
        self._saved_s = 0.0
        self.n_steps = 0
        self.n_tokens = 0
        self._out.mkdir(parents=True, exist_ok=True)
        if options.resume:
            state = torch.load(self._checkpoint, map_location=trainer.device, weights_only=True)
            trainer.model.load_state_dict(state["model"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            self.n_steps, self.n_tokens = state["n_steps"], state["n_tokens"]
            self._started -= state["seconds"]
            self._saved_s = state["seconds"]

    @property
    def _checkpoint(self) -> Path:
        return self._out / "checkpoint.pt"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def done(self) -> float:
        """Share of the run, by its time or its steps, whichever is further."""
        by_steps = self.n_steps / self._steps if self._steps else 0.0
        return max(self.seconds / self._seconds, by_steps)

    def rate(self, done: float) -> float:
        """The learning rate."""
        index = phase_at(done)
        phase, begin = SCHEDULE[index], SCHEDULE[index - 1].until if index else 0.0
        left = (phase.until - done) / (phase.until - begin) if phase.decays else 1.0
        return phase.rate * max(0.0, left) * min(1.0, (self.n_steps + 1) / WARMUP_STEPS)

    def log(self, **values: object) -> None:
        record = {"step": self.n_steps, "seconds": round(self.seconds, 1), **values}
        line = json.dumps({"tokens": self.n_tokens, **record})
        print(line, flush=True)
        with (self._out / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save(self, *, always: bool = False) -> None:
        """A checkpoint and a GGUF file, if it is time; a stop while writing leaves the old ones."""
        if not always and self.seconds - self._saved_s < CHECKPOINT_S:
            return
        trainer, self._saved_s = self._trainer, self.seconds
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "n_steps": self.n_steps,
            "n_tokens": self.n_tokens,
            "seconds": self._saved_s,
        }
        unfinished = self._out / "unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, self._checkpoint)
        save(trainer.model, unfinished, MODEL)
        os.replace(unfinished, self._out / "recall.gguf")

    def evaluate(self, limit: int) -> None:
        """Log the counts on heldout.jsonl, over the first `limit` conversations of each length."""
        if not limit:
            return
        tokenize, items = Vocabulary().tokenizer(), read_items()
        for size in sorted({item["target_tokens"] for item in items}):
            chosen = [item for item in items if item["target_tokens"] == size][:limit]
            found = score(self._trainer.model, chosen, tokenize, self._trainer.device)
            self.log(held_out=size, score=str(found))


def train(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    trainer = Trainer(load(options.start) if options.start else Qwen35(Shape()), device)
    run = Run(options, trainer)
    phase: Synchronized[int] = torch.multiprocessing.Value("i", phase_at(run.done))
    # past the seeds of what a resumed run has read
    batches = Batches(options.seed + run.n_steps, options.batch_tokens, phase)
    loader = DataLoader(batches, batch_size=None, num_workers=options.workers)
    waited, recent = 0.0, []
    supply = iter(loader)
    while (done := run.done) < 1:
        if phase.value != phase_at(done):
            phase.value = phase_at(done)
            run.log(phase=phase.value)
            run.evaluate(min(QUICK_LIMIT, options.evaluate))
        asked = time.perf_counter()
        batch = next(supply).to(device)
        waited += time.perf_counter() - asked
        rate = run.rate(done)
        recent.append(trainer.step(batch, rate, SCHEDULE[phase.value].draft_depth))
        run.n_steps += 1
        run.n_tokens += batch.tokens.numel()
        if len(recent) == LOG_STEPS or run.n_steps <= 2:
            means = {
                name: round(float(torch.stack([getattr(r, name) for r in recent]).mean()), 4)
                for name in ("trunk", "draft", "gradient")
            }
            recent = []
            run.log(rate=round(rate, 6), waited_s=round(waited, 1), **means)
            if not np.isfinite(means["trunk"]):
                raise SystemExit("the loss is not a number any more; the last checkpoint is kept")
        run.save()
    run.save(always=True)
    run.evaluate(options.evaluate)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the recall model.")
    parser.add_argument("out", type=Path, help="folder for checkpoint.pt, recall.gguf, train.jsonl")
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the run")
    parser.add_argument("--steps", type=int, help="end after so many steps, if that is earlier")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--evaluate", type=int, default=20, help="conversations of each length that are asked"
    )
    parser.add_argument("--start", type=Path, help="GGUF file to start from")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    return parser


def main() -> None:
    train(make_parser().parse_args())


if __name__ == "__main__":
    main()
