"""`kvmem bench speed`: kvmem beside plain llama.cpp, or a server, behind long histories."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from kvmem.bench.plots import plot_speed
from kvmem.bench.record import environment
from kvmem.bench.remote_speed import RemoteSpec, remote_rows, run_remote_speed
from kvmem.bench.report import phase_table, remote_table, request_table, speed_table
from kvmem.bench.speed import RequestRecord, SpeedRecord, SpeedSpec, run_speed
from kvmem.bench.speed_summary import ratios, request_rows, speed_rows
from kvmem.cli.bench_frame import machine, measure, show
from kvmem.cli.bench_options import (
    ApiKey,
    Batch,
    Block,
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

__all__ = ["speed", "speed_fields", "speed_tables"]


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
    fields = partial(speed_fields, speeds, requests)
    show(as_json, where, fields, title, speed_tables(speeds, requests))


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
    tables = (remote_table(rows),)
    show(as_json, where, lambda: {"rows": [asdict(row) for row in rows]}, url, tables)


def speed_fields(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord]
) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in speed_rows(speeds)],
        "ratios": [asdict(row) for row in ratios(speeds)],
        "requests": [asdict(row) for row in request_rows(requests)],
    }


def speed_tables(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord]
) -> Iterator[Table]:
    yield speed_table(speed_rows(speeds), ratios(speeds))
    if requests:
        rows = request_rows(requests)
        yield request_table(rows)
        own = [row for row in rows if row.system == "kvmem"]
        for depth in dict.fromkeys(row.depth_tokens for row in own):
            yield phase_table([row for row in own if row.depth_tokens == depth])
