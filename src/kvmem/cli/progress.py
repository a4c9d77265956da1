"""Progress on stderr: bars on a terminal, silence elsewhere."""

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
