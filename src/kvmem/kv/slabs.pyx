"""The host memory that records of sealed blocks live in: slabs, counted against the host limit."""

cimport cython
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvmem.errors import HostCapacityError

from kvmem.kv.budget cimport HostBudget

__all__ = ["RecordSlabs", "record_bytes"]

cdef size_t PAGE_BYTES = 4096
cdef size_t LINE_BYTES = 64
cdef size_t SLAB_BYTES = 64 << 20  # docs/memory.md: large enough to copy at full rate


cdef inline size_t _round_up(size_t n, size_t unit) noexcept nogil:
    return (n + unit - 1) // unit * unit


cdef size_t _payload_offset(int block_tokens) noexcept nogil:
    return _round_up(sizeof(RecordHeader) + block_tokens * sizeof(CellMeta), LINE_BYTES)


def record_bytes(int block_tokens, size_t payload_bytes):
    """What the record of a block takes, header and meta included."""
    return _round_up(_payload_offset(block_tokens) + payload_bytes, PAGE_BYTES)


@cython.final
@cython.no_gc_clear  # __dealloc__ gives the slabs back to the port and the budget
cdef class RecordSlabs:
    """Records in slabs that grow with the histories, up to the host limit.

    A record is one contiguous piece that starts at a page:

        header (64 B) | block_tokens x CellMeta (28 B) | to a line of 64 B | payload | to a page

    Several histories may hold one record; it is free again when the last lets it go.
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
        self.payload_offset = _payload_offset(self.block_tokens)
        self.record_bytes = record_bytes(self.block_tokens, self.payload_bytes)
        self.slab_records = max(1, min(SLAB_BYTES, budget.limit // 16) // self.record_bytes)

    def __dealloc__(self):
        cdef int slab
        for slab in range(self.n_slabs):  # who held records is gone: it held these slabs
            self._slabs[slab].n_used = 0
        self.trim()
        free(self._slabs)

    def check(self):
        """Raises AssertionError unless free lists, counts and charged bytes agree."""
        cdef RecordHeader *header
        cdef int slab, n_used = 0, n_free, i
        cdef size_t n_bytes = 0
        for slab in range(self.n_slabs):
            n_used += self._slabs[slab].n_used
            n_bytes += self._slabs[slab].n_records * self.record_bytes
            n_free, i = 0, self._slabs[slab].first_free
            while i != -1 and n_free <= self._slabs[slab].n_records:
                header = <RecordHeader *>(self._slabs[slab].base + i * self.record_bytes)
                if header.block != -1 or header.n_holders:
                    raise AssertionError(f"a free record of slab {slab} says block {header.block} "
                                         f"of {header.n_holders} histories")
                n_free, i = n_free + 1, header.next_free
            if n_free + self._slabs[slab].n_used != self._slabs[slab].n_records:
                raise AssertionError(f"slab {slab} has {n_free} free records, but should have "
                                     f"{self._slabs[slab].n_records - self._slabs[slab].n_used}")
        if n_used != self.n_used:
            raise AssertionError(f"{n_used} records are used, counted {self.n_used}")
        if n_bytes != self.n_bytes or n_bytes > self._budget.used:
            raise AssertionError(f"slabs have {n_bytes} bytes, counted {self.n_bytes}, "
                                 f"charged at most {self._budget.used}")
        if self._budget.used > self._budget.limit:
            raise AssertionError(f"{self._budget.used} bytes pass the limit {self._budget.limit}")

    cdef bytes read(self, unsigned char *record, int n_tokens):
        """The rows of the record's first n_tokens: tensor after tensor."""
        cdef const unsigned char *payload = self.payload(record)
        cdef Py_ssize_t n_bytes
        rows = []
        for n_bytes in self._port.row_bytes:
            rows.append((<const char *>payload)[:n_tokens * n_bytes])
            payload += self.block_tokens * n_bytes
        return b"".join(rows)

    cdef int provide(self, int n) except -1:
        """Have n free records, so that the next n need no new memory; or CapacityError."""
        cdef int slab, n_free = -self.n_used
        for slab in range(self.n_slabs):
            n_free += self._slabs[slab].n_records
        while n_free < n:
            self._add_slab()
            n_free += self._slabs[self.n_slabs - 1].n_records
        return 0

    cdef unsigned char *reserve(self) except NULL:
        """Take a nameless record; CapacityError if the limit is reached, and nothing changes."""
        cdef int slab
        cdef unsigned char *record
        for slab in range(self.n_slabs - 1, -1, -1):
            if self._slabs[slab].first_free != -1:
                break
        else:
            self._add_slab()
            slab = self.n_slabs - 1
        record = self._slabs[slab].base + self._slabs[slab].first_free * self.record_bytes
        self._slabs[slab].first_free = (<RecordHeader *>record).next_free
        self._slabs[slab].n_used += 1
        (<RecordHeader *>record).n_holders = 1
        self.n_used += 1
        return record

    cdef void hold(self, unsigned char *record) noexcept nogil:
        """One more history holds the record."""
        (<RecordHeader *>record).n_holders += 1

    cdef void let_go(self, unsigned char *record) noexcept nogil:
        """One history less holds the record; after the last it is free."""
        cdef RecordHeader *header = <RecordHeader *>record
        cdef Slab *slab = &self._slabs[header.slab]
        header.n_holders -= 1
        if header.n_holders:
            return
        header.block = -1
        header.next_free = slab.first_free
        slab.first_free = <int>(<size_t>(record - slab.base) // self.record_bytes)
        slab.n_used -= 1
        self.n_used -= 1

    cdef void trim(self) noexcept:
        """Give back the slabs of which no record is used."""
        cdef int slab, kept = 0, i
        cdef size_t n_bytes
        for slab in range(self.n_slabs):
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
        self.n_slabs = kept

    cdef int _add_slab(self) except -1:
        cdef size_t n_records = min(<size_t>self.slab_records,
                                    (self._budget.limit - self._budget.used) // self.record_bytes)
        cdef size_t n_bytes = max(n_records, 1) * self.record_bytes
        cdef unsigned char *base
        cdef Slab *slab
        cdef RecordHeader *header
        cdef void *grown = realloc(self._slabs, (self.n_slabs + 1) * sizeof(Slab))
        cdef int i
        if grown == NULL:
            raise MemoryError("no memory for the slab list")
        self._slabs = <Slab *>grown
        self._budget.take(n_bytes, "a block's host record")
        try:
            base = self._port.slab_alloc(n_bytes)
        except BaseException as error:
            self._budget.give_back(n_bytes)
            if not isinstance(error, MemoryError):
                raise
            raise HostCapacityError(
                f"the machine has no {n_bytes} bytes left for host records, with {self.n_bytes} "
                f"in use; lower the host limit below that or free memory") from error
        slab = &self._slabs[self.n_slabs]
        slab.base = base
        slab.n_records = <int>n_records
        slab.n_used = 0
        slab.first_free = 0
        for i in range(slab.n_records):
            header = <RecordHeader *>(base + i * self.record_bytes)
            memset(header, 0, sizeof(RecordHeader))
            header.block = -1
            header.slab = self.n_slabs
            header.next_free = i + 1 if i + 1 < slab.n_records else -1
        self.n_slabs += 1
        self.n_bytes += n_bytes
        return 0
