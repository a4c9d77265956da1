"""Progress on stderr (bars on a terminal, now and then a line elsewhere) and tables on stdout."""

import contextlib
import sys
from collections.abc import Iterator
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvmem.bench.progress import Report
from kvmem.cli import logs
from kvmem.cli.show import size

EVERY_S = 10.0
"""Between two lines of progress, and before the first, so that what is short stays silent."""

WIDE = 120
"""Columns of a table that goes to a file or a pipe."""


def table_console(*, quiet: bool = False) -> Console:
    """A console on stdout: as wide as the terminal, or wide enough where there is none. Brackets in
    a name are no markup.
    """
    width = None if sys.stdout.isatty() else WIDE
    return Console(highlight=False, markup=False, quiet=quiet, width=width)


@contextlib.contextmanager
def progress(*, unit_bytes: bool = False) -> Iterator[Report]:
    """A function that shows one bar for each thing that is reported to it; where there is no
    terminal it says how far that is.
    """
    if not sys.stderr.isatty():
        yield _lines(unit_bytes=unit_bytes)
        return
    amount: ProgressColumn = DownloadColumn() if unit_bytes else MofNCompleteColumn()
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    with bars:
        yield report


def _lines(*, unit_bytes: bool) -> Report:
    last = monotonic()
    show = size if unit_bytes else str

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if monotonic() - last >= EVERY_S:
            last = monotonic()
            logs.say(f"{what}: {show(done)} of {show(total)}")

    return report
