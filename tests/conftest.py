"""Fixtures for every part of the tests. Markers and warning filters stand in pyproject.toml."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import devices

pytest_plugins = ["models"]  # tiny models

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree that the tests belong to."""
    return ROOT


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[devices.Device]:
    """The device that the test's models run on: each test that uses it runs on both."""
    import devices  # it needs llama.cpp, which `make test-checks` builds kv without

    if request.param == "gpu" and not devices.has_gpu():
        pytest.skip("this build of llama.cpp shows no GPU; `make test-gpu` builds one that does")
    with devices.running_on(request.param) as current:
        yield current


@pytest.fixture(scope="session")
def dist() -> Path:
    """The folder with the source archive and the wheel of `make ci`, which KVMEM_DIST names."""
    named = os.environ.get("KVMEM_DIST")
    if not named:
        pytest.skip("KVMEM_DIST names no folder with a wheel; `make ci` builds one")
    return (ROOT / named).resolve()
