from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.budget import HostBudget

__all__ = ["BlockTable"]

@final
class BlockTable:
    def __new__(
        cls, block_tokens: int, budget: HostBudget, beside: BlockTable | None = None
    ) -> Self: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    def tokens(self) -> NDArray[np.int32]: ...
    def pos(self) -> NDArray[np.int32]: ...
