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
from kvmem.bench.turns import TurnRecord
from kvmem.errors import ConfigError

__all__ = ["SavedRun", "load_recall", "load_run", "run_files"]

R = TypeVar("R", SpeedRecord, RequestRecord, RemoteRecord, AgentRecord, TurnRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """One file: where and with what it was run, and its records by type.

    recalls: with the names of their cells. experiments: lines of bench/gpu and bench/micro as they
    are.
    """

    path: Path
    environment: dict[str, Any]
    speeds: tuple[SpeedRecord, ...]
    requests: tuple[RequestRecord, ...]
    remotes: tuple[RemoteRecord, ...]
    agents: tuple[AgentRecord, ...]
    recalls: tuple[tuple[str, Record], ...]
    turns: tuple[TurnRecord, ...]
    experiments: tuple[dict[str, Any], ...]
    n_others: int

    def recalls_of(self, cell: str) -> list[Record]:
        """The records of one cell."""
        return [record for name, record in self.recalls if name == cell]


def run_files(folder: Path) -> list[Path]:
    """Every .jsonl file of a folder, by name. Raises ConfigError for a folder without one."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ConfigError("folder", str(folder), "a folder with .jsonl files of `kvmem bench`")
    return paths


def load_recall(path: Path) -> list[tuple[str, Record]]:
    """Records of `kvmem bench quality` with the names of their cells; of `recall`, with "".

    Raises ConfigError: the file is something else.
    """
    try:
        return [_recall(line) for line in read_jsonl(path) if "policy" in line]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            "kept_run", path, f"one of kvmem bench quality or recall ({error})"
        ) from None


def _recall(line: dict[str, Any]) -> tuple[str, Record]:
    known = {field.name for field in fields(Record)}
    # what was not a number is null in JSON, but for `free`, which may be unknown
    given: dict[str, Any] = {
        name: float("nan") if value is None and name != "free" else value
        for name, value in line.items()
        if name in known
    }
    return str(line.get("cell", "")), Record(**given)


def load_run(path: Path) -> SavedRun:
    """Raises ConfigError: no bench has written the file, or it cannot be read."""
    try:
        lines = read_jsonl(path)
        if not lines or not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no object" if lines else "it is empty")
        environment = lines.pop(0) if lines[0].get("record") == "environment" else {}
        speeds, requests = _of(SpeedRecord, lines), _of(RequestRecord, lines)
        remotes, agents = _of(RemoteRecord, lines), _of(AgentRecord, lines)
        recalls = tuple(_recall(line) for line in lines if {"policy", "kl_nats"} <= line.keys())
        turns = _of(TurnRecord, lines)
        experiments = tuple(_experiment(line) for line in lines if _is_experiment(line))
        known = (speeds, requests, remotes, agents, recalls, turns, experiments)
        return SavedRun(
            path=path,
            environment=environment,
            speeds=speeds,
            requests=requests,
            remotes=remotes,
            agents=agents,
            recalls=recalls,
            turns=turns,
            experiments=experiments,
            n_others=len(lines) - sum(map(len, known)),
        )
    except (OSError, ValueError, TypeError) as error:
        rule = f"one that `kvmem bench --out` wrote ({error})"
        raise ConfigError("kept_run", str(path), rule) from error


def _is_experiment(line: dict[str, Any]) -> bool:
    return "experiment" in line or line.get("record") == "drafts"


def _experiment(line: dict[str, Any]) -> dict[str, Any]:
    """A line of bench/gpu/drafts.py has once been a record of its own."""
    if "experiment" in line:
        return line
    return {"experiment": "drafts", **{key: line[key] for key in line if key != "record"}}


def _of(kind: type[R], lines: Sequence[dict[str, Any]]) -> tuple[R, ...]:
    # what was not a number is null in JSON
    unknown: Any = float("nan") if kind is TurnRecord else None
    return tuple(
        kind(
            **{
                name: unknown if value is None else value
                for name, value in line.items()
                if name != "record"
            }
        )
        for line in lines
        if line.get("record") == kind.__name__
    )
