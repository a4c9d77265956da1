"""Chunks: zeroed memory that grows by equal pieces, never moves, and is counted in a budget.

Several owners may share pieces; `own` gives one that is about to be written its own.
"""

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign

from cython cimport final, no_gc_clear

from kvmem.kv.budget cimport HostBudget

__all__ = ["Chunks"]

cdef size_t ALIGNMENT = 64


@final
@no_gc_clear  # __dealloc__ gives the bytes back to the budget
cdef class Chunks:
    """Args:
        chunk_bytes: size of a piece.
        what: names the memory in the budget's errors.
        budget: charged for each piece; None counts nothing.
    """

    def __cinit__(self, size_t chunk_bytes, str what, HostBudget budget=None):
        self.what = what
        self.chunk_bytes = (chunk_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.budget = budget

    def __dealloc__(self):
        self.shrink(0)
        free(self._chunks)

    @property
    def n_bytes(self):
        return self.n_chunks * self.chunk_bytes

    cdef unsigned char *at(self, int index) noexcept nogil:
        return self._chunks[index].data

    cdef int reserve(self, int n_chunks) except -1:
        """Grow to at least n_chunks. On an error what was there stays as it was."""
        while self.n_chunks < n_chunks:
            self._widen(self.n_chunks + 1)
            self._chunks[self.n_chunks] = self._make()
            memset(self._chunks[self.n_chunks].data, 0, self.chunk_bytes)
            self.n_chunks += 1
        return 0

    cdef int own(self, int index) except -1:
        """Make the chunk this owner's alone, by a copy where it is shared: it will be written."""
        cdef Chunk *chunk = self._chunks[index]
        if chunk.n_owners > 1:
            self._chunks[index] = self._make()
            memcpy(self._chunks[index].data, chunk.data, self.chunk_bytes)
            chunk.n_owners -= 1
        return 0

    cdef int share(self, Chunks other, int n_chunks) except -1:
        """Hold the first chunks of another of the same size and budget; this one holds none yet."""
        self._widen(n_chunks)
        while self.n_chunks < n_chunks:
            self._chunks[self.n_chunks] = other._chunks[self.n_chunks]
            self._chunks[self.n_chunks].n_owners += 1
            self.n_chunks += 1
        return 0

    cdef void shrink(self, int n_chunks) noexcept:
        """Give back the chunks from n_chunks on."""
        cdef Chunk *chunk
        while self.n_chunks > n_chunks:
            self.n_chunks -= 1
            chunk = self._chunks[self.n_chunks]
            chunk.n_owners -= 1
            if chunk.n_owners == 0:
                free(chunk.data)
                free(chunk)
                if self.budget is not None:
                    self.budget.give_back(self.chunk_bytes)

    cdef int _widen(self, int n_chunks) except -1:
        cdef Chunk **table
        cdef int capacity = 2 * n_chunks + 16
        if n_chunks > self._capacity:
            table = <Chunk **>realloc(self._chunks, capacity * sizeof(Chunk *))
            if table == NULL:
                raise MemoryError()
            self._chunks = table
            self._capacity = capacity
        return 0

    cdef Chunk *_make(self) except NULL:
        cdef Chunk *chunk
        cdef void *data = NULL
        if self.budget is not None:
            self.budget.take(self.chunk_bytes, self.what)
        chunk = <Chunk *>malloc(sizeof(Chunk))
        if chunk == NULL or posix_memalign(&data, ALIGNMENT, self.chunk_bytes):
            free(chunk)
            if self.budget is not None:
                self.budget.give_back(self.chunk_bytes)
            raise MemoryError()
        chunk.data = <unsigned char *>data
        chunk.n_owners = 1
        return chunk
