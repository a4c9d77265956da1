"""KeySummaries: the mean pre-rotation key of each slice for each pair that scores, in int8.

A slice is `slice_tokens` consecutive tokens of a block; a pair is one KV head of one layer.
The keys come from the stored K rows: dequantise, undo Hadamard, undo the rotation, average.
    key[s] = scale[s] * int8,  scale[s] = half(max|mean| / 127)
Source: the KVMem paper for mean pre-RoPE keys; docs/retrieval.md for slices, int8 and pairs.

Layout for scoring: 32 slices lie side by side (a tile), so that one vector holds the same two dims
of several keys; tiles of a pair follow each other within a chunk.
"""

from libc.math cimport fabsf, rintf
from libc.stdint cimport int64_t, int8_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from cython cimport final

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.chunks cimport Chunks
from kvmem.kv.rope cimport (
    Rotation,
    hadamard,
    rotation_close,
    rotation_fill,
    rotation_open,
    rotation_undo,
)

import numpy as np

from kvmem.errors import ConfigError, StateError
from kvmem.kv.layout import KV_TYPES, Pair

__all__ = ["DEQUANTIZE_F16", "DEQUANTIZE_F32", "KeySummaries"]

cdef extern from "kernels.h" nogil:
    enum: KV_LANES
    size_t kv_key_at(int slice, int i, int dim)
    float kv_half_to_float(uint16_t half)
    uint16_t kv_float_to_half(float value)
    void kv_dequantize_f16(const void *src, float *dst, int64_t n)
    void kv_dequantize_f32(const void *src, float *dst, int64_t n)

# Addresses for LayerLayout.dequantize of the two formats that need no ggml.
DEQUANTIZE_F16 = <uintptr_t>&kv_dequantize_f16
DEQUANTIZE_F32 = <uintptr_t>&kv_dequantize_f32

# 4,096 tokens at slices of 4: small enough to waste little on a short history (targets.md counts
# host bytes), long enough that a run of tiles amortises its set-up.
cdef int CHUNK_SLICES = 1024

# Above this the scale is no finite half.
cdef float LARGEST_KEY = 8e6


