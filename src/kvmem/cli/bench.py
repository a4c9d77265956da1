"""`kvmem bench`: quality and speed on the user's own machine and model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from kvmem.bench import demo_model
from kvmem.bench.quality import POLICIES
from kvmem.bench.recall import RecallSpec, run_recall
from kvmem.bench.record import environment, json_line, write_jsonl
from kvmem.bench.report import gate_table, recall_table, speed_table
from kvmem.bench.speed import SpeedSpec, run_speed
from kvmem.bench.speed_summary import ratios, speed_rows
from kvmem.bench.summary import gates, summarise
from kvmem.cli.progress import progress, table_console
from kvmem.config import KvType
from kvmem.errors import ConfigError

bench = typer.Typer(help="Measure recall and speed.", rich_markup_mode=None)

Model = Annotated[
    Path | None, Option("-m", "--model", help="GGUF file. Left out: the demo model, fetched once.")
]
Threads = Annotated[int, Option("-t", "--threads", help="Threads; 0 for all cores.")]
Layers = Annotated[int, Option("-ngl", "--n-gpu-layers", help="Layers on the GPU; -1 for all.")]
Out = Annotated[
    Path | None, Option("-o", "--out", help="Write raw records to this file as JSON lines.")
]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


@bench.command()
def recall(
    model: Model = None,
    generator: Annotated[
        Literal["harbor", "office", "agent"],
        Option(help="Which text generator makes the histories."),
    ] = "harbor",
    tokens: Annotated[int, Option(help="Length of each history.")] = 3072,
    prompts: Annotated[int, Option(help="Histories; each has eight questions.")] = 8,
    seed: Annotated[int, Option(help="Seed of the first history.")] = 0,
    budget: Annotated[int, Option("--kvmem-budget", help="Tokens that are visible.")] = 512,
    block: Annotated[int, Option("--kvmem-block-tokens", help="Tokens of a block.")] = 32,
    kv_dtype: Annotated[KvType, Option("--kv-dtype", help="Type of K and V.")] = "q8_0",
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
    shuffle: Annotated[
        bool, Option("--shuffle", help="Control: mix up the blocks' scores; recall must be lost.")
    ] = False,
    gate: Annotated[
        bool, Option("--gate", help="Exit with 1 unless the bars of the default cell are met.")
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
    spec = RecallSpec(
        model=_model(model),
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
    where = environment(spec.model, asdict(spec))
    with progress() as report:
        records = list(run_recall(spec, report=report))
    rows = summarise(records)
    bars = gates(rows)
    if out is not None:
        write_jsonl(out, [where, *records])
    if as_json:
        print(json_line({**where, "rows": [asdict(r) for r in rows]}))
    else:
        title = (
            f"{spec.model.name}, {tokens} tokens x {prompts} ({generator}, seeds "
            f"{spec.seeds.start}..{spec.seeds.stop - 1}), budget {budget} in units of {block}"
            f"{', scores SHUFFLED' if shuffle else ''}"
        )
        console = table_console()
        console.print(recall_table(rows, title))
        console.print(gate_table(bars))
    return 1 if gate and not all(bar.passed for bar in bars) else 0


@bench.command()
def speed(
    model: Model = None,
    depth: Annotated[
        list[int] | None, Option(help="Tokens in the history; may be given several times.")
    ] = None,
    pool: Annotated[
        int, Option("--pool-tokens", help="Cells of kvmem's pool; a quarter of it is reserve.")
    ] = 1024,
    block: Annotated[int, Option("--kvmem-block-tokens", help="Tokens of a block.")] = 32,
    prefill: Annotated[int, Option(help="Tokens read in one measurement.")] = 512,
    decode: Annotated[int, Option(help="Tokens written in one measurement.")] = 32,
    repeats: Annotated[int, Option(help="Measured rounds, after one that is thrown away.")] = 5,
    kv_dtype: Annotated[KvType, Option("--kv-dtype", help="Type of K and V.")] = "q8_0",
    threads: Threads = 0,
    n_gpu_layers: Layers = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure prefill and decode behind a long history: kvmem, stock llama.cpp, a full window."""
    spec = SpeedSpec(
        model=_model(model),
        depths=tuple(depth or (7168,)),
        pool_tokens=pool,
        block_tokens=block,
        prefill_tokens=prefill,
        decode_tokens=decode,
        repeats=repeats,
        kv_type=kv_dtype,
        n_threads=threads or None,
        n_gpu_layers=n_gpu_layers,
    )
    where = environment(spec.model, asdict(spec))
    with progress() as report:
        records = list(run_speed(spec, report=report))
    rows, over = speed_rows(records), ratios(records)
    if out is not None:
        write_jsonl(out, [where, *records])
    if as_json:
        fields = {"rows": [asdict(r) for r in rows], "ratios": [asdict(r) for r in over]}
        print(json_line({**where, **fields}))
    else:
        title = f"{spec.model.name}, pool of {pool} cells, medians of {repeats} rounds"
        table_console().print(speed_table(rows, over, title))


def _model(path: Path | None) -> Path:
    """The given file, or the demo model."""
    if path is not None:
        return path
    with progress(unit_bytes=True) as report:
        return demo_model.fetch(report=report)
