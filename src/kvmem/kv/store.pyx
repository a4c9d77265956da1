"""The host tier: one record for each sealed block."""

cimport cython
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvmem.errors import CapacityError

from kvmem.kv.budget cimport HostBudget

__all__ = ["HostStore"]

cdef size_t PAGE_BYTES = 4096
cdef size_t LINE_BYTES = 64
cdef size_t SLAB_BYTES = 64 << 20  # docs/memory.md: large enough to copy at full rate


cdef inline size_t _round_up(size_t n, size_t unit) noexcept nogil:
    return (n + unit - 1) // unit * unit


@cython.final
@cython.no_gc_clear  # __dealloc__ gives the slabs back to the port and the budget
cdef class HostStore:
    """Records of sealed blocks in slabs that grow with the history, up to the host limit.

    A record is one contiguous piece that starts at a page:

        header (64 B) | block_tokens x CellMeta (28 B) | to a line of 64 B | payload | to a page

    A record first is reserved, then filled, and named last: only a name makes it a copy.
    A slab holds the smaller of 64 MiB and a sixteenth of the host limit, at least one record;
    the last one before the limit may be smaller. Slabs come from the port.

    Args:
        port: gives block_tokens, payload_bytes and the memory.
        budget: charged for each slab.
    """

    def __cinit__(self, DevicePort port not None, HostBudget budget not None):
        self._port = port
        self._budget = budget
        self.block_tokens = port.block_tokens
        self.payload_bytes = port.payload_bytes
        self.payload_offset = _round_up(
            sizeof(RecordHeader) + self.block_tokens * sizeof(CellMeta), LINE_BYTES)
        self.record_bytes = _round_up(self.payload_offset + self.payload_bytes, PAGE_BYTES)
        self.slab_records = max(1, min(SLAB_BYTES, budget.limit // 16) // self.record_bytes)

    def __dealloc__(self):
        if self._slabs != NULL:
            self.drop_from(0)
            self.trim()
        free(self._slabs)
        free(self._record_of_block)

    @property
    def n_slabs(self):
        """Slabs that are allocated now."""
        return self._n_slabs

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
        if <size_t>payload.shape[0] != self.payload_bytes:
            raise ValueError(f"payload has {payload.shape[0]} bytes, not {self.payload_bytes}")
        self.know(block + 1)
        cdef unsigned char *record = self.reserve()
        cdef unsigned char[::1] target = <unsigned char[:self.payload_bytes]>self.payload(record)
        target[:] = payload
        memset(self.meta(record), 0, self.block_tokens * sizeof(CellMeta))
        self.name(record, block, version)

    def get(self, int block, long long version):
        """The stored payload as bytes; KeyError if there is none of this content."""
        cdef unsigned char *record = self.find(block, version)
        if record == NULL:
            raise KeyError(block)
        return bytes(<unsigned char[:self.payload_bytes]>self.payload(record))

    def discard(self, int block):
        """Forget the block's record, if there is one."""
        self.drop(block)

    def trim_slabs(self):
        """Give back the slabs that hold no record."""
        self.trim()

    def check(self):
        """Raises AssertionError unless names, records, slabs and charged bytes agree."""
        cdef BlockId block
        cdef RecordHeader *header
        cdef int slab, n_used = 0, n_named = 0, n_free, i
        cdef size_t n_bytes = 0
        for block in range(self._n_known):
            if self._record_of_block[block] == NULL:
                continue
            header = <RecordHeader *>self._record_of_block[block]
            n_named += 1
            if header.block != block:
                raise AssertionError(f"the record of block {block} says block {header.block}")
            if <size_t>header % PAGE_BYTES:
                raise AssertionError(f"the record of block {block} does not start at a page")
        for slab in range(self._n_slabs):
            n_used += self._slabs[slab].n_used
            n_bytes += self._slabs[slab].n_records * self.record_bytes
            n_free, i = 0, self._slabs[slab].first_free
            while i != -1 and n_free <= self._slabs[slab].n_records:
                header = <RecordHeader *>(self._slabs[slab].base + i * self.record_bytes)
                if header.block != -1:
                    raise AssertionError(f"a free record of slab {slab} says block {header.block}")
                n_free, i = n_free + 1, header.next_free
            if n_free + self._slabs[slab].n_used != self._slabs[slab].n_records:
                raise AssertionError(f"slab {slab} has {n_free} free records, but should have "
                                     f"{self._slabs[slab].n_records - self._slabs[slab].n_used}")
        if not n_named == n_used == self.n_records:
            raise AssertionError(f"{n_named} blocks have a record, {n_used} records are used, "
                                 f"counted {self.n_records}")
        if n_bytes != self.n_bytes or n_bytes > self._budget.used:
            raise AssertionError(f"slabs have {n_bytes} bytes, counted {self.n_bytes}, "
                                 f"charged at most {self._budget.used}")
        if self._budget.used > self._budget.limit:
            raise AssertionError(f"{self._budget.used} bytes pass the limit {self._budget.limit}")

    cdef unsigned char *find(self, BlockId block, long long version) noexcept nogil:
        """The record of exactly this content, or NULL: any doubt is a miss."""
        cdef RecordHeader *header
        if not 0 <= block < self._n_known or self._record_of_block[block] == NULL:
            return NULL
        header = <RecordHeader *>self._record_of_block[block]
        if (header.block != block or header.version != version
                or header.n_tokens != self.block_tokens
                or header.payload_bytes != self.payload_bytes):
            return NULL
        return self._record_of_block[block]

    cdef unsigned char *reserve(self) except NULL:
        """Take a nameless record; CapacityError if the limit is reached, and nothing changes."""
        cdef int slab
        cdef unsigned char *record
        for slab in range(self._n_slabs - 1, -1, -1):
            if self._slabs[slab].first_free != -1:
                break
        else:
            self._add_slab()
            slab = self._n_slabs - 1
        record = self._slabs[slab].base + self._slabs[slab].first_free * self.record_bytes
        self._slabs[slab].first_free = (<RecordHeader *>record).next_free
        self._slabs[slab].n_used += 1
        self.n_records += 1
        return record

    cdef void unreserve(self, unsigned char *record) noexcept nogil:
        cdef RecordHeader *header = <RecordHeader *>record
        cdef Slab *slab = &self._slabs[header.slab]
        header.block = -1
        header.next_free = slab.first_free
        slab.first_free = <int>(<size_t>(record - slab.base) // self.record_bytes)
        slab.n_used -= 1
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

    cdef void name(self, unsigned char *record, BlockId block, long long version) noexcept nogil:
        """The record now is the block's copy; its meta and payload are complete."""
        cdef RecordHeader *header = <RecordHeader *>record
        self.drop(block)
        header.block = block
        header.n_tokens = self.block_tokens
        header.version = version
        header.payload_bytes = self.payload_bytes
        self._record_of_block[block] = record

    cdef void drop(self, BlockId block) noexcept nogil:
        if 0 <= block < self._n_known and self._record_of_block[block] != NULL:
            self.unreserve(self._record_of_block[block])
            self._record_of_block[block] = NULL

    cdef void drop_from(self, BlockId block) noexcept nogil:
        while block < self._n_known:
            self.drop(block)
            block += 1

    cdef void trim(self) noexcept:
        cdef int slab, kept = 0, i
        cdef size_t n_bytes
        for slab in range(self._n_slabs):
            if self._slabs[slab].n_used == 0:
                n_bytes = self._slabs[slab].n_records * self.record_bytes
                self._port.slab_free(self._slabs[slab].base, n_bytes)
                self._budget.give_back(n_bytes)
                self.n_bytes -= n_bytes
                continue
            if kept != slab:
                self._slabs[kept] = self._slabs[slab]
                for i in range(self._slabs[kept].n_records):
                    (<RecordHeader *>(self._slabs[kept].base + i * self.record_bytes)).slab = kept
            kept += 1
        self._n_slabs = kept

    cdef int _add_slab(self) except -1:
        cdef size_t n_records = min(<size_t>self.slab_records,
                                    (self._budget.limit - self._budget.used) // self.record_bytes)
        cdef size_t n_bytes = max(n_records, 1) * self.record_bytes
        cdef unsigned char *base
        cdef Slab *slab
        cdef RecordHeader *header
        cdef void *grown = realloc(self._slabs, (self._n_slabs + 1) * sizeof(Slab))
        cdef int i
        if grown == NULL:
            raise MemoryError("no memory for the slab list")
        self._slabs = <Slab *>grown
        self._budget.take(n_bytes, "a block's host record")
        try:
            base = self._port.slab_alloc(n_bytes)
        except MemoryError as error:
            self._budget.give_back(n_bytes)
            raise CapacityError(
                f"the machine has no {n_bytes} bytes left for host records, with {self.n_bytes} "
                f"in use; lower the host limit below that or free memory") from error
        slab = &self._slabs[self._n_slabs]
        slab.base = base
        slab.n_records = <int>n_records
        slab.n_used = 0
        slab.first_free = 0
        for i in range(slab.n_records):
            header = <RecordHeader *>(base + i * self.record_bytes)
            memset(header, 0, sizeof(RecordHeader))
            header.block = -1
            header.slab = self._n_slabs
            header.next_free = i + 1 if i + 1 < slab.n_records else -1
        self._n_slabs += 1
        self.n_bytes += n_bytes
        return 0
