"""`kvmem bench`: quality and speed on the user's own machine and model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from typer import Option

from kvmem.bench.agent import (
    TASKS,
    AgentRecord,
    AgentSpec,
    AgentSummary,
    AgentSystem,
    Task,
    run_agent,
    summarise_agent,
)
from kvmem.bench.client import run_remote
from kvmem.bench.plots import plot_agent, plot_speed
from kvmem.bench.progress import Report
from kvmem.bench.quality import POLICIES
from kvmem.bench.recall import RecallSpec, first_line, run_recall
from kvmem.bench.record import environment
from kvmem.bench.remote_speed import RemoteSpec, remote_rows, run_remote_speed
from kvmem.bench.report import (
    agent_table,
    experiment_table,
    gate_table,
    move_table,
    phase_table,
    recall_table,
    remote_table,
    request_table,
    round_table,
    speed_table,
    turn_table,
)
from kvmem.bench.saved import SavedRun, load_runs
from kvmem.bench.speed import RequestRecord, SpeedRecord, SpeedSpec, run_speed
from kvmem.bench.speed_summary import ratios, request_rows, speed_rows
from kvmem.bench.summary import GATED, TARGETS, Size, gates, summarise
from kvmem.bench.turns import summarise_turns
from kvmem.cli.bench_frame import machine, measure, show
from kvmem.cli.bench_options import (
    Batch,
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
    Ubatch,
    model_or_demo,
)
from kvmem.cli.quality import quality
from kvmem.cli.turns import turns
from kvmem.errors import ConfigError

bench = typer.Typer(help="Measure recall and speed.", rich_markup_mode=None)
bench.command()(quality)
bench.command()(turns)

Plots = Annotated[
    Path | None, Option(help="Draw the run to this file, as .png and as .svg (needs matplotlib).")
]
Url = Annotated[str | None, Option(help="Measure the server at this address instead of a model.")]
ApiKey = Annotated[str | None, Option(help="The server's key.")]


@bench.command()
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
    fields = {"rows": [asdict(row) for row in rows]}
    show(as_json, where, fields, None, recall_table(rows, title), gate_table(bars))
    return 1 if gate and not all(bar.passed for bar in bars) else 0


@bench.command()
def speed(
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    depth: Annotated[
        list[int] | None,
        Option(
            help="Tokens in the history, over the pool or within its budget; again for more, "
            "ascending."
        ),
    ] = None,
    pool: Annotated[
        int, Option("--pool-tokens", help="Cells of kvmem's pool, budget and reserve together.")
    ] = 1024,
    reserve: Annotated[
        int, Option("--kvmem-gen-reserve", help="Reserve of the pool; 0 for a quarter of it.")
    ] = 0,
    window: Annotated[
        int, Option("--window-tokens", help="Cells of the full window; 0 for those of the pool.")
    ] = 0,
    block: Block = 32,
    prefill: Annotated[int, Option(help="Tokens read in one measurement.")] = 512,
    decode: Annotated[int, Option(help="Tokens written in one measurement.")] = 32,
    repeats: Annotated[int, Option(help="Measured rounds, behind one that warms up.")] = 5,
    alone: Annotated[
        bool, Option("--alone", help="Load one system at a time, where three do not fit.")
    ] = False,
    cpu_time: Annotated[
        bool, Option("--cpu-time", help="Count CPU time, on a busy machine; with -t 1.")
    ] = False,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    kv_dtype: KvDtype = "q8_0",
    threads: Threads = 0,
    n_gpu_layers: Layers = 0,
    out: Out = None,
    plots: Plots = None,
    as_json: Json = False,
) -> None:
    """Measure prefill, decode and first tokens behind a long history: kvmem, stock, a window.

    With --url a server's: one cold request for each depth, then questions behind it.
    """
    depths = tuple(depth or (7168,))
    if url is not None:
        if model is not None or plots is not None:
            raise ConfigError("url", url, "given without --model and --plots")
        remote = RemoteSpec(
            depths=depths, question_tokens=prefill, reply_tokens=decode, repeats=repeats
        )
        _speed_of_server(remote, url, api_key, out, as_json=as_json)
        return
    spec = SpeedSpec(
        model=model_or_demo(model),
        depths=depths,
        pool_tokens=pool,
        reserve_tokens=reserve or None,
        window_tokens=window or None,
        block_tokens=block,
        prefill_tokens=prefill,
        decode_tokens=decode,
        repeats=repeats,
        batch_tokens=batch,
        ubatch_tokens=ubatch,
        kv_type=kv_dtype,
        n_threads=threads or None,
        n_gpu_layers=n_gpu_layers,
        alone=alone,
        cpu_time=cpu_time,
    )
    where = environment(spec.model, asdict(spec), "speed")
    records = measure(out, where, lambda report: run_speed(spec, report=report))
    speeds = [r for r in records if isinstance(r, SpeedRecord)]
    requests = [r for r in records if isinstance(r, RequestRecord)]
    if plots is not None:
        plot_speed(speeds, requests, plots, machine(where))
    title = f"{spec.model.name}, pool of {pool} cells, {repeats} rounds"
    fields = _speed_fields(speeds, requests)
    show(as_json, where, fields, title, *_speed_tables(speeds, requests))


def _speed_of_server(
    spec: RemoteSpec, url: str, api_key: str | None, out: Path | None, *, as_json: bool
) -> None:
    where = environment(None, {**asdict(spec), "url": url}, "speed")
    rows = remote_rows(
        measure(
            out,
            where,
            lambda report: run_remote_speed(spec, url, api_key=api_key, report=report),
        )
    )
    show(as_json, where, {"rows": [asdict(row) for row in rows]}, url, remote_table(rows))


@bench.command()
def agent(
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    task: Annotated[
        list[str] | None, Option(metavar="NAME", help="tools or chat; left out: both.")
    ] = None,
    stock: Annotated[bool, Option("--stock", help="Play them with plain llama.cpp too.")] = False,
    tokens: Annotated[int, Option(help="Length of the history at the end.")] = 6144,
    rounds: Annotated[int, Option(help="Requests of a task.")] = 8,
    reply: Annotated[int, Option(help="Tokens of a reply.")] = 32,
    budget: Budget = 768,
    reserve: Annotated[int, Option("--kvmem-gen-reserve", help="Cells kept for a reply.")] = 256,
    block: Block = 32,
    drafts: Annotated[
        int, Option("--spec-draft-n-max", help="Tokens that the model's MTP block drafts; 0: none.")
    ] = 0,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    kv_dtype: KvDtype = "q8_0",
    threads: Threads = 0,
    n_gpu_layers: Layers = 0,
    out: Out = None,
    plots: Plots = None,
    as_json: Json = False,
) -> None:
    """Play an agent's requests: a long tool task, and a long text with questions."""
    if wrong := set(task or ()) - set(TASKS):
        raise ConfigError("task", min(wrong), f"one of {', '.join(TASKS)}")
    if url is not None and (model is not None or stock):
        raise ConfigError("url", url, "given without --model and --stock: the server has its own")
    wanted: list[Task] = [name for name in TASKS if not task or name in task]
    path = None if url is not None else model_or_demo(model)
    base = AgentSpec(
        model=path,
        system="server" if path is None else "kvmem",
        n_tokens=tokens,
        rounds=rounds,
        reply_tokens=reply,
        budget_tokens=budget,
        reserve_tokens=reserve,
        block_tokens=block,
        batch_tokens=batch,
        ubatch_tokens=ubatch,
        kv_type=kv_dtype,
        n_drafts=drafts,
        n_threads=threads or None,
        n_gpu_layers=n_gpu_layers,
    )
    systems: list[AgentSystem] = ["server"] if path is None else ["kvmem"]
    if stock:
        systems.append("stock")
    settings = {**asdict(base), "task": wanted, "system": systems, "url": url}
    where = environment(path, settings, "agent")

    def play(report: Report) -> Iterator[AgentRecord]:
        for name, system in product(wanted, systems):
            spec = replace(base, task=name, system=system)
            if url is None:
                yield from run_agent(spec, report=report)
            else:
                yield from run_remote(spec, url, api_key=api_key, report=report)

    records = measure(out, where, play)
    if plots is not None:
        plot_agent(records, plots, machine(where))
    title = f"{url or (path and path.name)}, {tokens} tokens in {rounds} rounds"
    fields = {"rows": [_agent_fields(row) for row in summarise_agent(records)]}
    show(as_json, where, fields, title, *_agent_tables(records))


