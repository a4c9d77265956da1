from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport CellMeta, DevicePort


# The first 64 bytes of a record. Then block_tokens CellMeta, then the payload at payload_offset.
cdef struct RecordHeader:
    int block            # -1: nameless
    int n_tokens         # fewer than a block's: the open block of a history off the device
    long long version    # of the block's content, see BlockTable
    size_t payload_bytes
    int slab
    int next_free        # index of the next free record in this slab, -1 for none
    int n_holders        # histories that hold it; 0: free
    char unused[28]


cdef struct Slab:
    unsigned char *base
    int n_records
    int n_used
    int first_free       # index of a free record, -1 for none


cdef class RecordSlabs:
    cdef readonly int block_tokens
    cdef readonly size_t payload_bytes
    cdef readonly size_t payload_offset   # from the start of a record
    cdef readonly size_t record_bytes     # whole pages
    cdef readonly int slab_records        # records of a full-sized slab
    cdef readonly int n_used              # records that somebody holds
    cdef readonly size_t n_bytes          # of the slabs, charged to the budget
    cdef readonly int n_slabs
    cdef DevicePort _port
    cdef HostBudget _budget
    cdef Slab *_slabs

    cdef inline unsigned char *payload(self, unsigned char *record) noexcept nogil:
        return record + self.payload_offset

    cdef inline CellMeta *meta(self, unsigned char *record) noexcept nogil:
        return <CellMeta *>(record + sizeof(RecordHeader))

    cdef bytes read(self, unsigned char *record, int n_tokens)
    cdef int provide(self, int n) except -1
    cdef unsigned char *reserve(self) except NULL
    cdef void hold(self, unsigned char *record) noexcept nogil
    cdef void let_go(self, unsigned char *record) noexcept nogil
    cdef void trim(self) noexcept
    cdef int _add_slab(self) except -1
