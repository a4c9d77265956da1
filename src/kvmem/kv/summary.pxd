from libc.stdint cimport int64_t

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.chunks cimport Chunks
from kvmem.kv.rope cimport Rotation

ctypedef void (*dequantize_fn)(const void *src, float *dst, int64_t n) noexcept nogil

# How to read the heads of one layer that score.
cdef struct LayerPlan:
    size_t k_offset
    size_t row_bytes
    size_t head_bytes      # 0: read the whole row, heads do not start at a group of the type
    int head_dim
    int row_values         # of a whole row
    int hadamard
    int rotation           # index in KeySummaries._rotations, -1 for none
    int first_head         # range in the head plans
    int n_heads
    dequantize_fn dequantize

cdef struct HeadPlan:
    int kv_head
    int pair               # index in KeySummaries.pairs

# A chunk holds for each pair: int8 keys where kv_key_at says, then half scales [chunk_slices].
cdef class KeySummaries:
    cdef readonly object layout
    cdef readonly tuple pairs
    cdef readonly int slice_tokens
    cdef readonly int slices_per_block
    cdef readonly int n_blocks
    cdef readonly int blocks_per_chunk
    cdef HostBudget _budget
    cdef Chunks _chunks
    cdef int chunk_slices          # of one pair, a multiple of the lanes
    cdef size_t *_key_offset       # [n_pairs], in a chunk
    cdef size_t *_scale_offset     # [n_pairs], in a chunk
    cdef int *_dim                 # [n_pairs]
    cdef Rotation *_rotations      # one for each RopeSpec that differs
    cdef int _n_rotations
    cdef LayerPlan *_layers
    cdef int _n_layers
    cdef HeadPlan *_heads
    cdef float *_row               # scratch: one dequantised row
    cdef float *_mean              # scratch: mean keys of one layer's heads

    cdef _means(self, int pair, int n_together)
    cdef void _compute(self, int block, const unsigned char *payload, const int *pos,
                       unsigned char *chunk) noexcept nogil
    cdef void _write(self, unsigned char *chunk, int at, int pair, float *total) noexcept nogil
