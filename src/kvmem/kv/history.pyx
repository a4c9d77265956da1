"""One history as the host knows it: its tokens, its records, and what was resident when it left."""

cimport cython

import numpy as np

from kvmem.errors import StateError

from kvmem.ids cimport BlockId, SlotId
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport DevicePort

__all__ = ["History"]


@cython.final
cdef class History:
    """Several histories share slabs, budget and device; at any time one of them is on the device.

    Of the one on the device, complete blocks may be without a copy, and the open one always is.
    Of the others, every block has a record, the open one too: see Stager.park.
    Histories with a common beginning may hold the same records.

    Args:
        port, budget: as RecordSlabs has them.
        beside: another history, with which this one shares slabs and versions.
    """

    def __cinit__(self, DevicePort port not None, HostBudget budget not None, History beside=None):
        self.table = BlockTable(port.block_tokens, budget, None if beside is None else beside.table)
        self.store = HostStore(port, budget, None if beside is None else beside.store)
        self.window = np.empty((0, 2), dtype=np.int32)

    @property
    def n_tokens(self):
        return self.table.n_tokens

    @property
    def n_blocks(self):
        return self.table.n_blocks

    @property
    def n_records(self):
        """Records that it holds."""
        return self.store.n_records

    @property
    def n_shared(self):
        """Records that another history holds as well."""
        return self.store.n_shared

    @property
    def table_bytes(self):
        """Bytes of its token table."""
        return self.table.n_bytes

    @property
    def tokens(self):
        """int32 [n_tokens], read-only, no copy."""
        return self.table.tokens()

    def resident_when_it_left(self):
        """The blocks that were on the device, ascending: int32 [n]."""
        return np.array(self.window)[:, 0]

    def read(self, int block):
        """The rows of a block's tokens as WorkingSet.read gives them, from its record.

        Raises StateError if it has none, as a history on the device may.
        """
        cdef int fill
        if not 0 <= block < self.table.n_blocks:
            raise ValueError(f"block {block} is not in 0..{self.table.n_blocks - 1}")
        fill = self.table.fill(block)
        cdef unsigned char *record = self.store.find_open(block, self.table.version(block), fill)
        if record == NULL:
            raise StateError(f"block {block} has no record")
        return self.store.slabs.read(record, fill)

    cdef int take_window(self, History other) except -1:
        """Of what was resident of another history: the blocks that this one has, and its last."""
        cdef BlockId block
        cdef SlotId slot
        rows = [(block, slot) for block, slot in np.asarray(other.window)
                if block < self.table.n_blocks]
        last = self.table.n_blocks - 1
        if last not in (-1, *(row[0] for row in rows)):
            rows.append((last, -1))
        self.window = np.array(rows, dtype=np.int32).reshape(-1, 2)
        return 0

    def forget(self):
        """Give all its memory back; not for the history that is on the device."""
        self.table.forget()
        self.store.drop_from(0)
        self.store.trim()
        self.window = np.empty((0, 2), dtype=np.int32)
