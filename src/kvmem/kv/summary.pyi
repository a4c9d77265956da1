from collections.abc import Callable, Iterable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.chunks import Budget
from kvmem.kv.layout import KvLayout, Pair

__all__ = ["DEQUANTIZE_F16", "DEQUANTIZE_F32", "KeySummaries"]

DEQUANTIZE_F16: int
DEQUANTIZE_F32: int

@final
class KeySummaries:
    def __new__(
        cls,
        layout: KvLayout,
        pairs: Sequence[tuple[int, int]],
        slice_tokens: int = 4,
        budget: Budget | None = None,
    ) -> KeySummaries: ...
    @property
    def layout(self) -> KvLayout: ...
    @property
    def pairs(self) -> tuple[Pair, ...]: ...
    @property
    def slice_tokens(self) -> int: ...
    @property
    def slices_per_block(self) -> int: ...
    @property
    def blocks_per_chunk(self) -> int: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def n_slices(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> float: ...
    def reserve(self, n_blocks: int) -> None: ...
    def add(self, block: int, payload: int, pos: NDArray[np.int32]) -> None: ...
    def truncate(self, n_blocks: int) -> None: ...
    def recompute(
        self,
        pairs: Sequence[tuple[int, int]],
        records: Callable[[int], Iterable[tuple[int, NDArray[np.int32]]]],
        slice_tokens: int | None = None,
    ) -> KeySummaries: ...
    def keys(self, pair: int) -> NDArray[np.float32]: ...