@bench.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with files that --out has written.")],
    plots: Annotated[bool, Option("--plots", help="Draw each run beside its file.")] = False,
    as_json: Json = False,
) -> None:
    """Summarise saved runs: speed, agent, recall, quality, and what bench/gpu has measured."""
    for run in load_runs(folder):
        title = f"{run.path.name}: {machine(run.environment)}"
        if plots and run.speeds:
            plot_speed(run.speeds, run.requests, run.path.with_suffix(""), title)
        if plots and run.agents:
            plot_agent(run.agents, run.path.with_suffix(""), title)
        show(
            as_json, {"file": run.path.name, **run.environment}, _fields(run), title, *_tables(run)
        )


def _fields(run: SavedRun) -> dict[str, Any]:
    cells = {cell: summarise(run.recalls_of(cell)) for cell in dict(run.recalls)}
    return {
        **_speed_fields(run.speeds, run.requests),
        "server": [asdict(row) for row in remote_rows(run.remotes)],
        "agent": [_agent_fields(row) for row in summarise_agent(run.agents)],
        "turns": [asdict(row) for row in summarise_turns(run.turns)] if run.turns else [],
        "recall": {cell: [asdict(row) for row in rows] for cell, rows in cells.items()},
        "experiments": list(run.experiments),
        "other_records": run.n_others,
    }


