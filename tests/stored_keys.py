"""The keys of a block as its record on the host holds them."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.memory import TieredMemory

__all__ = ["stored_keys"]


def stored_keys(memory: TieredMemory, block: int, layer: int) -> NDArray[np.float32]:
    """K of a block as its host record holds it: f32 [block_tokens, n_head_kv, head_dim]."""
    spec = memory.layout.layers[layer]
    n_tokens = memory.block_tokens
    keys = np.empty((n_tokens, spec.n_head_kv, spec.head_dim_k), np.float32)
    dequantize = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        spec.dequantize
    )
    address = memory.working_set.record_address(block) + spec.k_offset
    for row in keys:
        dequantize(address, row.ctypes.data, row.size)
        address += spec.k_row_bytes
    return keys
