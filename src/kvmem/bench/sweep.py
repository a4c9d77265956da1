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
from kvmem.bench.recall import RecallSpec, run_recall
from kvmem.errors import ConfigError

__all__ = ["DEFAULT_CELLS", "OF_A_CELL", "Cell", "parse_cell", "sweep"]

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


def sweep(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[str, list[Record]]]:
    """Records of each history with the name of its cell, as they are finished.

    jobs: processes, each with the threads of the cell's spec. 1 stays in this process.
    """
    tasks = [
        (cell.name, replace(cell.spec, first_seed=seed, n_prompts=1))
        for cell in cells
        for seed in cell.spec.seeds
    ]
    tasks.sort(key=lambda task: -task[1].n_tokens)  # the longest first: none is left alone at last
    if jobs == 1:
        for name, spec in tasks:
            yield name, _measure(spec)
        return
    # spawned: the native libraries of this process must not be forked
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_measure, spec): name for name, spec in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _measure(spec: RecallSpec) -> list[Record]:
    return list(run_recall(spec))
