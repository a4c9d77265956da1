"""`kvmem bench quality`: what is recalled, by kind and depth, and what each part is worth."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from kvmem.bench.details import by_depth, by_kind, compare
from kvmem.bench.quality import ABLATIONS, CALIBRATED, POLICIES, Policy, Record
from kvmem.bench.recall import RecallSpec, first_line
from kvmem.bench.record import json_line, record_file
from kvmem.bench.report import (
    cost_table,
    difference_table,
    gate_table,
    parity_line,
    part_table,
    recall_table,
)
from kvmem.bench.saved import load_recall
from kvmem.bench.summary import TARGETS, Size, gates, summarise
from kvmem.bench.sweep import DEFAULT_CELLS, OF_A_CELL, parse_cell, sweep, tasks_of
from kvmem.cli.bench_options import (
    Calibration,
    KvDtype,
    Layers,
    Shuffle,
    can_be_threads,
    can_be_written,
)
from kvmem.cli.progress import progress, table_console
from kvmem.config import KvType
from kvmem.errors import ConfigError

__all__ = ["quality"]

PAIRED = (
    ("fused* @first", "fused @first"),
    ("heads* @first", "heads @first"),
    ("fused* @first", "fused* alone @first"),
    ("heads* @first", "heads* alone @first"),
    ("fused @first", "fused alone @first"),
    ("heads @first", "heads alone @first"),
    ("heads* @first", "cosine @first"),
    ("fused* @first", "exact mass alone @ideal"),
    ("fused* @first", "full"),
    ("fused @first", "full"),
    ("gold", "full"),
    ("full", "stock"),
)
"""What is compared question by question, where both were measured."""


def quality(
    model: Annotated[Path | None, Option("-m", "--model", help="GGUF file.")] = None,
    cell: Annotated[
        list[str] | None,
        Option(
            metavar="GENERATOR:TOKENS:BUDGET:BLOCK:HISTORIES",
            help=f"What to measure; may be given several times. Left out: {DEFAULT_CELLS[0]} "
            f"and {DEFAULT_CELLS[1]}.",
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the first history of each cell.")] = 0,
    policy: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Only this policy (again for more), by its name in the table."),
    ] = None,
    questions: Annotated[
        Path | None,
        Option(help="Questions of your own: conversations (JSON lines) or LongMemEval (.json)."),
    ] = None,
    kv_dtype: KvDtype = "q8_0",
    recent: Annotated[
        int | None, Option("--kvmem-recent-tokens", help="Always visible newest part.")
    ] = None,
    calibration: Calibration = "auto",
    stock: Annotated[bool, Option("--stock/--no-stock", help="Also plain llama.cpp.")] = True,
    free: Annotated[bool, Option("--free", help="Also answer without a forced start.")] = False,
    shuffle: Shuffle = False,
    by_chunk: Annotated[
        bool,
        Option("--by-chunk", help="Read each chunk again over the blocks that it asks for."),
    ] = False,
    jobs: Annotated[int, Option(help="Histories at a time, a process each.")] = 1,
    threads: Annotated[
        int,
        Option("-t", "--threads", help="Threads of each; 0 for all.", callback=can_be_threads),
    ] = 0,
    n_gpu_layers: Layers = 0,
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            help="Write raw records here, as they are finished.",
            callback=can_be_written,
        ),
    ] = None,
    read: Annotated[
        Path | None, Option(help="Measure nothing: print the tables of this file.")
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Folder for plots (SVG): recall and KLE, depth and kind.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure recall in depth: kinds of questions, depth, paired differences, oracles."""
    if read is not None:
        found = load_recall(read)
    else:
        if model is None:
            raise ConfigError("model", "not given", "the path of a GGUF file")
        base = RecallSpec(
            model=model,
            kv_type=kv_dtype,
            recent_tokens=recent,
            first_seed=seed,
            calibration=calibration,
            questions=questions,
            n_threads=threads or None,
            n_gpu_layers=n_gpu_layers,
            policies=_policies(model, kv_dtype, calibration, policy or []),
            stock=stock,
            shuffle=shuffle,
            free=free,
            by_chunk=by_chunk,
        )
        cells = [parse_cell(text, base) for text in cell or DEFAULT_CELLS]
        tasks = tasks_of(cells)
        settings = {name: value for name, value in asdict(base).items() if name not in OF_A_CELL}
        where = first_line(base, "quality", {**settings, "cells": [cell.name for cell in cells]})
        found = []
        with progress() as report, record_file(out, where) as keep:
            report("histories", 0, len(tasks))
            for done, (name, records) in enumerate(sweep(tasks, jobs), 1):
                found += [(name, record) for record in records]
                keep(*({"cell": name, **asdict(record)} for record in records))
                report("histories", done, len(tasks))
    if as_json:
        print(json_line([{"cell": name, **asdict(record)} for name, record in found]))
    else:
        _show(table_console(), found)
    if plot is not None:
        from kvmem.bench.recall_plots import draw  # only here: matplotlib is an extra

        for path in draw(found, plot):
            print(path)


def _policies(
    model: Path, kv_dtype: KvType, calibration: str, names: list[str]
) -> tuple[Policy, ...]:
    """All that this model can be measured under, or those of these names."""
    picked = RecallSpec(model=model, kv_type=kv_dtype, calibration=calibration).find_calibration()
    every = (*POLICIES, *CALIBRATED, *ABLATIONS)
    known = [policy for policy in every if picked.calibration or not policy.picked]
    if not names:
        return tuple(known)
    by_name = {policy.name: policy for policy in known}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError("policy", unknown[0], f"one of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys([*names, "recency"]))


def _show(console: Console, found: list[tuple[str, Record]]) -> None:
    cells = dict.fromkeys(cell for cell, _ in found)
    for name in cells:
        records = [record for cell, record in found if cell == name]
        rows = summarise(records)
        console.print(recall_table(rows, name))
        console.print(cost_table(rows))
        console.print(parity_line(records), soft_wrap=True)
        measured = {record.policy for record in records}
        best = next(p for p in ("fused* @first", "fused @first", "recency") if p in measured)
        console.print(part_table([*by_kind(records, best), *by_depth(records, best)], best))
        pairs = [compare(records, a, b) for a, b in PAIRED if {a, b} <= measured]
        console.print(difference_table(pairs))
    for size in dict.fromkeys(map(Size.of, cells)):
        if size is not None and size in TARGETS:
            rows = summarise([record for cell, record in found if Size.of(cell) == size])
            console.print(recall_table(rows, f"all of {size}"))
            console.print(gate_table(gates(rows, size)))