def _tables(run: SavedRun) -> Iterator[RenderableType]:
    if run.speeds:
        yield from _speed_tables(run.speeds, run.requests)
    if run.agents:
        yield from _agent_tables(run.agents)
    if run.remotes:
        yield remote_table(remote_rows(run.remotes))
    for cell in dict(run.recalls):
        yield recall_table(summarise(run.recalls_of(cell)), cell or None)
    if run.turns:
        yield turn_table(summarise_turns(run.turns), "a session, turn by turn")
    if run.experiments:
        yield experiment_table(run.experiments)
    if run.n_others:
        yield f"{run.n_others} records that another tool has written"
    yield ""  # a line between two runs


def _speed_fields(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord]
) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in speed_rows(speeds)],
        "ratios": [asdict(row) for row in ratios(speeds)],
        "requests": [asdict(row) for row in request_rows(requests)],
    }


def _agent_fields(summary: AgentSummary) -> dict[str, Any]:
    return {**asdict(summary), "overall_over_initial": summary.overall_over_initial}


def _speed_tables(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord]
) -> Iterator[Table]:
    yield speed_table(speed_rows(speeds), ratios(speeds))
    if requests:
        rows = request_rows(requests)
        yield request_table(rows)
        own = [row for row in rows if row.system == "kvmem"]
        for depth in dict.fromkeys(row.depth_tokens for row in own):
            yield phase_table([row for row in own if row.depth_tokens == depth])


def _agent_tables(records: Sequence[AgentRecord]) -> Iterator[Table]:
    yield agent_table(summarise_agent(records))
    told = [record for record in records if record.system == "kvmem" and record.phases]
    if told:
        yield round_table(told)
        yield move_table(told)
