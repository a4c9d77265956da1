import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import RopeSpec

__all__ = ["unrotate"]

def unrotate(
    rows: NDArray[np.float32],
    pos: NDArray[np.int32],
    spec: RopeSpec | None,
    hadamard_size: int = 0,
) -> None: ...
