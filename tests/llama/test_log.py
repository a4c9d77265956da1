"""llama.cpp's log lines become records of `kvmem.llama`; nothing is printed."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from engines import log_records

from kvmem.errors import ModelError
from kvmem.llama import log, runtime
from kvmem.llama.model import Model


def test_loading_logs_details_at_debug(tiny_llama: Path) -> None:
    with log_records("kvmem.llama") as lines:
        Model(tiny_llama).close()
    assert len(lines) > 20
    assert {record.levelno for record in lines} <= {logging.DEBUG, logging.WARNING}
    assert any("general.architecture" in record.getMessage() for record in lines)
    assert not any(record.getMessage().endswith("\n") for record in lines)


def test_a_failed_load_logs_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    with log_records("kvmem.llama") as lines, pytest.raises(ModelError):
        Model(path)
    assert [record.levelno for record in lines].count(logging.ERROR) >= 1
    assert log.drain() == []  # they were taken


def test_nothing_is_printed(tiny_llama: Path) -> None:
    code = f"""
from kvmem.llama.model import Model
from kvmem.llama.context import Context
with Model({str(tiny_llama)!r}) as model, Context(model, n_ctx=64):
    pass
try:
    Model("absent.gguf")
except Exception:
    pass
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def test_devices_and_system_info_are_told() -> None:
    devices = runtime.devices()
    assert "cpu" in {device.kind for device in devices}
    assert all(0 <= device.free_bytes <= device.total_bytes for device in devices)
    assert all(gpu.kind.endswith("gpu") for gpu in runtime.gpus())
    assert runtime.system_info()
    runtime.ensure_started()  # a second time does nothing
