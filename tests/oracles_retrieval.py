"""Slow and clear float64 twins of the retrieval maths. They share no code with kvmem.kv."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem.kv.layout import RopeSpec

F64 = NDArray[np.float64]


def angles(spec: RopeSpec, pos: Sequence[int]) -> tuple[list[float], float]:
    """Angle of each rotated pair of dims for one token, and the magnitude of the rotation.

    Written after ggml-cpu/ops.cpp (rope_yarn, ggml_mrope_cache_init), step by step, in double.
    """
    low = high = 0.0
    magnitude = spec.attn_factor
    if spec.ext_factor:
        magnitude *= 1 + 0.1 * math.log(1 / spec.freq_scale)

        def corr_dim(turns: float) -> float:
            ratio = math.log(spec.n_ctx_orig / (turns * 2 * math.pi))
            return spec.n_dims * ratio / (2 * math.log(spec.freq_base))

        low = max(0, math.floor(corr_dim(spec.beta_fast)))
        high = min(spec.n_dims - 1, math.ceil(corr_dim(spec.beta_slow)))
    out = []
    for i in range(spec.n_dims // 2):
        axis = 0
        if spec.mode in (8, 40):
            t, y, x, _ = spec.sections
            sector = i % sum(spec.sections)
            if spec.mode == 40:
                turn = sector % 3
                limits = {0: t, 1: y, 2: x}
                axis = turn if sector < 3 * limits[turn] else 3
            else:
                axis = sum(sector >= edge for edge in (t, t + y, t + y + x))
        extrapolated = pos[axis] * spec.freq_base ** (-2 * i / spec.n_dims)
        if spec.freq_factors is not None:
            extrapolated /= spec.freq_factors[i]
        theta = spec.freq_scale * extrapolated
        if spec.ext_factor:
            ramp = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            mix = ramp * spec.ext_factor
            theta = theta * (1 - mix) + extrapolated * mix
        out.append(theta)
    return out, magnitude


def rotate(rows: NDArray[np.float32] | F64, pos: NDArray[np.int32], spec: RopeSpec | None) -> F64:
    """What RoPE makes of rows [n_rows, n_heads, head_dim] at pos [n_rows, 4].

    Weights come behind it: rows have them already, and the result has them too.
    """
    out = np.array(rows, np.float64)
    if spec is None:
        return out
    weights = np.ones(out.shape[2]) if spec.weights is None else np.array(spec.weights)
    out /= weights
    for row in range(len(out)):
        thetas, magnitude = angles(spec, [int(p) for p in pos[row]])
        for i, theta in enumerate(thetas):
            a, b = (2 * i, 2 * i + 1) if spec.mode == 0 else (i, i + spec.n_dims // 2)
            a, b = a + spec.offset, b + spec.offset
            c, s = magnitude * math.cos(theta), magnitude * math.sin(theta)
            x, y = out[row, :, a].copy(), out[row, :, b].copy()
            out[row, :, a] = x * c - y * s
            out[row, :, b] = x * s + y * c
    out *= weights
    return out


def hadamard(rows: F64, size: int) -> F64:
    """Sylvester's matrix over sqrt(size), applied to each `size` values of the last axis."""
    if not size:
        return rows
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    out: F64 = (blocks @ matrix / math.sqrt(size)).reshape(rows.shape)
    return out


def slice_means(keys: F64, slice_tokens: int) -> F64:
    """Mean of each slice: [n_tokens, ...] > [n_slices, ...]."""
    means: F64 = keys.reshape(-1, slice_tokens, *keys.shape[1:]).mean(axis=1)
    return means


def slice_scores(keys: Sequence[F64], rows: Sequence[F64], scale: float, power: int) -> F64:
    """Scores of slices: for each pair keys [n_slices, d], rows [n_rows, d]."""
    total = np.zeros(len(keys[0]))
    for k, q in zip(keys, rows, strict=True):
        logits = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T * scale
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)
        total += (p**power).sum(axis=0)
    return total


def cosine(keys: Sequence[F64], rows: Sequence[F64], layers: Sequence[int], per_block: int) -> F64:
    """The reference's score: pooled cosine, averaged over a layer's heads, then over layers.

    For each pair keys [n_slices, d], rows [n_rows, d] of all its query heads; layers: of each pair.
    """
    found: dict[int, list[F64]] = {}
    for k, q, layer in zip(keys, rows, layers, strict=True):
        mean = k.reshape(-1, per_block, k.shape[1]).mean(axis=1)
        asked = q.mean(axis=0)
        cos = [float(m @ asked / (np.linalg.norm(m) * np.linalg.norm(asked) + 1e-6)) for m in mean]
        found.setdefault(layer, []).append(np.array(cos))
    out: F64 = np.mean([np.mean(heads, axis=0) for heads in found.values()], axis=0)
    return out


def lexical(
    tokens: Sequence[int], query: Sequence[int], block: int, unit: int
) -> list[list[float]]:
    """Score of each unit of each whole block."""
    units = [
        [
            set(tokens[at : min(at + unit, start + block)])
            for at in range(start, start + block, unit)
        ]
        for start in range(0, len(tokens) - block + 1, block)
    ]
    n = sum(len(u) for u in units)
    wanted = {t for t in query if t >= 0}
    count = {t: sum(t in held for u in units for held in u) for t in wanted}
    idf = {t: math.log(1 + (n - c + 0.5) / (c + 0.5)) for t, c in count.items()}
    return [[sum(idf[t] for t in wanted & held) for held in u] for u in units]


def mean_rank(scores: Sequence[float]) -> list[float]:
    """1 for the highest; equals share the mean of the places they fill."""
    return [1 + sum(o > s for o in scores) + (sum(o == s for o in scores) - 1) / 2 for s in scores]
