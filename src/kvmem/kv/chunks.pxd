from kvmem.kv.budget cimport HostBudget


cdef struct Chunk:
    unsigned char *data
    int n_owners


# Memory that grows by whole chunks and never moves.
cdef class Chunks:
    cdef readonly size_t chunk_bytes
    cdef readonly int n_chunks
    cdef readonly str what
    cdef readonly HostBudget budget
    cdef Chunk **_chunks
    cdef int _capacity

    cdef unsigned char *at(self, int index) noexcept nogil
    cdef int reserve(self, int n_chunks) except -1
    cdef void shrink(self, int n_chunks) noexcept
    cdef int own(self, int index) except -1
    cdef int share(self, Chunks other, int n_chunks) except -1
    cdef int _widen(self, int n_chunks) except -1
    cdef Chunk *_make(self) except NULL