@final
cdef class KeySummaries:
    """Summaries of the sealed blocks 0 .. n_blocks - 1; an open block has none.

    pairs: (layer index, KV head), unique; the order is kept. budget: see Chunks.
    One thread adds at a time; scoring may run beside it, truncate and recompute may not.
    """

    def __cinit__(self, layout, pairs, int slice_tokens=4, HostBudget budget=None):
        self.layout = layout
        self.pairs = tuple(Pair(*pair) for pair in pairs)
        self.slice_tokens = slice_tokens
        self._budget = budget
        if not self.pairs or len(set(self.pairs)) != len(self.pairs):
            raise ConfigError("pairs", list(self.pairs), "at least one, each once")
        if slice_tokens <= 0 or layout.block_tokens % slice_tokens:
            raise ConfigError(
                "slice_tokens", slice_tokens, f"a divisor of block_tokens = {layout.block_tokens}"
            )
        for layer, head in self.pairs:
            if not (0 <= layer < len(layout.layers) and 0 <= head < layout.layers[layer].n_head_kv):
                raise ConfigError("pair", (layer, head), "a layer of the layout and its KV head")
        self.slices_per_block = layout.block_tokens // slice_tokens
        self.blocks_per_chunk = max(1, CHUNK_SLICES // self.slices_per_block)
        slices = self.blocks_per_chunk * self.slices_per_block
        self.chunk_slices = (slices + KV_LANES - 1) // KV_LANES * KV_LANES
        self._plan_chunk()
        self._plan_layers()

    def _plan_chunk(self):
        cdef size_t end = 0
        cdef int pair, n_pairs = len(self.pairs)
        self._key_offset = <size_t *>calloc(n_pairs, sizeof(size_t))
        self._scale_offset = <size_t *>calloc(n_pairs, sizeof(size_t))
        self._dim = <int *>calloc(n_pairs, sizeof(int))
        if not (self._key_offset and self._scale_offset and self._dim):
            raise MemoryError()
        for pair in range(n_pairs):
            self._dim[pair] = self.layout.layers[self.pairs[pair].layer].head_dim_k
            self._key_offset[pair] = end
            end += kv_key_at(self.chunk_slices, 0, self._dim[pair])
            self._scale_offset[pair] = end
            end += <size_t>self.chunk_slices * sizeof(uint16_t)
        self._chunks = Chunks(end, "key summaries", self._budget)

    def _plan_layers(self):
        cdef int n_layers, index, slot = 0, widest_row = 0, widest_mean = 0
        cdef LayerPlan *plan
        chosen = sorted({pair.layer for pair in self.pairs})
        specs = []
        for index in chosen:
            spec = self.layout.layers[index].rope_k
            if spec is not None and spec not in specs:
                specs.append(spec)
        self._rotations = <Rotation *>calloc(max(1, len(specs)), sizeof(Rotation))
        if not self._rotations:
            raise MemoryError()
        for spec in specs:
            rotation_open(&self._rotations[self._n_rotations], spec, self.layout.block_tokens)
            self._n_rotations += 1
        self._n_layers = n_layers = len(chosen)
        self._layers = <LayerPlan *>calloc(n_layers, sizeof(LayerPlan))
        self._heads = <HeadPlan *>calloc(len(self.pairs), sizeof(HeadPlan))
        if not (self._layers and self._heads):
            raise MemoryError()
        for index in range(n_layers):
            layer = self.layout.layers[chosen[index]]
            kind = KV_TYPES[layer.type_k]
            plan = &self._layers[index]
            plan.k_offset = layer.k_offset
            plan.row_bytes = layer.k_row_bytes
            plan.head_dim = layer.head_dim_k
            plan.row_values = layer.head_dim_k * layer.n_head_kv
            plan.hadamard = layer.hadamard
            plan.dequantize = <dequantize_fn><void *><uintptr_t>layer.dequantize
            plan.first_head = slot
            plan.rotation = -1 if layer.rope_k is None else specs.index(layer.rope_k)
            for pair, (pair_layer, head) in enumerate(self.pairs):
                if pair_layer == chosen[index]:
                    self._heads[slot].kv_head = head
                    self._heads[slot].pair = pair
                    slot += 1
            plan.n_heads = slot - plan.first_head
            if plan.n_heads < layer.n_head_kv and layer.head_dim_k % kind.block == 0:
                plan.head_bytes = layer.head_dim_k // kind.block * kind.n_bytes
            widest_row = max(widest_row, plan.row_values)
            widest_mean = max(widest_mean, plan.n_heads * plan.head_dim)
        self._row = <float *>malloc(widest_row * sizeof(float))
        self._mean = <float *>malloc(widest_mean * sizeof(float))
        if not (self._row and self._mean):
            raise MemoryError()

    def __dealloc__(self):
        cdef int index
        for index in range(self._n_rotations):
            rotation_close(&self._rotations[index])
        free(self._rotations)
        free(self._key_offset)
        free(self._scale_offset)
        free(self._dim)
        free(self._layers)
        free(self._heads)
        free(self._row)
        free(self._mean)

    @property
    def n_slices(self):
        return self.n_blocks * self.slices_per_block

    @property
    def n_bytes(self):
        """Bytes held now, whole chunks."""
        return self._chunks.n_bytes

    @property
    def bytes_per_token(self):
        return self._chunks.chunk_bytes / (self.blocks_per_chunk * self.layout.block_tokens)

    def reserve(self, int n_blocks):
        """Hold memory for n_blocks, so that adding up to there cannot fail for want of it."""
        cdef int first = self.n_blocks // self.blocks_per_chunk
        if n_blocks > self.n_blocks and first < self._chunks.n_chunks:
            self._chunks.own(first)  # by reserve() of the first block here: none is being written
        self._chunks.reserve((n_blocks + self.blocks_per_chunk - 1) // self.blocks_per_chunk)

    def add(self, int block, size_t payload, const int[:, ::1] pos not None):
        """Summarise the next block.

        payload: address of its K and V rows; pos: i32 [block_tokens, 4]. Raises StateError out of
        order, CapacityError when the budget is full; then nothing changed.
        """
        cdef unsigned char *chunk
        cdef int block_tokens = self.layout.block_tokens
        if block != self.n_blocks:
            raise StateError(
                f"summary of block {block} is out of order: the next is {self.n_blocks}"
            )
        if pos.shape[0] != block_tokens or pos.shape[1] != 4:
            raise ValueError(
                f"pos is {pos.shape[0]} x {pos.shape[1]}, a block needs {block_tokens} x 4"
            )
        if payload == 0:
            raise ValueError("payload is a null address")
        self.reserve(block + 1)
        # The chunk table may be reallocated by another thread's reserve(); the chunk itself stays.
        chunk = self._chunks.at(block // self.blocks_per_chunk)
        with nogil:
            self._compute(block, <const unsigned char *>payload, &pos[0, 0], chunk)
        self.n_blocks += 1

    def truncate(self, int n_blocks):
        """Forget the blocks from n_blocks on."""
        if n_blocks < 0:
            raise ValueError(f"n_blocks is {n_blocks}")
        if n_blocks < self.n_blocks:
            self.n_blocks = n_blocks
            self._chunks.shrink((n_blocks + self.blocks_per_chunk - 1) // self.blocks_per_chunk)

    def branch(self, int n_blocks):
        """A new KeySummaries that begins with the first n_blocks of this one.

        They share memory until one of them writes. Nothing may be added meanwhile.
        """
        cdef KeySummaries fresh = KeySummaries(
            self.layout, self.pairs, self.slice_tokens, self._budget)
        if not 0 <= n_blocks <= self.n_blocks:
            raise ValueError(f"n_blocks is {n_blocks} of {self.n_blocks}")
        fresh._chunks.share(
            self._chunks, (n_blocks + self.blocks_per_chunk - 1) // self.blocks_per_chunk)
        fresh.n_blocks = n_blocks
        return fresh

    def recompute(self, pairs, records, slice_tokens=None):
        """A new KeySummaries over other pairs (or slices) of the same blocks; this one stays.

        records(n_blocks) yields (payload address, pos) of blocks 0 .. n_blocks - 1 in order. While
        it runs both are held; on an error the new one's bytes are given back.
        """
        fresh = KeySummaries(self.layout, pairs, slice_tokens or self.slice_tokens, self._budget)
        for payload, pos in records(self.n_blocks):
            fresh.add(fresh.n_blocks, payload, pos)
        if fresh.n_blocks != self.n_blocks:
            raise StateError(
                f"{fresh.n_blocks} records were given, {self.n_blocks} blocks are summarised"
            )
        return fresh

    def keys(self, int pair):
        """The keys of one pair as they score: f32 [n_slices, head_dim], a copy."""
        return self._means(pair, 1)

    def block_keys(self, int pair):
        """The mean key of each block for one pair: f32 [n_blocks, head_dim]."""
        return self._means(pair, self.slices_per_block)

    cdef _means(self, int pair, int n_together):
        """Means of n_together slices, a divisor of a block's."""
        cdef int n_blocks = self.n_blocks
        cdef int block, i, dim, row, at, rows_per_block = self.slices_per_block // n_together
        cdef float scale
        cdef const unsigned char *chunk
        cdef const uint16_t *scales
        cdef const int8_t *keys
        if not 0 <= pair < len(self.pairs):
            raise IndexError(f"pair {pair} of {len(self.pairs)}")
        dim = self._dim[pair]
        out = np.zeros((n_blocks * rows_per_block, dim), np.float32)
        cdef float[:, ::1] view = out
        for block in range(n_blocks):
            chunk = self._chunks.at(block // self.blocks_per_chunk)
            at = block % self.blocks_per_chunk * self.slices_per_block
            for row in range(block * rows_per_block, (block + 1) * rows_per_block):
                for _ in range(n_together):
                    scales = <const uint16_t *>(chunk + self._scale_offset[pair])
                    scale = kv_half_to_float(scales[at]) / n_together
                    keys = <const int8_t *>(chunk + self._key_offset[pair])
                    for i in range(dim):
                        view[row, i] += scale * keys[kv_key_at(at, i, dim)]
                    at += 1
        return out

    cdef void _compute(self, int block, const unsigned char *payload, const int *pos,
                       unsigned char *chunk) noexcept nogil:
        cdef int index, slice_, token, row, head, i, dim
        cdef int first = block % self.blocks_per_chunk * self.slices_per_block
        cdef LayerPlan *plan
        cdef HeadPlan *heads
        cdef const unsigned char *source
        cdef float *values
        cdef float *mean
        for index in range(self._n_rotations):
            rotation_fill(&self._rotations[index], pos, self.slices_per_block * self.slice_tokens)
        for index in range(self._n_layers):
            plan = &self._layers[index]
            heads = self._heads + plan.first_head
            dim = plan.head_dim
            for slice_ in range(self.slices_per_block):
                memset(self._mean, 0, plan.n_heads * dim * sizeof(float))
                for token in range(self.slice_tokens):
                    row = slice_ * self.slice_tokens + token
                    source = payload + plan.k_offset + row * plan.row_bytes
                    if plan.head_bytes == 0:
                        plan.dequantize(source, self._row, plan.row_values)
                    for head in range(plan.n_heads):
                        values = self._row + heads[head].kv_head * dim
                        if plan.head_bytes:
                            plan.dequantize(
                                source + heads[head].kv_head * plan.head_bytes, values, dim
                            )
                        if plan.hadamard:
                            hadamard(values, dim, plan.hadamard)
                        if plan.rotation >= 0:
                            rotation_undo(&self._rotations[plan.rotation], row, values)
                        mean = self._mean + head * dim
                        for i in range(dim):
                            mean[i] += values[i]
                for head in range(plan.n_heads):
                    self._write(chunk, first + slice_, heads[head].pair, self._mean + head * dim)

    cdef void _write(self, unsigned char *chunk, int at, int pair, float *total) noexcept nogil:
        """Quantise the sum of a slice's keys to place `at` of a chunk; off by half a step."""
        cdef int i, dim = self._dim[pair]
        cdef float top = 0, scale, inverse, value
        cdef bint usable = True
        cdef uint16_t half
        cdef int8_t *keys = <int8_t *>(chunk + self._key_offset[pair])
        for i in range(dim):
            value = fabsf(total[i])
            top = max(top, value)
            if not value <= LARGEST_KEY * self.slice_tokens:
                usable = False
        if not usable:
            top = 0  # a key that overflowed its type says nothing
        half = kv_float_to_half(top / self.slice_tokens / 127)
        scale = kv_half_to_float(half)
        inverse = 0 if scale == 0 else 1 / (scale * self.slice_tokens)
        for i in range(dim):
            # A scale that was rounded down would push the largest value past 127.
            value = rintf(total[i] * inverse) if inverse > 0 else 0
            value = 127 if value > 127 else -127 if value < -127 else value
            keys[kv_key_at(at, i, dim)] = <int8_t>value
        (<uint16_t *>(chunk + self._scale_offset[pair]))[at] = half
