"""Fixtures for every part of the tests. Markers and warning filters stand in pyproject.toml."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import devices

pytest_plugins = ["models"]  # tiny models

# How long an example takes says more of what else the machine does than of what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree that the tests belong to."""
    return ROOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `device` runs on each of them (tests/devices.py)."""
    if "device" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker
    names = ["gpu", "part"] if marker("part") else ["gpu"]
    runs = [pytest.param(name, marks=pytest.mark.gpu) for name in names]
    if not marker("gpu"):
        runs.insert(0, pytest.param("cpu"))
    metafunc.parametrize("device", runs, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With part of the layers on the GPU only what the marker names."""
    items[:] = [item for item in items if _is_chosen(item)]


def _is_chosen(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("part")
    params = item.callspec.params if isinstance(item, pytest.Function) and marker else {}
    if marker is None or params.get("device") != "part":
        return True
    return all(params[name] in chosen for name, chosen in marker.kwargs.items())


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[devices.Device]:
    """The device that the test's models run on: each test that uses it runs on all of them."""
    import devices  # it needs llama.cpp, which `make test-checks` builds kv without

    if request.param != "cpu" and not devices.n_gpus():
        pytest.skip("this build of llama.cpp shows no GPU; `make test-gpu` builds one that does")
    with devices.running_on(request.param) as current:
        yield current


@pytest.fixture(autouse=True)
def logs_of_a_library() -> Iterator[None]:
    """What a command in this process has set up ends with its test: it holds the test's stderr."""
    yield
    logger = logging.getLogger("kvmem")
    logger.handlers, logger.propagate = [logging.NullHandler()], True
    logger.setLevel(logging.NOTSET)
    logging.getLogger("kvmem.llama").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def dist() -> Path:
    """The folder with the source archive and the wheel of `make ci`, which KVMEM_DIST names."""
    named = os.environ.get("KVMEM_DIST")
    if not named:
        pytest.skip("KVMEM_DIST names no folder with a wheel; `make ci` builds one")
    return (ROOT / named).resolve()
