from kvmem.kv.budget cimport HostBudget


# Memory that grows by whole chunks and never moves.
cdef class Chunks:
    cdef readonly size_t chunk_bytes
    cdef readonly int n_chunks
    cdef readonly str what
    cdef HostBudget _budget
    cdef unsigned char **_chunks
    cdef int _capacity

    cdef unsigned char *at(self, int index) noexcept nogil
    cdef int reserve(self, int n_chunks) except -1
    cdef void shrink(self, int n_chunks) noexcept
