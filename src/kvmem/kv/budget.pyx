"""The one limit on host memory."""

cimport cython

from kvmem.errors import HostCapacityError

__all__ = ["Charge", "HostBudget"]


@cython.final
cdef class HostBudget:
    """Counts the bytes of host records, token tables, summaries and checkpoints against one limit.

    It allocates nothing: whoever allocates holds a Charge before, or takes and gives back. Calls
    are atomic (they keep the GIL), so several threads may share one budget.

    Args:
        limit: bytes that are never passed.
    """

    def __cinit__(self, size_t limit):
        if limit == 0:
            raise ValueError("limit is 0, but must be at least 1 byte")
        self.limit = limit

    def set_limit(self, size_t limit):
        """Move the limit. Raises CapacityError, and changes nothing, if more is in use."""
        if limit == 0:
            raise ValueError("limit is 0, but must be at least 1 byte")
        if limit < self.used:
            raise HostCapacityError(f"{self.used} bytes are in use, more than a limit of {limit}")
        self.limit = limit

    @property
    def free(self):
        """Bytes that can still be charged."""
        return self.limit - self.used

    cdef int take(self, size_t n_bytes, str what) except -1:
        """Take bytes for `what`, or raise HostCapacityError and take nothing."""
        if n_bytes > self.limit - self.used:
            raise HostCapacityError(
                f"{what} needs {n_bytes} bytes of host memory, but {self.used} of the limit of "
                f"{self.limit} are in use; raise the host limit or shorten the history")
        self.used += n_bytes
        return 0

    cdef void give_back(self, size_t n_bytes) noexcept:
        self.used -= n_bytes


@cython.final
@cython.no_gc_clear  # __dealloc__ gives the bytes back
cdef class Charge:
    """Bytes of a budget that are held as long as this lives, or until it is released.

    Raises HostCapacityError, and holds none, if there is no room.
    """

    def __cinit__(self, HostBudget budget not None, size_t n_bytes, str what="a charge"):
        self._budget = budget
        budget.take(n_bytes, what)
        self.n_bytes = n_bytes

    def __dealloc__(self):
        self._release()

    def release(self):
        """Give the bytes back. A second call does nothing."""
        self._release()

    cdef void _release(self) noexcept:
        if self.n_bytes:
            self._budget.give_back(self.n_bytes)
            self.n_bytes = 0
