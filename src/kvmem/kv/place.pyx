"""Which slot each selected block takes: a pure function of a selection and a residency."""

from typing import NamedTuple

import numpy as np

from kvmem.ids cimport BlockId, SlotId
from kvmem.kv.residency cimport Residency

__all__ = ["Placement", "place"]


class Placement(NamedTuple):
    """What must change on the device. Done in this order: leaving, moves one by one, incoming.

    blocks: int32 [n], the selection, ascending.
    slots: int32 [n], the slot of each of them afterwards.
    incoming: int32 [n_in, 2], block and slot, by block.
    leaving: int32 [n_out], blocks, ascending.
    moves: int32 [n_moves, 3], block, source slot and target slot; the target is free by then.
    """

    blocks: np.ndarray
    slots: np.ndarray
    incoming: np.ndarray
    leaving: np.ndarray
    moves: np.ndarray


def place(const int[::1] blocks not None, Residency residency not None, *, bint ordered=False):
    """Plan how to hold exactly these blocks; changes nothing.

    A kept block stays in its slot, and incoming ones take the lowest free slots. Then compaction:
    while the highest used slot is above the budget region and a lower one is free, its block moves
    there, since attention's cost follows the highest used cell. Each move lowers that cell.

    With `ordered`, block number i goes to slot i: cells are in position order, whatever it moves.
    This needs one slot more than there are blocks.

    Args:
        blocks: int32 [n], ascending and unique, at most as many as slots.

    Returns:
        a Placement.
    """
    cdef Py_ssize_t n = blocks.shape[0], i
    for i in range(n):
        if blocks[i] < 0 or (i > 0 and blocks[i] <= blocks[i - 1]):
            raise ValueError("blocks must be ascending, unique and not negative")
    if n > residency.n_slots - (1 if ordered else 0):
        raise ValueError(f"{n} blocks do not fit in {residency.n_slots} slots"
                         + (" with one to spare" if ordered else ""))
    cdef _Plan plan = _Plan(blocks, residency)
    if ordered:
        plan.order()
    else:
        plan.fill()
        plan.compact()
    leaving = np.array(sorted(plan.leaving), dtype=np.int32)
    return Placement(
        blocks=np.array(blocks, dtype=np.int32),
        slots=np.array(plan.slots, dtype=np.int32),
        incoming=np.array(plan.incoming, dtype=np.int32).reshape(-1, 2),
        leaving=leaving,
        moves=np.array(plan.moves, dtype=np.int32).reshape(-1, 3),
    )


cdef class _Plan:
    """The residency as it will be: starts with the leaving blocks gone."""

    cdef const int[::1] blocks
    cdef int[::1] slots        # slot of blocks[i], -1 while it has none
    cdef int[::1] held         # index into blocks per slot, -1 for free
    cdef int n_slots
    cdef int n_budget_slots
    cdef list leaving
    cdef list incoming
    cdef list moves

    def __cinit__(self, const int[::1] blocks, Residency residency):
        cdef SlotId slot
        cdef BlockId block
        cdef Py_ssize_t i
        self.blocks = blocks
        self.n_slots = residency.n_slots
        self.n_budget_slots = residency.n_budget_slots
        self.slots = np.full(blocks.shape[0], -1, dtype=np.int32)
        self.held = np.full(self.n_slots, -1, dtype=np.int32)
        self.leaving, self.incoming, self.moves = [], [], []
        for i in range(blocks.shape[0]):
            slot = residency.slot_of(blocks[i])
            self.slots[i] = slot
            if slot != -1:
                self.held[slot] = <int>i
        for slot in range(self.n_slots):
            block = residency.block_at(slot)
            if block != -1 and self.held[slot] == -1:
                self.leaving.append(block)

    cdef int enter(self, Py_ssize_t i, SlotId slot) except -1:
        self.slots[i] = slot
        self.held[slot] = <int>i
        self.incoming.append((self.blocks[i], slot))
        return 0

    cdef int move(self, int i, SlotId target) except -1:
        self.moves.append((self.blocks[i], self.slots[i], target))
        self.held[self.slots[i]] = -1
        self.held[target] = i
        self.slots[i] = target
        return 0

    cdef int fill(self) except -1:
        cdef SlotId free_slot = 0
        cdef Py_ssize_t i
        for i in range(self.blocks.shape[0]):
            if self.slots[i] == -1:
                while self.held[free_slot] != -1:
                    free_slot += 1
                self.enter(i, free_slot)
        return 0

    cdef int compact(self) except -1:
        """Incoming blocks never move here: every slot below one is used."""
        cdef SlotId high = self.n_slots - 1, low = 0
        while True:
            while high >= self.n_budget_slots and self.held[high] == -1:
                high -= 1
            while low < high and self.held[low] != -1:
                low += 1
            if high < self.n_budget_slots or low >= high:
                return 0
            self.move(self.held[high], low)

    cdef int order(self) except -1:
        cdef Py_ssize_t n = self.blocks.shape[0], i
        cdef SlotId spare, target
        for i in range(n):
            if self.held[i] == -1:
                self.pull(<SlotId>i)
        # what is still displaced stands in closed rings: step one block aside to open each
        for i in range(n):
            if self.slots[i] != -1 and self.slots[i] != i:
                spare = self.n_slots - 1
                while self.held[spare] != -1:
                    spare -= 1
                target = self.slots[i]
                self.move(<int>i, spare)
                self.pull(target)
        for i in range(n):
            if self.slots[i] == -1:
                self.enter(i, <SlotId>i)
        return 0

    cdef int pull(self, SlotId target) except -1:
        """Bring the block that belongs to a free slot, then the one that belongs where it was."""
        cdef SlotId source
        while target < self.blocks.shape[0]:
            source = self.slots[target]
            if source == -1 or source == target:
                return 0
            self.move(target, target)
            target = source
        return 0
