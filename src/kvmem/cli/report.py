"""`kvmem bench report`: the tables of saved runs."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from typer import Option

from kvmem.bench.agent import summarise_agent
from kvmem.bench.plots import plot_agent, plot_speed
from kvmem.bench.remote_speed import remote_rows
from kvmem.bench.report import experiment_table, recall_table, remote_table, turn_table
from kvmem.bench.saved import SavedRun, load_run, run_files
from kvmem.bench.summary import summarise
from kvmem.bench.turns import summarise_turns
from kvmem.cli import faults, logs
from kvmem.cli.agent import agent_fields, agent_tables
from kvmem.cli.bench_frame import machine, show
from kvmem.cli.bench_options import Json
from kvmem.cli.speed import speed_fields, speed_tables
from kvmem.errors import ConfigError

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with files that --out has written.")],
    plots: Annotated[bool, Option("--plots", help="Draw each run beside its file.")] = False,
    as_json: Json = False,
) -> int:
    """Summarise saved runs: speed, agent, recall, quality, and what bench/gpu has measured."""
    code = 0
    for path in run_files(folder):
        try:
            run = load_run(path)
        except ConfigError as error:  # the others are shown all the same
            logs.complain(faults.describe(error, command="bench report")[0])
            code = faults.FAILED
            continue
        title = f"{run.path.name}: {machine(run.environment)}"
        if plots and run.speeds:
            plot_speed(run.speeds, run.requests, run.path.with_suffix(""), title)
        if plots and run.agents:
            plot_agent(run.agents, run.path.with_suffix(""), title)
        where = {"file": run.path.name, **run.environment}
        show(as_json, where, partial(_fields, run), title, _tables(run))
    return code


def _fields(run: SavedRun) -> dict[str, Any]:
    cells = {cell: summarise(run.recalls_of(cell)) for cell in dict(run.recalls)}
    return {
        **speed_fields(run.speeds, run.requests),
        "server": [asdict(row) for row in remote_rows(run.remotes)],
        "agent": [agent_fields(row) for row in summarise_agent(run.agents)],
        "turns": [asdict(row) for row in summarise_turns(run.turns)] if run.turns else [],
        "recall": {cell: [asdict(row) for row in rows] for cell, rows in cells.items()},
        "experiments": list(run.experiments),
        "other_records": run.n_others,
    }


def _tables(run: SavedRun) -> Iterator[RenderableType]:
    if run.speeds:
        yield from speed_tables(run.speeds, run.requests)
    if run.agents:
        yield from agent_tables(run.agents)
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
