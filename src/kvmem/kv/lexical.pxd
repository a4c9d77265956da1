from kvmem.kv.chunks cimport Chunks

# The distinct token ids of each unit, sorted, -1 after the last.
cdef class LexicalIndex:
    cdef readonly int block_tokens
    cdef readonly int unit_tokens
    cdef readonly int units_per_block
    cdef readonly int n_blocks
    cdef int _blocks_per_chunk
    cdef Chunks _chunks

    cdef int *_unit(self, int unit) noexcept nogil
