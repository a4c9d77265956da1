"""Where each attention layer's K and V rows lie in a block record's payload, and how K was made.

All values come from the port, which reads them from the compute graph; nothing here guesses.
A payload is `layer 0 K rows | layer 0 V rows | layer 1 K rows | ...`, each `block_tokens` rows.
"""

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from kvmem.errors import ConfigError

__all__ = [
    "KV_TYPES",
    "ROPE_IMROPE",
    "ROPE_MROPE",
    "ROPE_NEOX",
    "ROPE_NORMAL",
    "KvLayout",
    "KvType",
    "LayerLayout",
    "Pair",
    "RopeSpec",
]

# ggml's numbers for the kinds of rotation. Source: ggml.h, GGML_ROPE_TYPE_*.
ROPE_NORMAL = 0
ROPE_NEOX = 2
ROPE_MROPE = 8
ROPE_IMROPE = 40
_ROPE_MODES = (ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_IMROPE)


class KvType(NamedTuple):
    """A storage type of K or V: values come in groups of `block` that take `n_bytes` bytes."""

    name: str
    block: int
    n_bytes: int


# ggml type id > storage type, those that llama.cpp accepts for a KV cache. Source: ggml.h, enum
# ggml_type; sizes from ggml-common.h.
KV_TYPES: dict[int, KvType] = {
    0: KvType("f32", 1, 4),
    1: KvType("f16", 1, 2),
    2: KvType("q4_0", 32, 18),
    3: KvType("q4_1", 32, 20),
    6: KvType("q5_0", 32, 22),
    7: KvType("q5_1", 32, 24),
    8: KvType("q8_0", 32, 34),
    20: KvType("iq4_nl", 32, 18),
    30: KvType("bf16", 1, 2),
}


class Pair(NamedTuple):
    """One key head of one layer. `layer` indexes `KvLayout.layers`; it is not the model's il."""

    layer: int
    kv_head: int


