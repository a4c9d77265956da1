from kvmem.ids cimport BlockId, SlotId, sort_blocks
from kvmem.kv.block cimport BlockTable
from kvmem.kv.history cimport History
from kvmem.kv.port cimport CellMeta, DevicePort
from kvmem.kv.residency cimport Residency
from kvmem.kv.store cimport HostStore


cdef class Stager:
    cdef readonly long long n_sealed     # blocks copied to the host, since the start
    cdef readonly long long n_in         # blocks staged in
    cdef readonly long long n_out        # blocks that left the device
    cdef readonly long long n_kept
    cdef readonly long long n_moved
    cdef DevicePort _port
    cdef HostStore _store
    cdef Residency _residency
    cdef BlockTable _table
    # one entry per slot: no call needs more
    cdef SlotId *_slots
    cdef unsigned char **_records
    cdef unsigned char **_payloads
    cdef const CellMeta **_metas
    cdef BlockId *_unsealed              # blocks that seal() is to copy
    cdef CellMeta *_meta                 # one block

    cdef void use(self, History history)
    cdef int n_cells_used(self) noexcept nogil
    cdef int highest_used_cell(self) noexcept nogil
    cdef bint has_copy(self, BlockId block) noexcept nogil
    cdef int seal_complete(self) except -1
    cdef int seal(self, const BlockId *blocks, int n) except -1
    cdef int evict(self, const BlockId *blocks, int n) except -1
    cdef int move(self, BlockId block, SlotId target) except -1
    cdef int stage_in(self, const BlockId *blocks, const SlotId *slots, int n) except -1
    cdef int cut(self, int n_tokens) except -1
    cdef int bring(self, BlockId block) except -1
    cdef int park(self, History history) except -1
    cdef int take_window(self, History history) except -1
    cdef int copy_open(self, History source, History target, BlockId block) except -1
    cdef void leave(self, History target)
    cdef int enter(self, History target) except -1
    cdef int _enter_open(self, History target, BlockId block, SlotId slot) except -1
    cdef void empty(self)
    cdef bytes read(self, BlockId block)
    cdef BlockId _who_leaves_for(self, BlockId incoming) noexcept nogil
    cdef unsigned char *_copy_of(self, BlockId block) except NULL
