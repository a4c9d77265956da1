"""Raw results as JSON lines: the first line says what ran where, each other line is one record."""

import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from kvmem.llama import runtime

__all__ = [
    "environment",
    "gpu_used_bytes",
    "json_line",
    "read_jsonl",
    "record_file",
    "version",
    "write_jsonl",
]

_log = logging.getLogger(__name__)


def environment(model: Path | None, settings: dict[str, Any], bench: str = "") -> dict[str, Any]:
    """Machine, driver, build, commit, model and settings of a run.

    model: None for a server's. bench: the name of what was run.
    """
    return {
        "record": "environment",
        "bench": bench,
        "kvmem": version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "gpus": [gpu.description for gpu in runtime.gpus()],
        "driver": _driver(),
        "build": runtime.system_info(),
        "model": None if model is None else model.name,
        "model_bytes": 0 if model is None else model.stat().st_size,
        # of a path the name is enough: a record may be shown to others
        "settings": {
            name: value.name if isinstance(value, Path) else value
            for name, value in settings.items()
        },
    }


def json_line(record: object) -> str:
    """One record as JSON, with the name of its type; NaN, unknown to JSON, becomes null."""
    fields = record
    if is_dataclass(record) and not isinstance(record, type):
        fields = {"record": type(record).__name__, **asdict(record)}
    return json.dumps(_plain(fields), separators=(",", ":"))


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """Write all records at once: a reader sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("".join(json_line(record) + "\n" for record in records))
    partial.replace(path)


@contextmanager
def record_file(path: Path | None, where: dict[str, Any]) -> Iterator[Callable[..., None]]:
    """Keep records as they come, behind the line `where`: a run that is stopped keeps what it has.

    Yields what takes the records. The file is opened for the first of them, so that a run that has
    none leaves what was there. path: None for no file.
    """
    if path is None:
        yield lambda *records: None
        return
    with ExitStack() as opened:
        file: TextIO | None = None

        def keep(*records: object) -> None:
            nonlocal file
            if file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = opened.enter_context(path.open("w", encoding="utf-8"))
                records = (where, *records)
            file.writelines(json_line(record) + "\n" for record in records)
            file.flush()

        yield keep


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All lines of a file of records; the first is the environment.

    A last line that is not whole, as a killed run may leave it, is left out with a warning. Raises
    ValueError: names another line that is no JSON.
    """
    lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) > 1:
                _log.warning("%s: line %d, the last, is not whole: left out", path, number)
                break
            what = str(error)
            if isinstance(error, json.JSONDecodeError):
                what = f"{error.msg} at column {error.colno}"
            raise ValueError(f"line {number}: {what}") from None
    return found


def gpu_used_bytes() -> int:
    """Memory in use on all GPUs, by whatever program; 0 without one."""
    return sum(gpu.total_bytes - gpu.free_bytes for gpu in runtime.gpus())


def _driver() -> str | None:
    """The NVIDIA driver's own line; None where there is none."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return line.removeprefix("NVRM version:").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def version(otherwise: str = "not installed") -> str:
    """Of kvmem; `otherwise` where it runs out of a checkout."""
    try:
        return metadata.version("kvmem")
    except metadata.PackageNotFoundError:
        return otherwise


def _commit() -> str | None:
    """The commit that kvmem runs from, with a + where files differ; None outside a checkout.

    KVMEM_COMMIT tells it where the files were copied without their history.
    """
    if told := os.environ.get("KVMEM_COMMIT"):
        return told
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
