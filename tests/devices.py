"""Where the models of a test run: on the CPU, and the same test again on a GPU.

A module that says `pytestmark = pytest.mark.usefixtures("device")` has each of its tests twice; the
second one is marked `gpu`. A test that is marked `part` runs a third time, with half of the layers
on the GPU: `part(kind=["llama_64"])` for these of its parameters alone, as `-k` would choose them.
What is built by `engines` and `stock` follows.

CUDA multiplies F32 matrices in TF32, with ten bits behind the comma, and its flash attention adds
up in F16: where tests compare with other arithmetic, `bound` gives the GPU a bound of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from kvmem.llama import runtime
from kvmem.llama.model import Model

Name = Literal["cpu", "gpu", "part"]


@dataclass(frozen=True, slots=True)
class Device:
    name: Name

    def n_gpu_layers(self, path: Path) -> int:
        """As ModelConfig has it, for this model. The output counts as a layer, behind the last."""
        if self.name != "part":
            return -1 if self.name == "gpu" else 0
        with Model(path, n_gpu_layers=0) as model:
            return (model.n_layer + model.n_layer_nextn) // 2 + 1


DEVICES: Final[dict[Name, Device]] = {name: Device(name) for name in get_args(Name)}
_current: ContextVar[Device] = ContextVar("device", default=DEVICES["cpu"])


def current() -> Device:
    return _current.get()


def n_gpu_layers(path: Path) -> int:
    """Of a model, on the device of the test."""
    return current().n_gpu_layers(path)


def bound(*, cpu: float, gpu: float) -> float:
    """A tolerance, by where the test runs."""
    return cpu if current().name == "cpu" else gpu


def n_gpus() -> int:
    return len(runtime.gpus())


@contextmanager
def running_on(name: Name) -> Iterator[Device]:
    token = _current.set(DEVICES[name])
    try:
        yield current()
    finally:
        _current.reset(token)
