"""Layouts and block records with known pre-rotation keys."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from oracles_retrieval import hadamard, rotate

from kvmem.kv.layout import KV_TYPES, KvLayout, LayerLayout, RopeSpec
from kvmem.kv.summary import DEQUANTIZE_F16, DEQUANTIZE_F32, KeySummaries

F32, F16, Q8_0 = 0, 1, 8

NEOX = RopeSpec(n_dims=32, mode=2, freq_base=1e6)

# One of each kind, for heads of 64.
ROPE_SPECS: dict[str, RopeSpec | None] = {
    "none": None,
    "normal": RopeSpec(n_dims=64),
    "neox": RopeSpec(n_dims=64, mode=2, freq_base=1e6),
    "partial": RopeSpec(n_dims=32, mode=2, offset=16),
    "partial normal": RopeSpec(n_dims=16, offset=48),
    "linear scale": RopeSpec(n_dims=64, freq_scale=0.25),
    "yarn": RopeSpec(
        n_dims=64, mode=2, n_ctx_orig=4096, freq_scale=1 / 32, ext_factor=1.0, attn_factor=0.9
    ),
    "half yarn": RopeSpec(n_dims=64, n_ctx_orig=8192, freq_scale=0.5, ext_factor=0.5, beta_fast=16),
    "weights": RopeSpec(
        n_dims=32, mode=2, offset=8, weights=tuple(0.5 + i % 7 / 3 for i in range(64))
    ),
    "weights normal": RopeSpec(n_dims=64, weights=tuple(-1.5 + i % 4 for i in range(64))),
    "factors": RopeSpec(n_dims=64, freq_base=5e5, freq_factors=tuple(1 + i / 4 for i in range(32))),
    "mrope": RopeSpec(n_dims=64, mode=8, freq_base=1e6, sections=(8, 12, 12, 0)),
    "mrope four": RopeSpec(n_dims=64, mode=8, sections=(6, 4, 4, 2)),
    "imrope": RopeSpec(n_dims=64, mode=40, freq_base=5e6, sections=(12, 10, 10, 0)),
    "imrope partial": RopeSpec(n_dims=32, mode=40, freq_base=1e7, sections=(6, 5, 5, 0)),
    "imrope yarn": RopeSpec(
        n_dims=64,
        mode=40,
        sections=(12, 10, 8, 2),
        n_ctx_orig=32768,
        freq_scale=0.25,
        ext_factor=1.0,
    ),
}


def image_positions(first: int) -> NDArray[np.int32]:
    """Text, then a 3 x 4 image whose t repeats, then text: all four positions differ somewhere."""
    rows = [(first + i, first + i, first + i, 0) for i in range(3)]
    rows += [(first + 3, first + 3 + y, first + 3 + x, y * x) for y in range(3) for x in range(4)]
    rows += [(first + 7 + i, first + 7 + i, first + 7 + i, 0) for i in range(2)]
    return np.array(rows, np.int32)


def quantize_q8_0(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Groups of 32 as ggml's block_q8_0, a half scale and 32 int8: [..., 34 n / 32] bytes."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    wide = scale.astype(np.float64)
    levels = np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0))
    packed = np.concatenate(
        [scale.view(np.uint8), levels.clip(-127, 127).astype(np.int8).view(np.uint8)], axis=-1
    )
    return packed.reshape(*values.shape[:-1], -1)


def _dequantize_q8_0(source: int, target: int, n: int) -> None:
    """The C function's twin: 32 values from each 34 bytes."""
    groups = np.ctypeslib.as_array((ctypes.c_uint8 * (n // 32 * 34)).from_address(source))
    groups = groups.reshape(-1, 34)
    scale = np.ascontiguousarray(groups[:, :2]).view(np.float16).astype(np.float32)
    out = np.ctypeslib.as_array((ctypes.c_float * n).from_address(target))
    out[:] = (scale * groups[:, 2:].view(np.int8)).reshape(-1)


DEQUANTIZE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
dequantize_q8_0 = DEQUANTIZE(_dequantize_q8_0)


def dequantizer(type_id: int) -> int:
    """Address of the function that reads a type."""
    address = ctypes.cast(dequantize_q8_0, ctypes.c_void_p).value
    assert address is not None
    return {F32: DEQUANTIZE_F32, F16: DEQUANTIZE_F16, Q8_0: address}[type_id]


def make_layout(
    *,
    n_layers: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 64,
    block_tokens: int = 32,
    type_k: int = F32,
    ropes: Sequence[RopeSpec | None] = (NEOX,),
    hadamard_size: int = 0,
    dequantize: int | None = None,
) -> KvLayout:
    """Layers in a row; layer i rotates with ropes[i % len(ropes)]; V is f16."""
    kind = KV_TYPES[type_k]
    k_row = n_head_kv * head_dim // kind.block * kind.n_bytes
    v_row = n_head_kv * head_dim * 2
    layers = []
    offset = 0
    for index in range(n_layers):
        rope = ropes[index % len(ropes)]
        layers.append(
            LayerLayout(
                il=3 * index + 1,
                n_head=n_head,
                n_head_kv=n_head_kv,
                head_dim_k=head_dim,
                head_dim_v=head_dim,
                type_k=type_k,
                type_v=F16,
                k_offset=offset,
                v_offset=offset + block_tokens * k_row,
                k_row_bytes=k_row,
                v_row_bytes=v_row,
                dequantize=dequantizer(type_k) if dequantize is None else dequantize,
                rope_k=rope,
                rope_q=rope,
                hadamard=hadamard_size,
            )
        )
        offset += block_tokens * (k_row + v_row)
    return KvLayout(layers=tuple(layers), block_tokens=block_tokens, payload_bytes=offset)


def positions(n: int, first: int = 0) -> NDArray[np.int32]:
    """Positions of text tokens as M-RoPE models number them: p, p, p, 0."""
    pos = np.zeros((n, 4), np.int32)
    pos[:, :3] = np.arange(first, first + n)[:, None]
    return pos


@dataclass
class History:
    """Blocks whose pre-rotation keys are known: for each layer f64 [n_tokens, n_head_kv, d]."""

    layout: KvLayout
    keys: list[NDArray[np.float64]]
    pos: NDArray[np.int32]
    payloads: list[NDArray[np.uint8]]

    @property
    def n_blocks(self) -> int:
        """Whole blocks."""
        return len(self.payloads)

    def block_pos(self, block: int) -> NDArray[np.int32]:
        """i32 [block_tokens, 4]."""
        size = self.layout.block_tokens
        return self.pos[block * size : (block + 1) * size]

    def fill(self, summaries: KeySummaries, order: Sequence[int] | None = None) -> KeySummaries:
        """Add the blocks, in the given order of records."""
        for block, record in enumerate(range(self.n_blocks) if order is None else order):
            summaries.add(block, self.payloads[record].ctypes.data, self.block_pos(record))
        return summaries


def make_history(
    layout: KvLayout,
    n_blocks: int,
    seed: int = 0,
    first_pos: int = 0,
    pos: NDArray[np.int32] | None = None,
) -> History:
    """Random keys, stored as a model would: rotated, Hadamard-transformed, in the layer's type."""
    rng = np.random.default_rng(seed)
    n = n_blocks * layout.block_tokens
    pos = positions(n, first_pos) if pos is None else pos
    keys = [rng.standard_normal((n, layer.n_head_kv, layer.head_dim_k)) for layer in layout.layers]
    return store(layout, keys, pos)


def store(layout: KvLayout, keys: list[NDArray[np.float64]], pos: NDArray[np.int32]) -> History:
    """Records of given pre-rotation keys; the bytes of V are noise."""
    size = layout.block_tokens
    n_blocks = len(pos) // size
    rng = np.random.default_rng(99)
    payloads = [rng.integers(0, 256, layout.payload_bytes, np.uint8) for _ in range(n_blocks)]
    for layer, wanted in zip(layout.layers, keys, strict=True):
        stored = hadamard(rotate(wanted, pos, layer.rope_k), layer.hadamard).reshape(len(pos), -1)
        if layer.type_k == Q8_0:
            raw = quantize_q8_0(stored)
        else:
            kind = np.float32 if layer.type_k == F32 else np.float16
            raw = stored.astype(kind).view(np.uint8)
        for block, payload in enumerate(payloads):
            rows = raw[block * size : (block + 1) * size]
            padded = np.zeros((size, layer.k_row_bytes), np.uint8)
            padded[:, : rows.shape[1]] = rows
            payload[layer.k_offset : layer.k_offset + padded.size] = padded.reshape(-1)
    return History(layout, keys, pos, payloads)
