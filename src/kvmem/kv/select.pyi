from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["block_ids", "select", "select_recent"]

def select(
    scores: ArrayLike | None,
    n_blocks: int,
    budget_blocks: int,
    pins: Iterable[int] = (),
    sink_blocks: int = 1,
    recent_blocks: int = 1,
    *,
    order: Iterable[int] | None = None,
    edge: ArrayLike | None = None,
    edge_threshold: float = ...,
) -> NDArray[np.int32]: ...
def block_ids(blocks: Iterable[int], name: str) -> NDArray[np.int32]: ...
def select_recent(
    n_blocks: int, budget_blocks: int, pins: Iterable[int] = (), sink_blocks: int = 1
) -> NDArray[np.int32]: ...
