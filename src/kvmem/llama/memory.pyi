from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import KvLayout
from kvmem.kv.port import DevicePort
from kvmem.llama.context import Context

__all__ = ["LlamaPort"]

@final
class LlamaPort(DevicePort):
    context: Context
    layout: KvLayout
    def __init__(self, context: Context) -> None: ...
    def begin_tap(self, layers: NDArray[np.int32], rows: NDArray[np.int32]) -> None: ...
    def end_tap(self) -> NDArray[Any]: ...
    @property
    def n_cells_used(self) -> int: ...
    @property
    def is_hybrid(self) -> bool: ...
    @property
    def transfer(self) -> str: ...
    def device_bytes(self) -> tuple[int, int]: ...
