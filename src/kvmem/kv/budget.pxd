cdef class HostBudget:
    cdef readonly size_t limit
    cdef readonly size_t used

    cdef int take(self, size_t n_bytes, str what) except -1
    cdef void give_back(self, size_t n_bytes) noexcept


cdef class Charge:
    cdef HostBudget _budget
    cdef readonly size_t n_bytes

    cdef void _release(self) noexcept