def _require(holds: bool, setting: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(setting, value, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The parameters of one rotation, as ggml's ROPE node carries them. Equal specs share tables.

    `sections`: pairs of dims that follow pos t, y, x and the fourth (M-RoPE modes only).
    `offset`: first rotated dim of a head. `freq_factors`: n_dims / 2 divisors of the angle.
    `weights`: factors that the dims of a head got after the rotation, None for none.
    """

    n_dims: int
    mode: int = ROPE_NORMAL
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    offset: int = 0
    freq_factors: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require(self.mode in _ROPE_MODES, "rope.mode", self.mode, f"one of {_ROPE_MODES}")
        _require(self.n_dims > 0 and self.n_dims % 2 == 0, "rope.n_dims", self.n_dims, "even, >= 2")
        _require(self.offset >= 0, "rope.offset", self.offset, ">= 0")
        _require(
            self.freq_base > 1 and isfinite(self.freq_base), "rope.freq_base", self.freq_base, "> 1"
        )
        _require(
            self.freq_scale > 0 and isfinite(self.freq_scale),
            "rope.freq_scale",
            self.freq_scale,
            "> 0",
        )
        _require(
            self.attn_factor > 0 and isfinite(self.attn_factor),
            "rope.attn_factor",
            self.attn_factor,
            "> 0",
        )
        if self.ext_factor != 0:
            _require(self.n_ctx_orig > 0, "rope.n_ctx_orig", self.n_ctx_orig, "> 0 with YaRN")
            _require(
                self.beta_fast > 0 and self.beta_slow > 0,
                "rope.beta_fast, beta_slow",
                (self.beta_fast, self.beta_slow),
                "> 0 with YaRN",
            )
        if self.mode in (ROPE_MROPE, ROPE_IMROPE):
            _require(
                len(self.sections) == 4 and min(self.sections) >= 0 and sum(self.sections[:3]) > 0,
                "rope.sections",
                self.sections,
                "four counts, not all zero, with M-RoPE",
            )
        if self.freq_factors is not None:
            _require(
                len(self.freq_factors) >= self.n_dims // 2
                and all(f > 0 for f in self.freq_factors),
                "rope.freq_factors",
                len(self.freq_factors),
                f"at least n_dims / 2 = {self.n_dims // 2} positive values",
            )
        if self.weights is not None:
            end = self.offset + self.n_dims
            _require(
                len(self.weights) >= end and all(map(isfinite, self.weights)),
                "rope.weights",
                len(self.weights),
                f"at least offset + n_dims = {end} finite values",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One attention layer. Offsets are bytes in the payload; type_k and type_v are ggml type ids.

    rope_k, rope_q: None where the layer has no rotation. `hadamard`: size of the Walsh-Hadamard
    blocks that K and Q were multiplied with before they met, 0 for none.
    `attn_scale`: factor of q.k inside softmax; None means 1 / sqrt(head_dim_k).
    `dequantize`: address of a C function `void (const void *src, float *dst, int64_t n)` for
    type_k; it must be safe without the GIL and from any thread.
    """

    il: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: int
    type_v: int
    k_offset: int
    v_offset: int
    k_row_bytes: int
    v_row_bytes: int
    dequantize: int
    rope_k: RopeSpec | None = None
    rope_q: RopeSpec | None = None
    hadamard: int = 0
    attn_scale: float | None = None

    def __post_init__(self) -> None:
        where = f"layer {self.il}: "
        _require(
            self.n_head_kv > 0 and self.n_head > 0 and self.n_head % self.n_head_kv == 0,
            where + "n_head, n_head_kv",
            (self.n_head, self.n_head_kv),
            "positive, the first a multiple of the second",
        )
        _require(self.head_dim_k > 0, where + "head_dim_k", self.head_dim_k, "> 0")
        _require(self.head_dim_v >= 0, where + "head_dim_v", self.head_dim_v, ">= 0")
        for name, type_id, dim, row_bytes in (
            ("k", self.type_k, self.head_dim_k, self.k_row_bytes),
            ("v", self.type_v, self.head_dim_v, self.v_row_bytes),
        ):
            _require(
                type_id in KV_TYPES, where + f"type_{name}", type_id, f"one of {sorted(KV_TYPES)}"
            )
            kind = KV_TYPES[type_id]
            values = dim * self.n_head_kv
            _require(
                values % kind.block == 0 and row_bytes >= values // kind.block * kind.n_bytes,
                where + f"{name}_row_bytes",
                row_bytes,
                f"at least {values} values of {kind.name}, in whole groups of {kind.block}",
            )
        _require(
            self.dequantize != 0, where + "dequantize", self.dequantize, "a function's address"
        )
        _require(
            self.attn_scale is None or (self.attn_scale > 0 and isfinite(self.attn_scale)),
            where + "attn_scale",
            self.attn_scale,
            "> 0, or None",
        )
        _require(
            self.hadamard == 0
            or (self.hadamard & (self.hadamard - 1) == 0 and self.head_dim_k % self.hadamard == 0),
            where + "hadamard",
            self.hadamard,
            f"0 or a power of two that divides head_dim_k = {self.head_dim_k}",
        )
        for name, spec in (("rope_k", self.rope_k), ("rope_q", self.rope_q)):
            _require(
                spec is None or spec.offset + spec.n_dims <= self.head_dim_k,
                where + name,
                spec,
                f"within head_dim_k = {self.head_dim_k}",
            )

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.n_head // self.n_head_kv

    @property
    def score_scale(self) -> float:
        """Factor of q.k inside softmax."""
        return self.head_dim_k**-0.5 if self.attn_scale is None else self.attn_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The attention layers of a record's payload that a question can ask.

    Behind them may stand the rows of a draft head, which belong to the payload_bytes alone.
    """

    layers: tuple[LayerLayout, ...]
    block_tokens: int
    payload_bytes: int

    def __post_init__(self) -> None:
        _require(self.block_tokens > 0, "block_tokens", self.block_tokens, "> 0")
        _require(len(self.layers) > 0, "layers", len(self.layers), "at least one")
        regions = []
        for layer in self.layers:
            regions.append(
                (layer.k_offset, self.block_tokens * layer.k_row_bytes, f"K of {layer.il}")
            )
            regions.append(
                (layer.v_offset, self.block_tokens * layer.v_row_bytes, f"V of {layer.il}")
            )
        end = 0
        for offset, n_bytes, name in sorted(region for region in regions if region[1]):
            _require(
                offset >= end and offset + n_bytes <= self.payload_bytes,
                f"offset of the {name}",
                offset,
                f"clear of the rows before it (end {end}) and inside {self.payload_bytes} bytes",
            )
            end = offset + n_bytes

    def pairs(self) -> tuple[Pair, ...]:
        """Every (layer index, KV head) pair, the choice where no calibration is at hand."""
        return tuple(
            Pair(index, head)
            for index, layer in enumerate(self.layers)
            for head in range(layer.n_head_kv)
        )
