from kvmem.ids cimport BlockId, CellId, sort_blocks
from kvmem.kv.block cimport BlockTable
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.history cimport History
from kvmem.kv.port cimport DevicePort
from kvmem.kv.residency cimport Residency
from kvmem.kv.store cimport HostStore
from kvmem.kv.transfer cimport Stager


cdef class WorkingSet:
    cdef readonly int block_tokens
    cdef readonly size_t payload_bytes    # K and V of one block
    cdef readonly bint ordered
    cdef readonly int n_pending           # tokens prepared, not yet committed or rolled back
    cdef readonly History history         # the one on the device
    cdef DevicePort _port
    cdef HostBudget _budget
    cdef BlockTable _table
    cdef Residency _residency
    cdef HostStore _store
    cdef Stager _stager
    cdef object _cells_array
    cdef CellId[::1] _cells               # of the pending tokens; [n_slots * block_tokens]
    cdef BlockId[::1] _blocks             # scratch; [n_slots]

    cdef int _use(self, History history) except -1
    cdef int _require_idle(self) except -1
    cdef int _require_block(self, int block) except -1
    cdef long long _n_new_blocks(self, long long n_tokens) noexcept nogil
    cdef int _discard(self, int n_accepted) except -1
    cdef int _open_rest(self) noexcept nogil
