from kvmem.ids cimport BlockId, SlotId


cdef class Residency:
    cdef readonly int n_budget_slots
    cdef readonly int n_reserve_slots
    cdef readonly int n_slack_slots
    cdef readonly int n_slots
    cdef readonly int n_used
    cdef BlockId *_block_of_slot   # [n_slots], -1 for free
    cdef SlotId *_slot_of_block    # [_n_known], -1 for absent; grows
    cdef BlockId _n_known

    cdef inline BlockId block_at(self, SlotId slot) noexcept nogil:
        return self._block_of_slot[slot]

    cdef inline SlotId slot_of(self, BlockId block) noexcept nogil:
        return self._slot_of_block[block] if 0 <= block < self._n_known else -1

    cdef int know(self, BlockId n_blocks) except -1
    cdef SlotId lowest_free(self) noexcept nogil
    cdef SlotId highest_used(self) noexcept nogil
    cdef int assign(self, BlockId block, SlotId slot) except -1
    cdef void release(self, BlockId block) noexcept nogil
    cdef int relocate(self, BlockId block, SlotId target) except -1
    cdef void reset(self) noexcept nogil
    cdef int n_free(self, bint reply) noexcept nogil
