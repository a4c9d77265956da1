"""`kvmem bench agent`: a tool task and a chat, in this process or against a server."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Any

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
from kvmem.bench.plots import plot_agent
from kvmem.bench.progress import Report
from kvmem.bench.record import environment
from kvmem.bench.report import agent_table, move_table, round_table
from kvmem.cli.bench_frame import machine, measure, show
from kvmem.cli.bench_options import (
    ApiKey,
    Batch,
    Block,
    Budget,
    Json,
    KvDtype,
    Layers,
    Model,
    Out,
    Plots,
    Threads,
    Ubatch,
    Url,
    model_or_demo,
)
from kvmem.errors import ConfigError

__all__ = ["agent", "agent_fields", "agent_tables"]


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
    show(
        as_json,
        where,
        lambda: {"rows": [agent_fields(row) for row in summarise_agent(records)]},
        title,
        agent_tables(records),
    )


def agent_fields(summary: AgentSummary) -> dict[str, Any]:
    return {**asdict(summary), "overall_over_initial": summary.overall_over_initial}


def agent_tables(records: Sequence[AgentRecord]) -> Iterator[Table]:
    yield agent_table(summarise_agent(records))
    told = [record for record in records if record.system == "kvmem" and record.phases]
    if told:
        yield round_table(told)
        yield move_table(told)
