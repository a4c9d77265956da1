"""Which block sits in which slot."""

cimport cython
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

import numpy as np

from kvmem.errors import StateError

__all__ = ["Residency"]


@cython.final
cdef class Residency:
    """Block <> slot, one to one. Free slots are taken lowest first.

    Budget and reserve bound how many blocks are resident, wherever they sit; the slack is kept free
    for ordered placement to shift blocks through:

        slot 0 ........ n_budget | ........ n_budget + n_reserve | ... n_slots
             history             | one reply                     | slack
    """

    def __cinit__(self, int n_budget_slots, int n_reserve_slots=0, int n_slack_slots=0):
        cdef SlotId slot
        if n_budget_slots < 1:
            raise ValueError(f"n_budget_slots is {n_budget_slots}, but must be at least 1")
        if n_reserve_slots < 0 or n_slack_slots < 0:
            raise ValueError(f"{n_reserve_slots} reserve and {n_slack_slots} slack slots")
        self.n_budget_slots = n_budget_slots
        self.n_reserve_slots = n_reserve_slots
        self.n_slack_slots = n_slack_slots
        self.n_slots = n_budget_slots + n_reserve_slots + n_slack_slots
        self._block_of_slot = <BlockId *>calloc(self.n_slots, sizeof(BlockId))
        if self._block_of_slot == NULL:
            raise MemoryError("no memory for the slots")
        for slot in range(self.n_slots):
            self._block_of_slot[slot] = -1

    def __dealloc__(self):
        free(self._block_of_slot)
        free(self._slot_of_block)

    # doors

    def put(self, int block, int slot=-1):
        """Give a block a free slot (the lowest by default); returns the slot."""
        if block < 0:
            raise ValueError(f"block is {block}, but must not be negative")
        if slot == -1:
            slot = self.lowest_free()
            if slot == -1:
                raise StateError(f"all {self.n_slots} slots are used")
        self.know(block + 1)
        self.assign(block, slot)
        return slot

    def drop(self, int block):
        """Free the block's slot."""
        if self.slot_of(block) == -1:
            raise StateError(f"block {block} is not resident")
        self.release(block)

    def find(self, int block):
        """The block's slot, or -1."""
        return self.slot_of(block)

    def blocks(self):
        """The block of each slot, -1 for free: int32 [n_slots], a copy."""
        cdef BlockId[::1] held = np.empty(self.n_slots, dtype=np.int32)
        memcpy(&held[0], self._block_of_slot, self.n_slots * sizeof(BlockId))
        return np.asarray(held)

    def n_free_slots(self, *, bint reply=False):
        """Blocks that may still come: of the history, of a reply."""
        return self.n_free(reply)

    def check(self):
        """Raises AssertionError unless both directions agree, one to one."""
        cdef SlotId slot
        cdef BlockId block
        cdef int n_used = 0
        for slot in range(self.n_slots):
            block = self._block_of_slot[slot]
            if block == -1:
                continue
            n_used += 1
            if not self.slot_of(block) == slot:
                raise AssertionError(f"slot {slot} holds block {block}, whose slot is "
                                     f"{self.slot_of(block)}")
        for block in range(self._n_known):
            slot = self._slot_of_block[block]
            if slot != -1 and self._block_of_slot[slot] != block:
                raise AssertionError(f"block {block} is in slot {slot}, which holds "
                                     f"{self._block_of_slot[slot]}")
        if n_used != self.n_used:
            raise AssertionError(f"{n_used} slots are used, counted {self.n_used}")

    # leaves

    cdef int know(self, BlockId n_blocks) except -1:
        """Make room to map blocks below n_blocks; after it, assign allocates nothing."""
        cdef BlockId n_known = self._n_known, block
        cdef void *grown
        if n_blocks <= n_known:
            return 0
        n_known = max(n_blocks, 2 * n_known, 64)
        grown = realloc(self._slot_of_block, n_known * sizeof(SlotId))
        if grown == NULL:
            raise MemoryError("no memory for the block map")
        self._slot_of_block = <SlotId *>grown
        for block in range(self._n_known, n_known):
            self._slot_of_block[block] = -1
        self._n_known = n_known
        return 0

    cdef SlotId lowest_free(self) noexcept nogil:
        cdef SlotId slot
        for slot in range(self.n_slots):
            if self._block_of_slot[slot] == -1:
                return slot
        return -1

    cdef SlotId highest_used(self) noexcept nogil:
        cdef SlotId slot = self.n_slots - 1
        while slot >= 0 and self._block_of_slot[slot] == -1:
            slot -= 1
        return slot

    cdef int assign(self, BlockId block, SlotId slot) except -1:
        """The block is known and absent, the slot is free."""
        if not 0 <= slot < self.n_slots or self._block_of_slot[slot] != -1:
            raise StateError(f"slot {slot} is not free for block {block}")
        if not 0 <= block < self._n_known or self._slot_of_block[block] != -1:
            raise StateError(f"block {block} cannot take slot {slot}")
        self._block_of_slot[slot] = block
        self._slot_of_block[block] = slot
        self.n_used += 1
        return 0

    cdef void release(self, BlockId block) noexcept nogil:
        self._block_of_slot[self._slot_of_block[block]] = -1
        self._slot_of_block[block] = -1
        self.n_used -= 1

    cdef int relocate(self, BlockId block, SlotId target) except -1:
        if self._block_of_slot[target] != -1:
            raise StateError(f"slot {target} is not free for block {block}")
        self._block_of_slot[self._slot_of_block[block]] = -1
        self._block_of_slot[target] = block
        self._slot_of_block[block] = target
        return 0

    cdef void reset(self) noexcept nogil:
        cdef SlotId slot
        for slot in range(self.n_slots):
            if self._block_of_slot[slot] != -1:
                self.release(self._block_of_slot[slot])

    cdef int n_free(self, bint reply) noexcept nogil:
        cdef int n = self.n_budget_slots - self.n_used
        if reply:
            n += self.n_reserve_slots
        return max(n, 0)
