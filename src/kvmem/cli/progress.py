"""Progress on stderr (bars on a terminal, silence elsewhere) and tables on stdout."""

import contextlib
import sys
from collections.abc import Callable, Iterator

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

Report = Callable[[str, int, int], None]
"""Called with what is being done, units done, and units in all."""


WIDE = 120
"""Columns of a table that goes to a file or a pipe."""


def table_console(*, quiet: bool = False) -> Console:
    """A console on stdout: as wide as the terminal, or wide enough where there is none."""
    return Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else WIDE)


@contextlib.contextmanager
def progress(*, unit_bytes: bool = False) -> Iterator[Report]:
    """A function that shows one bar for each thing that is reported to it."""
    amount: ProgressColumn = DownloadColumn() if unit_bytes else MofNCompleteColumn()
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    with bars:
        yield report
