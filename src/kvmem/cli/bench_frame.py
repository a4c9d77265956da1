"""What the commands of `kvmem bench` have in common: records are kept as they come, then shown."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType

from kvmem.bench.progress import Report
from kvmem.bench.record import json_line, record_file
from kvmem.cli.progress import progress, table_console

__all__ = ["machine", "measure", "show"]

R = TypeVar("R")


def measure(
    out: Path | None, where: dict[str, Any], run: Callable[[Report], Iterable[R]]
) -> list[R]:
    """All records of a run; the file holds those that are there, should the rest never come."""
    found: list[R] = []
    with progress() as report, record_file(out, where) as keep:
        for record in run(report):
            keep(record)
            found.append(record)
    return found


def show(
    as_json: bool,
    where: dict[str, Any],
    fields: Callable[[], Mapping[str, object]],
    title: str | None,
    tables: Iterable[RenderableType],
) -> None:
    """The fields behind those of the run, as one object; or the tables. Only what is shown is
    worked out. title: None where a table has its own.
    """
    if as_json:
        print(json_line({**where, **fields()}))
        return
    console = table_console()
    if title is not None:
        console.print(title, style="bold", soft_wrap=True)
    for table in tables:
        console.print(table)


def machine(where: dict[str, Any]) -> str:
    """Model, processor and commit of a run, as far as they are known."""
    gpus = where.get("gpus")
    processors = gpus if gpus and isinstance(gpus, list) else [where.get("cpu")]
    commit = where.get("commit") and f"commit {where['commit']}"
    known = [str(item) for item in (where.get("model"), *processors, commit) if item]
    return ", ".join(known) or "machine and commit were not written down"
