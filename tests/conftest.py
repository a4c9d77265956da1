"""Fixtures for every part of the tests. Markers and warning filters stand in pyproject.toml."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def dist() -> Path:
    """The folder with the source archive and the wheel of `make ci`, which KVMEM_DIST names."""
    named = os.environ.get("KVMEM_DIST")
    if not named:
        pytest.skip("KVMEM_DIST names no folder with a wheel; `make ci` builds one")
    return (ROOT / named).resolve()
