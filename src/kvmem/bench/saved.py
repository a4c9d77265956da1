"""Saved runs, as records again: what `kvmem bench report` summarises."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from kvmem.bench.agent import AgentRecord
from kvmem.bench.quality import Record
from kvmem.bench.record import json_line, read_jsonl
from kvmem.bench.remote_speed import RemoteRecord
from kvmem.bench.speed import RequestRecord, SpeedRecord
from kvmem.bench.turns import TurnRecord
from kvmem.errors import ConfigError

__all__ = ["SavedRun", "load_recall", "load_run", "run_files"]

R = TypeVar("R", SpeedRecord, RequestRecord, RemoteRecord, AgentRecord, TurnRecord, Record)

DIVISORS: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {
        SpeedRecord: ("n_tokens", "seconds"),
        RemoteRecord: ("first_token_s",),
        AgentRecord: ("prompt_s",),
        TurnRecord: ("blocks",),
    }
)
"""What is divided by, so that none of it may be 0."""


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
        return [
            _recall(number, line)
            for number, line in enumerate(read_jsonl(path), 1)
            if "policy" in line
        ]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            "kept_run", path, f"one of kvmem bench quality or recall ({error})"
        ) from None


def _recall(number: int, line: dict[str, Any]) -> tuple[str, Record]:
    known = get_type_hints(Record)
    given = {name: value for name, value in line.items() if name in known}
    return str(line.get("cell", "")), _filled(Record, number, given)


def load_run(path: Path) -> SavedRun:
    """Raises ConfigError: no bench has written the file, or it cannot be read."""
    try:
        lines = read_jsonl(path)
        if not lines or not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no object" if lines else "it is empty")
        environment = lines[0] if lines[0].get("record") == "environment" else {}
        numbered = list(enumerate(lines, 1))[bool(environment) :]
        speeds, requests = _of(SpeedRecord, numbered), _of(RequestRecord, numbered)
        remotes, agents = _of(RemoteRecord, numbered), _of(AgentRecord, numbered)
        recalls = tuple(
            _recall(number, line)
            for number, line in numbered
            if {"policy", "kl_nats"} <= line.keys()
        )
        turns = _of(TurnRecord, numbered)
        experiments = tuple(_experiment(line) for _, line in numbered if _is_experiment(line))
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
            n_others=len(numbered) - sum(map(len, known)),
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


def _of(kind: type[R], numbered: Iterable[tuple[int, dict[str, Any]]]) -> tuple[R, ...]:
    return tuple(
        _filled(kind, number, {name: value for name, value in line.items() if name != "record"})
        for number, line in numbered
        if line.get("record") == kind.__name__
    )


def _filled(kind: type[R], number: int, given: Mapping[str, Any]) -> R:
    """A record with these fields. Raises ValueError: names the line, and the field that is not of
    its type; TypeError: one is missing or unknown.
    """
    hints = get_type_hints(kind)
    values = {}
    for name, value in given.items():
        try:
            values[name] = _typed(value, hints.get(name, object))
            if name in DIVISORS.get(kind, ()) and values[name] <= 0:
                raise ValueError
        except ValueError:
            raise ValueError(f"line {number}: {name} is {json_line(value)}") from None
    return kind(**values)


def _typed(value: Any, hint: Any) -> Any:
    """The value, if it is what a field of this type was written as. Raises ValueError.

    JSON has null for NaN too, so that it is one where no None is expected.
    """
    if hint is float and value is None:
        return math.nan
    if isinstance(hint, UnionType):  # something or None
        return None if value is None else _typed(value, get_args(hint)[0])
    if get_origin(hint) is dict and isinstance(value, dict):
        return {name: _typed(item, get_args(hint)[1]) for name, item in value.items()}
    fits = (
        value in get_args(hint)
        if get_origin(hint) is Literal
        else type(value) in ((int, float) if hint is float else (hint,))
    )
    if not fits and hint is not object:
        raise ValueError
    return value
