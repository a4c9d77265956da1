"""`kvmem bench recall`: which scorers bring the planted facts back, and how good answers are."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from kvmem.bench.quality import POLICIES
from kvmem.bench.recall import RecallSpec, first_line, run_recall
from kvmem.bench.report import gate_table, recall_table
from kvmem.bench.summary import GATED, TARGETS, Size, gates, summarise
from kvmem.cli.bench_frame import measure, show
from kvmem.cli.bench_options import (
    Block,
    Budget,
    Generator,
    Json,
    KvDtype,
    Layers,
    Model,
    Out,
    Seed,
    Shuffle,
    Threads,
    model_or_demo,
)
from kvmem.errors import ConfigError

__all__ = ["recall"]


def recall(
    model: Model = None,
    generator: Generator = "harbor",
    tokens: Annotated[int, Option(help="Length of each history.")] = 3072,
    prompts: Annotated[int, Option(help="Histories; each has eight questions.")] = 8,
    seed: Seed = 0,
    budget: Budget = 512,
    block: Block = 32,
    kv_dtype: KvDtype = "q8_0",
    scorer: Annotated[
        list[str] | None,
        Option(
            "--kvmem-scorer",
            metavar="NAME",
            help="Only this scorer (again for more), beside recency.",
        ),
    ] = None,
    free: Annotated[bool, Option("--free", help="Also answer freely, without a forced start.")] = (
        False
    ),
    shuffle: Shuffle = False,
    gate: Annotated[
        bool, Option("--gate", help="Exit with 1 unless the bars of this size are met.")
    ] = False,
    threads: Threads = 0,
    n_gpu_layers: Layers = 0,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Plant facts in long histories and measure what comes back, and how good the answers are."""
    known = {policy.scorer for policy in POLICIES}
    if wrong := set(scorer or ()) - known:
        raise ConfigError("scorer", min(wrong), f"one of {', '.join(sorted(known))}")
    wanted = {*scorer, "recency"} if scorer else known
    size = Size(tokens, budget, block)
    if gate and size not in TARGETS:
        rule = f"for a size that has bars: {'; '.join(map(str, TARGETS))}"
        raise ConfigError("gate", f"for {size}", rule)
    if gate and not wanted & GATED:
        rule = f"for one with a bar: {', '.join(sorted(GATED))}"
        raise ConfigError("gate", f"for {', '.join(sorted(wanted))}", rule)
    spec = RecallSpec(
        model=model_or_demo(model),
        generator=generator,
        n_tokens=tokens,
        n_prompts=prompts,
        first_seed=seed,
        budget_tokens=budget,
        block_tokens=block,
        kv_type=kv_dtype,
        n_threads=threads or None,
        n_gpu_layers=n_gpu_layers,
        policies=tuple(policy for policy in POLICIES if policy.scorer in wanted)
        if scorer
        else None,
        shuffle=shuffle,
        free=free,
    )
    where = first_line(spec, "recall", asdict(spec))
    rows = summarise(measure(out, where, lambda report: run_recall(spec, report=report)))
    bars = gates(rows, size)
    title = (
        f"{spec.model.name}, {tokens} tokens x {prompts} ({generator}, seeds "
        f"{spec.seeds.start}..{spec.seeds.stop - 1}), budget {budget} in units of {block}"
        f"{', index SHUFFLED' if shuffle else ''}"
    )
    tables = (recall_table(rows, title), gate_table(bars))
    show(as_json, where, lambda: {"rows": [asdict(row) for row in rows]}, None, tables)
    return 1 if gate and not all(bar.passed for bar in bars) else 0
