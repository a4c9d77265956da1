"""Where the models of a test run: on the CPU, and the same test again on a GPU.

A module that says `pytestmark = pytest.mark.usefixtures("device")` has each of its tests twice; the
second one is marked `gpu`. What is built by `engines` and `stock` follows.

CUDA multiplies F32 matrices in TF32, with ten bits behind the comma, and its flash attention adds
up in F16: where tests compare with other arithmetic, `bound` gives the GPU a bound of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal

from kvmem.llama import runtime

Name = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """n_gpu_layers: as ModelConfig has it."""

    name: Name
    n_gpu_layers: int


DEVICES: Final[dict[Name, Device]] = {"cpu": Device("cpu", 0), "gpu": Device("gpu", -1)}
_current: ContextVar[Device] = ContextVar("device", default=DEVICES["cpu"])


def current() -> Device:
    return _current.get()


def bound(*, cpu: float, gpu: float) -> float:
    """A tolerance, by where the test runs."""
    return gpu if current().name == "gpu" else cpu


def has_gpu() -> bool:
    return any(device[2] == "gpu" for device in runtime.devices())


@contextmanager
def running_on(name: Name) -> Iterator[Device]:
    token = _current.set(DEVICES[name])
    try:
        yield current()
    finally:
        _current.reset(token)
