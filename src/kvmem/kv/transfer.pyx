"""Copies between the tiers: the only place where blocks change their tier or slot.

One rule makes every call safe to fail (docs/memory.md): bytes before names. A target is named, as a
record, as a slot or as visible cells, only once its bytes are there, and a source loses its name
only once its successor has one. So an error at any point needs no repair but to clear the target.
"""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from time import perf_counter
from typing import NamedTuple

import numpy as np

from kvmem.errors import TransferError

from kvmem.kv.residency cimport Residency

__all__ = ["Counters", "Stager", "Transfer"]


class Counters(NamedTuple):
    """Totals since the working set was made; clear() and truncate() do not reset them.

    bytes_out are copies to the host (blocks_sealed of them); blocks_out left the device.
    blocks_kept is summed over apply() calls.
    """

    bytes_in: int
    bytes_out: int
    blocks_in: int
    blocks_out: int
    blocks_kept: int
    blocks_moved: int
    blocks_sealed: int


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
    """Seals, evicts, moves and stages in, on behalf of the working set, and counts it.

    history: the one that is on the device.
    """

    def __cinit__(self, DevicePort port not None, History history not None,
                  Residency residency not None):
        cdef BlockTable table = history.table
        self._port = port
        self._residency = residency
        self.use(history)
        self._slots = <SlotId *>calloc(residency.n_slots, sizeof(SlotId))
        self._records = <unsigned char **>calloc(residency.n_slots, sizeof(unsigned char *))
        self._payloads = <unsigned char **>calloc(residency.n_slots, sizeof(unsigned char *))
        self._metas = <const CellMeta **>calloc(residency.n_slots, sizeof(CellMeta *))
        self._unsealed = <BlockId *>calloc(residency.n_slots, sizeof(BlockId))
        self._meta = <CellMeta *>calloc(table.block_tokens, sizeof(CellMeta))
        if (self._slots == NULL or self._records == NULL or self._payloads == NULL
                or self._metas == NULL or self._unsealed == NULL or self._meta == NULL):
            raise MemoryError("no memory for the transfer lists")

    def __dealloc__(self):
        free(self._slots)
        free(self._records)
        free(self._payloads)
        free(<void *>self._metas)
        free(self._unsealed)
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

    @property
    def counters(self):
        """Counters, the totals of all transfers."""
        return Counters(
            bytes_in=self.n_in * self._port.payload_bytes,
            bytes_out=self.n_sealed * self._port.payload_bytes,
            blocks_in=self.n_in,
            blocks_out=self.n_out,
            blocks_kept=self.n_kept,
            blocks_moved=self.n_moved,
            blocks_sealed=self.n_sealed,
        )

    cdef void use(self, History history):
        """This history is on the device from now on."""
        self._table = history.table
        self._store = history.store

    cdef int n_cells_used(self) noexcept nogil:
        cdef SlotId slot
        cdef int n = 0
        for slot in range(self._residency.n_slots):
            if self._residency.block_at(slot) != -1:
                n += self._table.fill(self._residency.block_at(slot))
        return n

    cdef int highest_used_cell(self) noexcept nogil:
        cdef SlotId slot = self._residency.highest_used()
        cdef int fill
        while slot >= 0:
            if self._residency.block_at(slot) != -1:
                fill = self._table.fill(self._residency.block_at(slot))
                if fill:
                    return slot * self._table.block_tokens + fill - 1
            slot -= 1
        return -1

    cdef bint has_copy(self, BlockId block) noexcept nogil:
        return self._store.find(block, self._table.version(block)) != NULL

    cdef int seal_complete(self) except -1:
        """Seal every complete block that has no copy; all of them or none."""
        cdef SlotId slot
        cdef BlockId block
        cdef int n = 0
        for slot in range(self._residency.n_slots):
            block = self._residency.block_at(slot)
            if block != -1 and self._table.is_complete(block) and not self.has_copy(block):
                self._unsealed[n] = block
                n += 1
        sort_blocks(self._unsealed, n)
        return self.seal(self._unsealed, n)

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
            self._store.name(self._records[i], blocks[i], self._table.version(blocks[i]),
                             self._table.block_tokens)
        self.n_sealed += n
        return 0

    cdef int evict(self, const BlockId *blocks, int n) except -1:
        """Free the slots of complete resident blocks, after sealing those without a copy."""
        cdef int i, n_open = 0
        for i in range(n):
            if not self.has_copy(blocks[i]):
                self._unsealed[n_open] = blocks[i]
                n_open += 1
        self.seal(self._unsealed, n_open)
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

    cdef int cut(self, int n_tokens) except -1:
        """Forget the tokens from n_tokens on, which is not 0: WorkingSet.truncate."""
        cdef int block_tokens = self._table.block_tokens, slot
        cdef BlockId block, last = (n_tokens - 1) // block_tokens
        cdef int fill = n_tokens - last * block_tokens
        if self._residency.slot_of(last) == -1:
            self.bring(last)
        for slot in range(self._residency.n_slots):
            block = self._residency.block_at(slot)
            if block > last:
                self._port.clear(slot * block_tokens, block_tokens)
                self._residency.release(block)
        self._port.clear(self._residency.slot_of(last) * block_tokens + fill, block_tokens - fill)
        self._table.cut(n_tokens)
        if fill < block_tokens:
            last -= 1
        self._store.drop_from(last + 1)
        self._store.trim()
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

    # histories that take turns on the device

    cdef int park(self, History history) except -1:
        """Store what is on the device alone, so that the history may leave it, and note where.

        The open block gets a record of the tokens that it has. On an error nothing changed but that
        more complete blocks may have a copy.
        """
        cdef BlockId last = history.table.n_blocks - 1
        self.seal_complete()
        self.take_window(history)
        if last >= 0 and not history.table.is_complete(last):
            self.copy_open(history, history, last)  # at the end: a history that stays has none
        return 0

    cdef int take_window(self, History history) except -1:
        """Note which blocks are resident, and where."""
        cdef int[:, ::1] window = np.empty((self._residency.n_used, 2), dtype=np.int32)
        cdef BlockId block
        cdef int n = 0
        for block in np.sort(self._residency.blocks()):
            if block != -1:
                window[n, 0], window[n, 1] = block, self._residency.slot_of(block)
                n += 1
        history.window = window
        return 0

    cdef int copy_open(self, History source, History target, BlockId block) except -1:
        """Give target a record of its open block, whose rows source has at the same place.

        source: on the device or parked; it may hold more of the block than target does.
        """
        cdef int fill = target.table.fill(block)
        cdef unsigned char *record
        cdef unsigned char *payload
        cdef unsigned char *origin = NULL
        cdef SlotId slot = -1
        if source.table is self._table:
            slot = self._residency.slot_of(block)
        if slot == -1:
            origin = source.store.find_open(block, source.table.version(block),
                                            source.table.fill(block))
            if origin == NULL:
                raise TransferError(f"block {block} of the history to branch from has no record")
        target.store.know(block + 1)
        record = target.store.reserve()
        payload = target.store.payload(record)
        try:
            if slot == -1:
                memcpy(payload, target.store.payload(origin), self._port.payload_bytes)
            else:
                self._port.stage_out(&slot, &payload, 1)
        except BaseException:
            target.store.unreserve(record)
            raise
        target.table.write_meta(block, target.store.meta(record))
        target.store.name(record, block, target.table.version(block), fill)
        return 0

    cdef void leave(self, History target):
        """Free the slots of all blocks but those that target was last seen with, and shares."""
        cdef SlotId slot
        cdef BlockId block
        cdef Py_ssize_t i
        cdef dict wanted = {target.window[i, 0]: i for i in range(target.window.shape[0])}
        for slot in range(self._residency.n_slots):
            block = self._residency.block_at(slot)
            if block == -1:
                continue
            if (block in wanted and target.table.is_complete(block)
                    and target.store.find(block, self._table.version(block)) != NULL
                    and target.table.version(block) == self._table.version(block)):
                continue
            self._port.clear(slot * self._table.block_tokens, self._table.block_tokens)
            self._residency.release(block)
            self.n_out += 1

    cdef int enter(self, History target) except -1:
        """Bring in what target was last seen with, into the same slots where they are free.

        `leave` and `use` come before. On an error the caller clears the device.
        """
        cdef Py_ssize_t i
        cdef SlotId slot
        cdef int n = 0, n_wanted = <int>target.window.shape[0]
        cdef BlockId tail = -1
        cdef int[::1] blocks = np.empty(max(1, n_wanted), dtype=np.int32)
        cdef int[::1] slots = np.full(max(1, n_wanted), -1, dtype=np.int32)
        claimed = set()
        absent = [i for i in range(n_wanted)
                  if self._residency.slot_of(target.window[i, 0]) == -1]
        self.n_kept += n_wanted - len(absent)
        for i in absent:
            blocks[n] = target.window[i, 0]
            slot = target.window[i, 1]
            if slot != -1 and self._residency.block_at(slot) == -1 and slot not in claimed:
                slots[n] = slot
                claimed.add(slot)
            n += 1
        slot = 0
        for i in range(n):
            if slots[i] == -1:
                while self._residency.block_at(slot) != -1 or slot in claimed:
                    slot += 1
                slots[i] = slot
                claimed.add(slot)
        if n and not target.table.is_complete(blocks[n - 1]):  # only the last block may be open
            n -= 1
            tail = blocks[n]
            slot = slots[n]
        if n:
            self.stage_in(&blocks[0], &slots[0], n)
        if tail != -1:
            self._enter_open(target, tail, slot)
        return 0

    cdef int _enter_open(self, History target, BlockId block, SlotId slot) except -1:
        """Bring the open block in; its record is not needed any more, and would soon be wrong."""
        cdef int fill = target.table.fill(block), block_tokens = target.table.block_tokens
        cdef unsigned char *record = target.store.find_open(
            block, target.table.version(block), fill)
        cdef const unsigned char *payload
        target.table.write_meta(block, self._meta)
        if record == NULL or memcmp(
                self._meta, target.store.meta(record), fill * sizeof(CellMeta)) != 0:
            raise TransferError(f"the record of open block {block} does not hold its tokens")
        payload = target.store.payload(record)
        self._residency.know(target.table.n_blocks)
        self._port.stage_in(&slot, &payload, 1)
        self._port.publish(slot * block_tokens, self._meta, fill)
        self._residency.assign(block, slot)
        target.store.drop(block)
        self.n_in += 1
        return 0

    cdef void empty(self):
        """Free all slots: the device holds nothing."""
        cdef SlotId slot
        for slot in range(self._residency.n_slots):  # what a failed copy left has no name
            self._port.clear(slot * self._table.block_tokens, self._table.block_tokens)
        self._residency.reset()

    cdef bytes read(self, BlockId block):
        """The rows of the block's tokens: tensor after tensor, fill(block) rows each."""
        cdef SlotId slot = self._residency.slot_of(block)
        cdef unsigned char *payload
        cdef unsigned char[::1] scratch
        if slot == -1:
            return self._store.slabs.read(self._copy_of(block), self._table.fill(block))
        scratch = np.empty(self._store.slabs.record_bytes, dtype=np.uint8)
        payload = self._store.payload(&scratch[0])
        self._port.stage_out(&slot, &payload, 1)
        return self._store.slabs.read(&scratch[0], self._table.fill(block))

    cdef unsigned char *_copy_of(self, BlockId block) except NULL:
        """The block's record, checked against the history: it must hold these very tokens."""
        cdef unsigned char *record = self._store.find(block, self._table.version(block))
        if record != NULL:
            self._table.write_meta(block, self._meta)
            if memcmp(self._meta, self._store.meta(record),
                      self._table.block_tokens * sizeof(CellMeta)) == 0:
                return record
        raise TransferError(f"the host record of block {block} does not hold the block's tokens")
