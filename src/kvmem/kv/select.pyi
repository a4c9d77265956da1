from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["block_ids", "select"]

def select(
    scores: ArrayLike,
    n_blocks: int,
    budget_blocks: int,
    pins: Iterable[int] = (),
    sink_blocks: int = 1,
    recent_blocks: int = 1,
    *,
    edge: ArrayLike | None = None,
    edge_threshold: float = ...,
) -> NDArray[np.int32]: ...
def block_ids(blocks: Iterable[int], name: str) -> NDArray[np.int32]: ...
