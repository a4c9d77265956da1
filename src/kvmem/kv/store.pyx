"""The host tier: which record holds which block of one history."""

cimport cython
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvmem.errors import StateError

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport DevicePort
from kvmem.kv.slabs cimport RecordHeader

__all__ = ["HostStore"]

cdef size_t PAGE_BYTES = 4096


@cython.final
@cython.no_gc_clear  # __dealloc__ lets the records go
cdef class HostStore:
    """One record for each sealed block of a history, in slabs that histories may share.

    A record first is reserved, then filled, and named last: only a name makes it a copy.

    Args:
        port, budget: as RecordSlabs has them.
        beside: the store of another history, whose slabs are used too; None for slabs of its own.
    """

    def __cinit__(self, DevicePort port not None, HostBudget budget not None,
                  HostStore beside=None):
        self.slabs = RecordSlabs(port, budget) if beside is None else beside.slabs

    def __dealloc__(self):
        if self.slabs is not None:
            self.drop_from(0)
        free(self._record_of_block)

    @property
    def n_shared(self):
        """Records that another history holds as well."""
        cdef BlockId block
        cdef int n = 0
        for block in range(self._n_known):
            n += (self._record_of_block[block] != NULL
                  and (<RecordHeader *>self._record_of_block[block]).n_holders > 1)
        return n

    def addresses(self):
        """The address of each record that this history holds: a list."""
        return [<size_t>self._record_of_block[block] for block in range(self._n_known)
                if self._record_of_block[block] != NULL]

    def has(self, int block, long long version):
        """Whether a copy of exactly this content is stored."""
        return self.find(block, version) != NULL

    def address(self, int block, long long version):
        """Address of the record of exactly this content; KeyError if there is none."""
        cdef unsigned char *record = self.find(block, version)
        if record == NULL:
            raise KeyError(block)
        return <size_t>record

    def put(self, int block, long long version, const unsigned char[::1] payload not None):
        """Store a payload, in place of any older record of the block. The tokens are left zero.

        Raises CapacityError, and keeps the older record, if the limit is reached.
        """
        if block < 0 or version < 0:
            raise ValueError(f"block {block} of version {version}")
        if <size_t>payload.shape[0] != self.slabs.payload_bytes:
            raise ValueError(
                f"payload has {payload.shape[0]} bytes, not {self.slabs.payload_bytes}")
        self.know(block + 1)
        cdef unsigned char *record = self.reserve()
        cdef unsigned char[::1] target = (
            <unsigned char[:self.slabs.payload_bytes]>self.payload(record))
        target[:] = payload
        memset(self.meta(record), 0, self.slabs.block_tokens * sizeof(CellMeta))
        self.name(record, block, version, self.slabs.block_tokens)

    def get(self, int block, long long version):
        """The stored payload as bytes; KeyError if there is none of this content."""
        cdef unsigned char *record = self.find(block, version)
        if record == NULL:
            raise KeyError(block)
        return bytes(<unsigned char[:self.slabs.payload_bytes]>self.payload(record))

    def discard(self, int block):
        """Forget the block's record, if there is one."""
        self.drop(block)

    def trim_slabs(self):
        """Give back the slabs that hold no record."""
        self.trim()

    def check(self):
        """Raises AssertionError unless names and records agree, and the slabs are sound."""
        cdef BlockId block
        cdef RecordHeader *header
        cdef int n_named = 0
        for block in range(self._n_known):
            if self._record_of_block[block] == NULL:
                continue
            header = <RecordHeader *>self._record_of_block[block]
            n_named += 1
            if header.block != block:
                raise AssertionError(f"the record of block {block} says block {header.block}")
            if header.n_holders < 1:
                raise AssertionError(f"the record of block {block} is free")
            if <size_t>header % PAGE_BYTES:
                raise AssertionError(f"the record of block {block} does not start at a page")
        if n_named != self.n_records:
            raise AssertionError(f"{n_named} blocks have a record, counted {self.n_records}")
        self.slabs.check()

    cdef unsigned char *find(self, BlockId block, long long version) noexcept nogil:
        """The record of exactly this complete content, or NULL: any doubt is a miss."""
        return self.find_open(block, version, self.slabs.block_tokens)

    cdef unsigned char *find_open(self, BlockId block, long long version,
                                  int n_tokens) noexcept nogil:
        """The same for a block of n_tokens."""
        cdef RecordHeader *header
        if not 0 <= block < self._n_known or self._record_of_block[block] == NULL:
            return NULL
        header = <RecordHeader *>self._record_of_block[block]
        if (header.block != block or header.version != version or header.n_tokens != n_tokens
                or header.payload_bytes != self.slabs.payload_bytes):
            return NULL
        return self._record_of_block[block]

    cdef unsigned char *reserve(self) except NULL:
        """Take a nameless record; CapacityError if the limit is reached, and nothing changes."""
        cdef unsigned char *record = self.slabs.reserve()
        self.n_records += 1
        return record

    cdef void unreserve(self, unsigned char *record) noexcept nogil:
        self.slabs.let_go(record)
        self.n_records -= 1

    cdef int know(self, BlockId n_blocks) except -1:
        """Make room to map blocks below n_blocks; after it, name allocates nothing."""
        cdef BlockId n_known = self._n_known, block
        cdef void *grown
        if n_blocks <= n_known:
            return 0
        n_known = max(n_blocks, 2 * n_known, 64)
        grown = realloc(self._record_of_block, n_known * sizeof(unsigned char *))
        if grown == NULL:
            raise MemoryError("no memory for the record map")
        self._record_of_block = <unsigned char **>grown
        for block in range(self._n_known, n_known):
            self._record_of_block[block] = NULL
        self._n_known = n_known
        return 0

    cdef void name(self, unsigned char *record, BlockId block, long long version,
                   int n_tokens) noexcept nogil:
        """The record now is the block's copy; its meta and payload are complete."""
        cdef RecordHeader *header = <RecordHeader *>record
        self.drop(block)
        header.block = block
        header.n_tokens = n_tokens
        header.version = version
        header.payload_bytes = self.slabs.payload_bytes
        self._record_of_block[block] = record

    cdef int share(self, HostStore other, BlockId n_blocks) except -1:
        """Hold the records of the first n_blocks of another history too; this one has none yet."""
        cdef BlockId block
        for block in range(n_blocks):
            if block >= other._n_known or other._record_of_block[block] == NULL:
                raise StateError(f"block {block} has no record to share")
        self.know(n_blocks)
        for block in range(n_blocks):
            self.slabs.hold(other._record_of_block[block])
            self._record_of_block[block] = other._record_of_block[block]
        self.n_records += n_blocks
        return 0

    cdef void drop(self, BlockId block) noexcept nogil:
        if 0 <= block < self._n_known and self._record_of_block[block] != NULL:
            self.unreserve(self._record_of_block[block])
            self._record_of_block[block] = NULL

    cdef void drop_from(self, BlockId block) noexcept nogil:
        while block < self._n_known:
            self.drop(block)
            block += 1

    cdef void trim(self) noexcept:
        self.slabs.trim()
