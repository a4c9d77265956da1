"""`kvmem bench quality` without its command line: several cells, on several cores.

A cell is one kind of history at one length under one budget. Each history is a task of its own, so
that processes share them out and what is finished is kept when a run is stopped.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Final

from kvmem.bench.quality import Record
from kvmem.bench.recall import RecallSpec, read_questions, run_recall
from kvmem.bench.workload import Prompt
from kvmem.errors import ConfigError
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

__all__ = ["DEFAULT_CELLS", "OF_A_CELL", "Cell", "Task", "parse_cell", "sweep", "tasks_of"]

DEFAULT_CELLS: Final = ("harbor:3072:512:32:4", "agent:3072:512:32:4")


OF_A_CELL: Final = ("generator", "n_tokens", "budget_tokens", "block_tokens", "n_prompts")
"""Settings that each cell has for itself."""


@dataclass(frozen=True, slots=True)
class Cell:
    """name: as it was given, for tables and records."""

    name: str
    spec: RecallSpec


def parse_cell(text: str, base: RecallSpec) -> Cell:
    """`generator:tokens:budget:block:histories` on top of `base`. Raises ConfigError."""
    parts = text.split(":")
    rule = "generator:tokens:budget:block:histories, as in " + DEFAULT_CELLS[0]
    if len(parts) != 5:
        raise ConfigError("cell", text, rule)
    try:
        tokens, budget, block, prompts = (int(part) for part in parts[1:])
    except ValueError:
        raise ConfigError("cell", text, rule) from None
    return Cell(
        text,
        replace(
            base,
            generator=parts[0],
            n_tokens=tokens,
            budget_tokens=budget,
            block_tokens=block,
            n_prompts=prompts,
        ),
    )


@dataclass(frozen=True, slots=True)
class Task:
    """One history of a cell. prompt: of a file of questions; None for a generator's."""

    cell: str
    spec: RecallSpec
    prompt: Prompt | None = None


def tasks_of(cells: Sequence[Cell]) -> list[Task]:
    """All histories, the longest first: none is left alone at last.

    Files of questions are read here, once. Raises ConfigError: one has no history for a cell.
    """
    tasks = []
    for cell in cells:
        if cell.spec.questions is None:
            specs = [replace(cell.spec, first_seed=n, n_prompts=1) for n in cell.spec.seeds]
            tasks += [Task(cell.name, spec) for spec in specs]
        else:
            with Model(cell.spec.model, n_gpu_layers=0) as model:
                prompts = read_questions(cell.spec, model, Vocab(model))
            tasks += [Task(cell.name, cell.spec, prompt) for prompt in prompts]
    return sorted(tasks, key=lambda task: -task.spec.n_tokens)


def sweep(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[str, list[Record]]]:
    """Records of each history with the name of its cell, as they are finished.

    jobs: processes, each with the threads of the cell's spec. 1 stays in this process.
    """
    if jobs == 1:
        for task in tasks:
            yield task.cell, _measure(task)
        return
    # spawned: the native libraries of this process must not be forked
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_measure, task): task.cell for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _measure(task: Task) -> list[Record]:
    prompts = None if task.prompt is None else [task.prompt]
    return list(run_recall(task.spec, prompts))
