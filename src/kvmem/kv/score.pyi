from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.budget import HostBudget
from kvmem.kv.query import Query
from kvmem.kv.summary import KeySummaries

__all__ = [
    "DEFAULT_THREADS",
    "MOST_THREADS",
    "ScoreScratch",
    "dot_products",
    "score_blocks",
    "score_slices",
]

DEFAULT_THREADS: int
MOST_THREADS: int

@final
class ScoreScratch:
    def __new__(cls, budget: HostBudget | None = None) -> ScoreScratch: ...
    @property
    def n_bytes(self) -> int: ...

def score_slices(
    summaries: KeySummaries,
    rows: Sequence[NDArray[np.float32]],
    power: int = 2,
    threads: int = ...,
    scratch: ScoreScratch | None = None,
    equal_pairs: bool = False,
) -> NDArray[np.float32]: ...
def score_blocks(
    query: Query,
    summaries: KeySummaries,
    power: int = 2,
    threads: int = ...,
    scratch: ScoreScratch | None = None,
    head_slices: int = 1,
    tail_slices: int = 1,
    equal_pairs: bool = False,
    centring: float = 0,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
def dot_products(
    rows: NDArray[np.float32], keys: NDArray[np.int8]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
