"""Chunks: zeroed memory that grows by equal pieces, never moves, and is counted in a budget."""

from libc.stdlib cimport free, realloc
from libc.string cimport memset
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
        self._budget = budget

    def __dealloc__(self):
        self.shrink(0)
        free(self._chunks)

    @property
    def n_bytes(self):
        return self.n_chunks * self.chunk_bytes

    cdef unsigned char *at(self, int index) noexcept nogil:
        return self._chunks[index]

    cdef int reserve(self, int n_chunks) except -1:
        """Grow to at least n_chunks. On an error what was there stays as it was."""
        cdef unsigned char **table
        cdef void *chunk = NULL
        cdef int capacity
        while self.n_chunks < n_chunks:
            if self.n_chunks == self._capacity:
                capacity = 2 * self._capacity + 16
                table = <unsigned char **>realloc(self._chunks, capacity * sizeof(unsigned char *))
                if table == NULL:
                    raise MemoryError()
                self._chunks = table
                self._capacity = capacity
            if self._budget is not None:
                self._budget.take(self.chunk_bytes, self.what)
            if posix_memalign(&chunk, ALIGNMENT, self.chunk_bytes):
                if self._budget is not None:
                    self._budget.give_back(self.chunk_bytes)
                raise MemoryError()
            memset(chunk, 0, self.chunk_bytes)
            self._chunks[self.n_chunks] = <unsigned char *>chunk
            self.n_chunks += 1
        return 0

    cdef void shrink(self, int n_chunks) noexcept:
        """Give back the chunks from n_chunks on."""
        while self.n_chunks > n_chunks:
            self.n_chunks -= 1
            free(self._chunks[self.n_chunks])
            if self._budget is not None:
                self._budget.give_back(self.chunk_bytes)
