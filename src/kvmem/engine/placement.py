"""Whether there is a GPU for the layers that were asked to lie on one."""

import logging
from functools import cache

from kvmem.config import ModelConfig
from kvmem.llama import runtime

__all__ = ["warn_without_gpu"]

_log = logging.getLogger(__name__)


def warn_without_gpu(model: ModelConfig) -> None:
    """A line where a number of layers was asked for; all of them means what there is."""
    if model.n_gpu_layers > 0:
        _warn(model.n_gpu_layers)


@cache  # once for a process that opens several engines
def _warn(n_layers: int) -> None:
    if all(kind == "cpu" for _, _, kind, _, _ in runtime.devices()):
        _log.warning(
            "n_gpu_layers=%d has no effect: this machine or this build has no GPU", n_layers
        )
