"""Measure recall on many cores: one process a few histories, their records joined and summed up.

    python bench/quality_sweep.py -m MODEL -o OUT.jsonl --jobs 8 --threads 2 \
        --cell harbor:3072:512:32:17 --cell agent:3072:512:32:17

A cell is generator:tokens:budget:block:histories, with `:by-chunk` behind it to let each chunk of
the history see the blocks that it asks for while it is read, or `:shuffle` for the control.
What is finished stands in OUT.parts, a file a history, also when a sweep is stopped.
`--read FILE` prints the tables of records that were kept.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

from kvmem.bench.details import by_depth, by_kind, compare
from kvmem.bench.quality import ABLATIONS, CALIBRATED, POLICIES, Record
from kvmem.bench.recall import RecallSpec, run_recall
from kvmem.bench.record import environment, json_line
from kvmem.bench.report import interval, number, recall_table
from kvmem.bench.summary import summarise
from kvmem.cli.progress import table_console

NAMES = {field.name for field in fields(Record)}


def spec_of(options: argparse.Namespace, cell: str, seed: int, n: int) -> RecallSpec:
    generator, tokens, budget, block, _, *flags = cell.split(":")
    picked = RecallSpec(model=options.model).find_calibration().calibration
    every = (*POLICIES, *CALIBRATED, *ABLATIONS) if picked else (*POLICIES, *ABLATIONS[2:])
    wanted = options.policy or [policy.name for policy in every]
    if flags:  # an experiment or a control: what stands next to the product, and its scale
        wanted = ["fused* @first", "heads* @first", "cosine @first", "recency"]
    policies = tuple(policy for policy in every if policy.name in wanted)
    return RecallSpec(
        model=options.model,
        generator=generator,
        n_tokens=int(tokens),
        n_prompts=n,
        first_seed=seed,
        budget_tokens=int(budget),
        block_tokens=int(block),
        n_threads=options.threads,
        policies=policies,
        stock=not options.no_stock and not flags,
        free=options.free,
        shuffle="shuffle" in flags,
        by_chunk="by-chunk" in flags,
    )


def work(options: argparse.Namespace) -> None:
    """A child: some histories of one cell."""
    spec = spec_of(options, options.cell[0], options.seed, options.histories)
    with options.out.open("w") as file:
        for record in run_recall(spec):
            file.write(json_line({**asdict(record), "cell": options.cell[0]}) + "\n")


def sweep(options: argparse.Namespace) -> list[dict[str, object]]:
    """All cells, a process a history, the longest first."""
    options.cell += options.bare
    tasks = [(cell, seed) for cell in options.cell for seed in range(int(cell.split(":")[4]))]
    tasks.sort(key=lambda task: -int(task[0].split(":")[1]))
    folder = options.out.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:

        def run(task: tuple[str, int]) -> list[dict[str, object]]:
            cell, seed = task
            part = folder / f"{cell.replace(':', '-')}-{seed}.jsonl"
            done = subprocess.run(
                [
                    sys.executable, __file__, "-m", str(options.model), "-o", str(part),
                    "--threads", str(options.threads), "--cell", cell, "--seed", str(seed),
                    "--histories", "1", *(["--free"] if options.free else []),
                    *(["--no-stock"] if options.no_stock or cell in options.bare else []),
                    *(f"--policy={name}" for name in options.policy),
                ],
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                print(f"{cell} seed {seed} failed: {done.stderr[-2000:]}", file=sys.stderr)
                return []
            return [json.loads(line) for line in part.read_text().splitlines()]

        return [record for records in pool.map(run, tasks) for record in records]


def show(found: Sequence[dict[str, object]]) -> None:
    """Tables of each cell."""
    console = table_console()
    for cell in dict.fromkeys(str(record["cell"]) for record in found):
        records = [
            Record(**{k: (float("nan") if v is None and k != "free" else v) for k, v in r.items()
                      if k in NAMES})
            for r in found if r["cell"] == cell
        ]  # fmt: skip
        console.print(recall_table(summarise(records), cell))
        names = {record.policy for record in records}
        for policy in ("fused* @first", "heads* @first", "fused @first", "exact mass alone @ideal"):
            if policy in names:
                for part in (*by_kind(records, policy), *by_depth(records, policy)):
                    console.print(
                        f"  {policy}: {part.part:12} n={part.n:3} "
                        f"gold {interval(part.gold_recall)} whole {number(part.whole)} "
                        f"forced {number(part.forced)}"
                    )
        for first, second in (
            ("fused* @first", "fused @first"), ("heads* @first", "heads @first"),
            ("fused* @first", "fused* alone @first"), ("heads* @first", "heads* alone @first"),
            ("fused @first", "fused alone @first"), ("heads @first", "heads alone @first"),
            ("fused* @first", "cosine @first"), ("fused* @first", "full"),
            ("fused* @first", "exact mass alone @ideal"), ("fused* @first", "gold"),
        ):  # fmt: skip
            if {first, second} <= names:
                d = compare(records, first, second)
                console.print(
                    f"  {first} - {second}: n={d.n} gold {interval(d.gold_recall)} "
                    f"KL {interval(d.kl_nats)} forced {interval(d.forced)} p={d.p_forced:.3f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--cell", action="append", default=[])
    parser.add_argument("--bare", action="append", default=[], help="a cell, without stock")
    parser.add_argument("--policy", action="append", default=[], help="only these, by name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--read", type=Path, help="print the tables of this file or folder")
    parser.add_argument("--seed", type=int, help="of a child")
    parser.add_argument("--histories", type=int, help="of a child")
    options = parser.parse_args()
    if options.read is not None:
        files = sorted(options.read.iterdir()) if options.read.is_dir() else [options.read]
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        show([line for line in lines if "cell" in line])
    elif options.seed is not None:
        work(options)
    else:
        found = sweep(options)
        where = environment(options.model, {"cells": options.cell, "threads": options.threads})
        options.out.write_text("".join(json_line(line) + "\n" for line in [where, *found]))
        show(found)


if __name__ == "__main__":
    main()
