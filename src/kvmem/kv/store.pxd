from kvmem.ids cimport BlockId
from kvmem.kv.port cimport CellMeta
from kvmem.kv.slabs cimport RecordSlabs


cdef class HostStore:
    cdef readonly RecordSlabs slabs
    cdef readonly int n_records           # records that this history holds
    cdef unsigned char **_record_of_block
    cdef BlockId _n_known

    cdef inline unsigned char *payload(self, unsigned char *record) noexcept nogil:
        return self.slabs.payload(record)

    cdef inline CellMeta *meta(self, unsigned char *record) noexcept nogil:
        return self.slabs.meta(record)

    cdef unsigned char *find(self, BlockId block, long long version) noexcept nogil
    cdef unsigned char *find_open(self, BlockId block, long long version,
                                  int n_tokens) noexcept nogil
    cdef unsigned char *reserve(self) except NULL
    cdef void unreserve(self, unsigned char *record) noexcept nogil
    cdef int know(self, BlockId n_blocks) except -1
    cdef void name(self, unsigned char *record, BlockId block, long long version,
                   int n_tokens) noexcept nogil
    cdef int share(self, HostStore other, BlockId n_blocks) except -1
    cdef void drop(self, BlockId block) noexcept nogil
    cdef void drop_from(self, BlockId block) noexcept nogil
    cdef void trim(self) noexcept
