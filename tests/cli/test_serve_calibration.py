"""A server that calibrates first: only where that is used, and what may go wrong."""

import shutil
import signal
import socket
from pathlib import Path
from time import monotonic

import httpx2
import pytest
from live import WAIT_S, serving

START = ("--port", "0", "-c", "512", "-t", "1")


def test_a_start_calibrates_only_where_that_is_used(tiny_llama: Path, tmp_path: Path) -> None:
    model = str(shutil.copy(tiny_llama, tmp_path / "tiny.gguf"))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving("-m", model, *START, variables=cache) as server:
        server.until("^loading ")
        assert server.stop(signal.SIGTERM) == 0
    with serving("-m", model, *START, "--kvmem-calibrate", "--no-kvmem", variables=cache) as server:
        server.address()
        assert server.seen[0].startswith("not calibrated, as it would not be used")
        assert server.stop() == 130


@pytest.mark.slow
def test_it_answers_and_stops_while_it_calibrates(demo_model: Path, tmp_path: Path) -> None:
    """tests/bench/test_calibrate.py has what comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = str(shutil.copy(demo_model, tmp_path))
    args = ("-m", model, "--port", str(port), "-c", "4096", "-t", "1", "--kvmem-calibrate")
    with serving(*args, variables={"XDG_CACHE_HOME": str(tmp_path / "cache")}) as server:
        server.until(f"^calibrating {model}$")
        health = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S)
        assert health.status_code == 503 and "being calibrated (0%)" in health.text
        began = monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert monotonic() - began < 10
        assert not any("Traceback" in line for line in server.log())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--spec-type", "draft-mtp"), "MTP"),
        (("--chat-template", "{{ foo"), "the chat template cannot be used"),
    ],
)
def test_what_a_start_would_refuse_is_refused_before_it_calibrates(
    tiny_llama: Path, tmp_path: Path, args: tuple[str, ...], reason: str
) -> None:
    model = str(shutil.copy(tiny_llama, tmp_path))
    with serving("-m", model, *START, "--kvmem-calibrate", *args) as server:
        assert server.process.wait(WAIT_S) in (1, 2)
        (line,) = server.log()
        assert line.startswith("error: ") and reason in line


def test_a_model_that_cannot_be_calibrated_is_served(tiny_llama: Path, tmp_path: Path) -> None:
    """Its vocabulary has a token a letter: the questions find no place."""
    model = str(shutil.copy(tiny_llama, tmp_path))
    with serving("-m", model, *START, "--kvmem-calibrate") as server:
        server.address()
        assert any(" W kvmem.cli.calibrate: not calibrated: " in line for line in server.seen)
