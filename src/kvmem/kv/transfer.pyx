"""Copies between the tiers: the only place where blocks change their tier or slot.

One rule makes every call safe to fail (docs/memory.md): bytes before names. A target is named, as a
record, as a slot or as visible cells, only once its bytes are there, and a source loses its name
only once its successor has one. So an error at any point needs no repair but to clear the target.
"""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from time import perf_counter
from typing import NamedTuple

import numpy as np

from kvmem.errors import TransferError

from kvmem.kv.residency cimport Residency

__all__ = ["Stager", "Transfer"]


class Transfer(NamedTuple):
    """What one call changed.

    n_in blocks came from the host, n_out left the device, n_kept stayed, n_moved block copies were
    made inside the device; bytes_in and bytes_out crossed between host and device. A block that
    leaves costs bytes only if it had no host copy.
    """

    n_in: int
    n_out: int
    n_kept: int
    n_moved: int
    bytes_in: int
    bytes_out: int
    seconds: float


@cython.final
cdef class Stager:
    """Seals, evicts, moves and stages in, on behalf of the working set, and counts it."""

    def __cinit__(self, DevicePort port not None, HostStore store not None,
                  Residency residency not None, BlockTable table not None):
        self._port = port
        self._store = store
        self._residency = residency
        self._table = table
        self._fresh = []
        self._slots = <SlotId *>calloc(residency.n_slots, sizeof(SlotId))
        self._records = <unsigned char **>calloc(residency.n_slots, sizeof(unsigned char *))
        self._payloads = <unsigned char **>calloc(residency.n_slots, sizeof(unsigned char *))
        self._metas = <const CellMeta **>calloc(residency.n_slots, sizeof(CellMeta *))
        self._meta = <CellMeta *>calloc(table.block_tokens, sizeof(CellMeta))
        if (self._slots == NULL or self._records == NULL or self._payloads == NULL
                or self._metas == NULL or self._meta == NULL):
            raise MemoryError("no memory for the transfer lists")

    def __dealloc__(self):
        free(self._slots)
        free(self._records)
        free(self._payloads)
        free(<void *>self._metas)
        free(self._meta)

    def perform(self, placement):
        """Carry out a Placement; returns a Transfer.

        Raises:
            CapacityError: a leaving block has no copy and the host limit is reached; nothing
                changed.
            TransferError: a copy failed. Leaving blocks may have left with a copy, moves may be
                done, incoming blocks are absent.
        """
        cdef const int[::1] leaving = placement.leaving
        cdef const int[:, ::1] moves = placement.moves
        cdef const int[::1] blocks = np.ascontiguousarray(placement.incoming[:, 0])
        cdef const int[::1] slots = np.ascontiguousarray(placement.incoming[:, 1])
        cdef Py_ssize_t i
        cdef long long n_sealed = self.n_sealed
        start = perf_counter()
        if leaving.shape[0]:
            self.evict(&leaving[0], <int>leaving.shape[0])
        for i in range(moves.shape[0]):
            self.move(moves[i, 0], moves[i, 2])
        if blocks.shape[0]:
            self.stage_in(&blocks[0], &slots[0], <int>blocks.shape[0])
        n_kept = placement.blocks.shape[0] - blocks.shape[0]
        self.n_kept += n_kept
        return Transfer(
            n_in=blocks.shape[0],
            n_out=leaving.shape[0],
            n_kept=n_kept,
            n_moved=moves.shape[0],
            bytes_in=blocks.shape[0] * self._port.payload_bytes,
            bytes_out=(self.n_sealed - n_sealed) * self._port.payload_bytes,
            seconds=perf_counter() - start,
        )

    cdef bint has_copy(self, BlockId block) noexcept nogil:
        return self._store.find(block, self._table.version(block)) != NULL

    cdef int seal(self, const BlockId *blocks, int n) except -1:
        """Copy complete resident blocks to the host; all of them or none."""
        cdef int i, n_reserved = 0
        if n == 0:
            return 0
        self._store.know(self._table.n_blocks)
        try:
            for i in range(n):
                self._records[i] = self._store.reserve()
                n_reserved += 1
                self._payloads[i] = self._store.payload(self._records[i])
                self._slots[i] = self._residency.slot_of(blocks[i])
            self._port.stage_out(self._slots, self._payloads, n)
        except BaseException:
            for i in range(n_reserved):
                self._store.unreserve(self._records[i])
            raise
        for i in range(n):
            self._table.write_meta(blocks[i], self._store.meta(self._records[i]))
            self._store.name(self._records[i], blocks[i], self._table.version(blocks[i]))
            self._fresh.append(blocks[i])
        self.n_sealed += n
        return 0

    cdef int evict(self, const BlockId *blocks, int n) except -1:
        """Free the slots of complete resident blocks, after sealing those without a copy."""
        cdef int i, n_open = 0
        cdef int[::1] unsealed = np.empty(n, dtype=np.int32)
        for i in range(n):
            if not self.has_copy(blocks[i]):
                unsealed[n_open] = blocks[i]
                n_open += 1
        if n_open:
            self.seal(&unsealed[0], n_open)
        for i in range(n):
            self._port.clear(self._residency.slot_of(blocks[i]) * self._table.block_tokens,
                             self._table.block_tokens)
            self._residency.release(blocks[i])
        self.n_out += n
        return 0

    cdef int move(self, BlockId block, SlotId target) except -1:
        """Copy a resident block to a free slot, then free the old one."""
        cdef SlotId source = self._residency.slot_of(block)
        cdef int block_tokens = self._table.block_tokens
        try:
            self._port.move(source, target)
            self._table.write_meta(block, self._meta)
            self._port.publish(target * block_tokens, self._meta, self._table.fill(block))
        except BaseException:
            self._port.clear(target * block_tokens, block_tokens)
            raise
        self._residency.relocate(block, target)
        self._port.clear(source * block_tokens, block_tokens)
        self.n_moved += 1
        return 0

    cdef int stage_in(self, const BlockId *blocks, const SlotId *slots, int n) except -1:
        """Bring absent blocks into free slots; all of them or none."""
        cdef int i, block_tokens = self._table.block_tokens
        self._residency.know(self._table.n_blocks)
        for i in range(n):
            self._records[i] = self._copy_of(blocks[i])
            self._payloads[i] = self._store.payload(self._records[i])
            self._metas[i] = self._store.meta(self._records[i])
        try:
            self._port.bring_in(slots, <const unsigned char **>self._payloads, self._metas, n)
        except BaseException:
            for i in range(n):
                self._port.clear(slots[i] * block_tokens, block_tokens)
            raise
        for i in range(n):
            self._residency.assign(blocks[i], slots[i])
        self.n_in += n
        return 0

    cdef int bring(self, BlockId block) except -1:
        """Make an absent block resident: in the lowest free slot, or in that of another block."""
        cdef SlotId slot = self._residency.lowest_free()
        cdef BlockId leaving
        if slot == -1:
            leaving = self._who_leaves_for(block)
            slot = self._residency.slot_of(leaving)
            self.evict(&leaving, 1)
        return self.stage_in(&block, &slot, 1)

    cdef BlockId _who_leaves_for(self, BlockId incoming) noexcept nogil:
        """Make way for a block whose successors are about to be forgotten.

        First one of those goes, best with a copy. Else the least recently selected: what is
        resident was in the last selection or was read since, so that is the lowest id. Block 0 goes
        last, as attention leans on it. The last token's block stays; when all slots are used there
        is another, since there are three slots at least.
        """
        cdef SlotId slot
        cdef BlockId block, best = -1
        cdef int rank, best_rank = 4
        for slot in range(self._residency.n_slots):
            block = self._residency.block_at(slot)
            if block == -1 or block == self._table.n_blocks - 1:
                continue
            if block > incoming:
                rank = 0 if self.has_copy(block) else 1
            else:
                rank = 2 if block > 0 else 3
            if rank < best_rank or (rank == best_rank and block < best):
                best, best_rank = block, rank
        return best

    cdef bytes read(self, BlockId block):
        """The rows of the block's tokens: tensor after tensor, fill(block) rows each."""
        cdef unsigned char[::1] scratch
        cdef unsigned char *payload
        cdef SlotId slot = self._residency.slot_of(block)
        cdef Py_ssize_t fill = self._table.fill(block), n_bytes
        if slot == -1:
            payload = self._store.payload(self._copy_of(block))
        else:
            scratch = np.empty(self._port.payload_bytes, dtype=np.uint8)
            payload = &scratch[0]
            self._port.stage_out(&slot, &payload, 1)
        rows = []
        for n_bytes in self._port.row_bytes:
            rows.append((<const char *>payload)[:fill * n_bytes])
            payload += self._table.block_tokens * n_bytes
        return b"".join(rows)

    cdef unsigned char *_copy_of(self, BlockId block) except NULL:
        """The block's record, checked against the history: it must hold these very tokens."""
        cdef unsigned char *record = self._store.find(block, self._table.version(block))
        if record != NULL:
            self._table.write_meta(block, self._meta)
            if memcmp(self._meta, self._store.meta(record),
                      self._table.block_tokens * sizeof(CellMeta)) == 0:
                return record
        raise TransferError(f"the host record of block {block} does not hold the block's tokens")

    cdef list take_fresh(self):
        """Blocks sealed since the last call, in order of sealing."""
        fresh, self._fresh = self._fresh, []
        return fresh

    cdef int forget_fresh(self, BlockId first) except -1:
        """Blocks from `first` on are not to be reported: their records are gone."""
        if self._fresh:
            self._fresh = [block for block in self._fresh if block < first]
        return 0
