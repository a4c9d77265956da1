"""Saved runs, as records again: what `kvmem bench report` summarises."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvmem.bench.agent import AgentRecord
from kvmem.bench.quality import Record
from kvmem.bench.record import read_jsonl
from kvmem.bench.remote_speed import RemoteRecord
from kvmem.bench.speed import RequestRecord, SpeedRecord
from kvmem.errors import ConfigError

__all__ = ["SavedRun", "load_recall", "load_runs"]

R = TypeVar("R", SpeedRecord, RequestRecord, RemoteRecord, AgentRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """One file: where and with what it was run, and its records by type."""

    path: Path
    environment: dict[str, Any]
    speeds: tuple[SpeedRecord, ...]
    requests: tuple[RequestRecord, ...]
    remotes: tuple[RemoteRecord, ...]
    agents: tuple[AgentRecord, ...]
    n_others: int


def load_runs(folder: Path) -> list[SavedRun]:
    """Every .jsonl file of a folder, by name.

    Raises ConfigError for a folder without one, or a file that no bench has written.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ConfigError("folder", str(folder), "a folder with .jsonl files of `kvmem bench`")
    return [_load(path) for path in paths]


def load_recall(path: Path) -> list[tuple[str, Record]]:
    """Records of `kvmem bench quality` with the names of their cells; of `recall`, with "".

    Raises ConfigError: the file is something else.
    """
    known = {field.name for field in fields(Record)}
    found = []
    try:
        for line in read_jsonl(path):
            if "policy" not in line:
                continue
            # what was not a number is null in JSON, but for `free`, which may be unknown
            given: dict[str, Any] = {
                name: float("nan") if value is None and name != "free" else value
                for name, value in line.items()
                if name in known
            }
            found.append((str(line.get("cell", "")), Record(**given)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("file", path, f"one of kvmem bench quality or recall ({error})") from None
    return found


def _load(path: Path) -> SavedRun:
    try:
        first, *lines = read_jsonl(path)
        if not isinstance(first, dict) or not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no object")
        known = (SpeedRecord, RequestRecord, RemoteRecord, AgentRecord)
        names = [kind.__name__ for kind in known]
        return SavedRun(
            path=path,
            environment=first if first.get("record") == "environment" else {},
            speeds=_of(SpeedRecord, lines),
            requests=_of(RequestRecord, lines),
            remotes=_of(RemoteRecord, lines),
            agents=_of(AgentRecord, lines),
            n_others=sum(line.get("record") not in names for line in lines),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError("file", str(path), f"one that `kvmem bench --out` wrote ({error})") from (
            error
        )


def _of(kind: type[R], lines: Sequence[dict[str, Any]]) -> tuple[R, ...]:
    return tuple(
        kind(**{name: value for name, value in line.items() if name != "record"})
        for line in lines
        if line.get("record") == kind.__name__
    )
