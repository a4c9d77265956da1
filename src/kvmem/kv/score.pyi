from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.query import Query
from kvmem.kv.summary import KeySummaries

__all__ = ["DEFAULT_THREADS", "score_blocks", "score_slices"]

DEFAULT_THREADS: int

def score_slices(
    summaries: KeySummaries,
    rows: Sequence[NDArray[np.float32]],
    weights: Sequence[NDArray[np.float32]],
    power: int = 2,
    threads: int = ...,
) -> NDArray[np.float32]: ...
def score_blocks(
    query: Query,
    summaries: KeySummaries,
    weights: NDArray[np.float32] | None = None,
    power: int = 2,
    threads: int = ...,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
