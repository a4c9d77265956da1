from typing import final

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.context import Context

__all__ = ["DraftContext"]

@final
class DraftContext:
    leader: Context
    n_embd: int
    def __init__(self, leader: Context, *, type_k: str = "f16", type_v: str = "f16") -> None: ...
    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    def clear(self) -> None: ...
    def hidden_row(self, i: int, out: NDArray[np.float32]) -> None: ...
    def follow(
        self,
        cells: NDArray[np.int32],
        tokens: NDArray[np.int32],
        pos: NDArray[np.int32],
        hidden: NDArray[np.float32],
        *,
        skip: int = 0,
    ) -> None: ...
    def skip(
        self, cells: NDArray[np.int32], tokens: NDArray[np.int32], pos: NDArray[np.int32]
    ) -> None: ...
    def draft(
        self,
        cells: NDArray[np.int32],
        tokens: NDArray[np.int32],
        pos: NDArray[np.int32],
        hidden: NDArray[np.float32],
        out: NDArray[np.int32],
        *,
        p_min: float = 0.0,
    ) -> int: ...
