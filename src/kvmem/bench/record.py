"""Raw results as JSON lines: the first line says what ran where, each other line is one record."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["environment", "json_line", "version", "write_jsonl"]


def environment(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Machine, versions, commit, model and settings of a run."""
    return {
        "record": "environment",
        "kvmem": version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "model": model.name,
        "model_bytes": model.stat().st_size,
        "settings": settings,
    }


def json_line(record: object) -> str:
    """One record as JSON; NaN, which JSON does not know, becomes null."""
    fields = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    return json.dumps(_plain(fields), separators=(",", ":"))


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """Write all records at once: a reader sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("".join(json_line(record) + "\n" for record in records))
    partial.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def version() -> str:
    """Of kvmem."""
    try:
        return metadata.version("kvmem")
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit that kvmem runs from, with a + where files differ; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changed)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")
