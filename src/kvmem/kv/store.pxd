from kvmem.ids cimport BlockId
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport CellMeta, DevicePort


# The first 64 bytes of a record. Then block_tokens CellMeta, then the payload at payload_offset.
cdef struct RecordHeader:
    int block            # -1: free
    int n_tokens
    long long version    # of the block's content, see BlockTable
    size_t payload_bytes
    int slab
    int next_free        # index of the next free record in this slab, -1 for none
    char unused[32]


cdef struct Slab:
    unsigned char *base
    int n_records
    int n_used
    int first_free       # index of a free record, -1 for none


cdef class HostStore:
    cdef readonly int block_tokens
    cdef readonly size_t payload_bytes
    cdef readonly size_t payload_offset   # from the start of a record
    cdef readonly size_t record_bytes     # whole pages
    cdef readonly int slab_records        # records of a full-sized slab
    cdef readonly int n_records           # records that hold a block
    cdef readonly size_t n_bytes          # of the slabs, charged to the budget
    cdef DevicePort _port
    cdef HostBudget _budget
    cdef Slab *_slabs
    cdef int _n_slabs
    cdef unsigned char **_record_of_block
    cdef BlockId _n_known

    cdef inline unsigned char *payload(self, unsigned char *record) noexcept nogil:
        return record + self.payload_offset

    cdef inline CellMeta *meta(self, unsigned char *record) noexcept nogil:
        return <CellMeta *>(record + sizeof(RecordHeader))

    cdef unsigned char *find(self, BlockId block, long long version) noexcept nogil
    cdef unsigned char *reserve(self) except NULL
    cdef void unreserve(self, unsigned char *record) noexcept nogil
    cdef int know(self, BlockId n_blocks) except -1
    cdef void name(self, unsigned char *record, BlockId block, long long version) noexcept nogil
    cdef void drop(self, BlockId block) noexcept nogil
    cdef void drop_from(self, BlockId block) noexcept nogil
    cdef void trim(self) noexcept
    cdef int _add_slab(self) except -1
