"""`kvmem demo`: what kvmem does, on a small real model, in a few minutes."""

from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from kvmem.bench.demo import Asked, DemoSpec, Result, run_demo, strip
from kvmem.bench.record import environment, json_line
from kvmem.cli.bench_options import Model, Threads, model_or_demo
from kvmem.cli.progress import progress, table_console


def demo(
    model: Model = None,
    seed: Annotated[int, Option(help="Seed of the history.")] = 0,
    threads: Threads = 0,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Ask for six facts of a history that is six times as long as the device pool.

    Then the same with only the newest blocks, and with the full cache of plain llama.cpp.
    """
    path = model_or_demo(model)
    spec = DemoSpec(model=path, seed=seed, n_threads=threads or None)
    console = table_console(quiet=as_json)
    console.print(
        f"A history of {spec.n_tokens} tokens with six facts; {spec.budget_tokens} tokens of it "
        f"are visible at a time, in blocks of {spec.block_tokens}."
    )
    console.print(
        "Each character below is a block of the history: = always visible, + brought back,"
    )
    console.print("# brought back and holding the fact, ! missed, . kept on the host.\n")
    with progress() as report:
        results = list(
            run_demo(spec, report=report, on_asked=lambda *asked: _show(console, *asked))
        )
    console.print(_table(results))
    if as_json:
        fields = {**environment(path, asdict(spec)), "results": [asdict(r) for r in results]}
        print(json_line(fields))


def _show(console: Console, asked: Asked, n_blocks: int) -> None:
    console.print(Text(asked.question, style="bold"))
    console.print(Text(f"  {asked.answer}", style="green" if asked.right else "red"))
    if not asked.right:
        console.print(Text(f"  (the history says {asked.value})"))
    console.print(Text(f"  {strip(asked, n_blocks)}"))
    device = f"{asked.sight.device_bytes / 2**20:.1f} MiB of K and V on the device"
    console.print(Text(f"  {asked.decode_per_s:.0f} tokens/s, {device}\n"))


def _table(results: list[Result]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("what attention sees")
    for heading in ("right", "K and V on the device", "tokens/s", "history read in"):
        table.add_column(heading, justify="right")
    for result in results:
        rate = sum(asked.decode_per_s for asked in result.asked) / len(result.asked)
        table.add_row(
            result.name,
            f"{result.n_right} of {len(result.asked)}",
            f"{result.device_bytes / 2**20:.1f} MiB",
            f"{rate:.0f}",
            f"{result.read_s:.0f} s",
        )
    return table
