from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.residency import Residency

__all__ = ["Placement", "place"]

class Placement(NamedTuple):
    blocks: NDArray[np.int32]
    slots: NDArray[np.int32]
    incoming: NDArray[np.int32]
    leaving: NDArray[np.int32]
    moves: NDArray[np.int32]

def place(
    blocks: NDArray[np.int32], residency: Residency, *, ordered: bool = False
) -> Placement: ...
