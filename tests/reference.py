"""Float64 twins of what tiny models compute before the rotation, from the weights of a file."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny import N_HEADS, N_KV_HEADS

F64 = NDArray[np.float64]

NORM_EPSILON = 1e-6
FREQ_BASE = 10000.0


class Weights:
    """The tensors of a GGUF file by name: float64, matrices as [n_out, n_in]."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {
            tensor.name: np.array(tensor.data, np.float64).reshape(
                tuple(int(n) for n in tensor.shape[::-1])
            )
            for tensor in reader.tensors
        }
        self.arch = str(reader.fields["general.architecture"].contents())

    def __getitem__(self, name: str) -> F64:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


def rms_norm(values: F64, weight: F64) -> F64:
    """Over the last axis. Source: Zhang and Sennrich, Root Mean Square Layer Normalization."""
    normed: F64 = values / np.sqrt((values**2).mean(-1, keepdims=True) + NORM_EPSILON) * weight
    return normed


def project(weights: Weights, hidden: F64, layer: int) -> tuple[F64, F64]:
    """Q and K of a layer before the rotation: f64 [n_tokens, heads, head_dim] each.

    hidden: f64 [n_tokens, n_embd], what enters the layer.
    """
    prefix = f"blk.{layer}."
    values = rms_norm(hidden, weights[prefix + "attn_norm.weight"])
    found = []
    for name, n_heads in (("q", N_HEADS), ("k", N_KV_HEADS)):
        rows = values @ weights[f"{prefix}attn_{name}.weight"].T
        if f"{prefix}attn_{name}.bias" in weights:
            rows = rows + weights[f"{prefix}attn_{name}.bias"]
        heads = rows.reshape(len(rows), n_heads, -1)
        if name == "q" and weights.arch == "qwen35":
            heads = heads[:, :, : heads.shape[2] // 2]  # the other half is the output gate
        if f"{prefix}attn_{name}_norm.weight" in weights:
            heads = rms_norm(heads, weights[f"{prefix}attn_{name}_norm.weight"])
        found.append(heads)
    return found[0], found[1]


def embed(weights: Weights, tokens: tuple[int, ...]) -> F64:
    return weights["token_embd.weight"][list(tokens)]


def rotate_pairs(heads: F64) -> F64:
    """Rotary embedding of neighbouring pairs at positions 0, 1, ... Source: Su et al., RoFormer."""
    n_tokens, _, head_dim = heads.shape
    angle = np.outer(np.arange(n_tokens), FREQ_BASE ** (-np.arange(0, head_dim, 2) / head_dim))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    out = np.empty_like(heads)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def llama_layer(weights: Weights, hidden: F64, layer: int) -> F64:
    """What leaves one layer of a llama model when all tokens see all before them."""
    prefix = f"blk.{layer}."
    query, key = (rotate_pairs(heads) for heads in project(weights, hidden, layer))
    normed = rms_norm(hidden, weights[prefix + "attn_norm.weight"])
    value = (normed @ weights[prefix + "attn_v.weight"].T).reshape(key.shape)
    group = N_HEADS // N_KV_HEADS
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    logits = np.einsum("thd,shd->hts", query, key) / np.sqrt(key.shape[2])
    logits[:, ~np.tri(len(hidden), dtype=bool)] = -np.inf
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", weight, value).reshape(len(hidden), -1)
    hidden = hidden + mixed @ weights[prefix + "attn_output.weight"].T
    normed = rms_norm(hidden, weights[prefix + "ffn_norm.weight"])
    gate = normed @ weights[prefix + "ffn_gate.weight"].T
    up = normed @ weights[prefix + "ffn_up.weight"].T
    down: F64 = (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "ffn_down.weight"].T
    return hidden + down
