"""The seam between the memory and a device, and a device made of NumPy arrays."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign
from libc.stdlib cimport free

import numpy as np

from kvmem.errors import StateError, TransferError

from kvmem.ids cimport CellId, SlotId

__all__ = ["ArrayPort", "DevicePort", "HostMemory"]

cdef size_t PAGE_BYTES = 4096
cdef long long MAX_CELLS = 2**31 - 1
cdef unsigned char POISON = 0xDB  # what forgotten and never written rows hold


cdef class DevicePort:
    """Mechanism of one device: which cells hold what, and copies of whole blocks.

    Policy never lives here. Methods may raise TransferError, save `clear`, which cannot fail for
    cells that exist. A subclass calls `set_shape` once before it is used.
    """

    cdef int set_shape(self, int n_slots, int block_tokens, tuple row_bytes) except -1:
        cdef size_t token_bytes = 0
        if n_slots < 1 or block_tokens < 1:
            raise ValueError(f"a device needs slots and tokens, not {n_slots} and {block_tokens}")
        if <long long>n_slots * block_tokens > MAX_CELLS:
            raise ValueError(f"{n_slots} slots of {block_tokens} tokens are more than {MAX_CELLS}")
        for n_bytes in row_bytes:
            if n_bytes < 1:
                raise ValueError(f"row_bytes is {row_bytes}, but each must be at least 1")
            token_bytes += n_bytes
        if token_bytes == 0:
            raise ValueError("row_bytes is empty, but a device holds at least one tensor")
        self.n_slots = n_slots
        self.block_tokens = block_tokens
        self.row_bytes = row_bytes
        self.payload_bytes = token_bytes * <size_t>block_tokens
        return 0

    cdef int place(self, const CellId *cells, int n) except -1:
        raise NotImplementedError("place")

    cdef int stage_out(self, const SlotId *slots, unsigned char **payloads, int n) except -1:
        raise NotImplementedError("stage_out")

    cdef int stage_in(self, const SlotId *slots, const unsigned char **payloads, int n) except -1:
        raise NotImplementedError("stage_in")

    cdef int bring_in(self, const SlotId *slots, const unsigned char **payloads,
                      const CellMeta **meta, int n) except -1:
        cdef int i
        self.stage_in(slots, payloads, n)
        for i in range(n):
            self.publish(slots[i] * self.block_tokens, meta[i], self.block_tokens)
        return 0

    cdef int move(self, SlotId source, SlotId target) except -1:
        raise NotImplementedError("move")

    cdef int publish(self, CellId cell, const CellMeta *meta, int n) except -1:
        raise NotImplementedError("publish")

    cdef int clear(self, CellId cell, int n) except -1:
        raise NotImplementedError("clear")

    cdef int peek(self, CellId cell, CellMeta *meta) except -2:
        return -1

    cdef unsigned char *slab_alloc(self, size_t n_bytes) except NULL:
        cdef void *slab = NULL
        if posix_memalign(&slab, PAGE_BYTES, n_bytes) != 0 or slab == NULL:
            raise MemoryError(f"no {n_bytes} bytes of host memory")
        return <unsigned char *>slab

    cdef void slab_free(self, unsigned char *slab, size_t n_bytes) noexcept:
        free(slab)


@cython.final
@cython.no_gc_clear  # __dealloc__ gives the bytes back to the port
cdef class HostMemory:
    """Host memory that the port's device copies fast from and to, as a buffer of bytes.

    It goes back with the last reference, and its charge behind it. MemoryError if there is none.
    """

    cdef DevicePort _port
    cdef object _charge
    cdef unsigned char *_data
    cdef size_t _n_bytes

    def __cinit__(self, DevicePort port not None, size_t n_bytes, charge=None):
        self._data = port.slab_alloc(max(n_bytes, <size_t>1))
        self._n_bytes = n_bytes
        self._port = port
        self._charge = charge

    def __dealloc__(self):
        if self._data != NULL:
            self._port.slab_free(self._data, max(self._n_bytes, <size_t>1))

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._data, self._n_bytes, 0, flags)


@cython.final
cdef class ArrayPort(DevicePort):
    """A device of host arrays that holds real bytes per cell; for tests and dry runs.

    It is stricter than a real device: rows are written only to cells that attention does not see,
    a cell becomes visible once, and forgotten rows are overwritten.

    Args:
        n_slots: blocks that the device holds.
        block_tokens: tokens of a block.
        row_bytes: bytes of one token's row, per tensor, in payload order (K and V of each layer).

    `slab_limit_bytes`: host memory that it lends at most, 0 for no limit.
    """

    def __init__(self, int n_slots, int block_tokens, row_bytes):
        self.set_shape(n_slots, block_tokens, tuple(int(n) for n in row_bytes))
        cdef Py_ssize_t n_cells = <Py_ssize_t>n_slots * block_tokens
        rows = np.array(self.row_bytes, dtype=np.uintp)
        self._row_bytes = rows
        self._tensor_offset = (np.cumsum(rows) - rows) * np.uintp(n_cells)
        self._rows_array = np.full(n_cells * int(rows.sum()), POISON, dtype=np.uint8)
        self._rows = self._rows_array
        self._meta = np.full((n_cells, sizeof(CellMeta) // sizeof(int)), -1, dtype=np.int32)
        self._used = np.zeros(n_cells, dtype=np.uint8)
        self._placed = np.zeros(n_cells, dtype=np.int32)

    # what tests do in place of a model

    def fail(self, int n):
        """Let the n-th operation from now on raise TransferError, halfway done; 0 disarms.

        Operations are the blocks of stage_out and stage_in, moves, and calls of publish and place.
        """
        if n < 0:
            raise ValueError(f"n is {n}, but must not be negative")
        self._fail_at = self.n_operations + n if n else 0

    def decode(self, const int[::1] tokens not None, const int[:, ::1] pos not None,
               const unsigned char[:, ::1] rows not None):
        """Write the rows of the first tokens that `place` announced, and make them visible.

        tokens: int32 [n]; pos: int32 [n, 4]; rows: uint8 [n, sum(row_bytes)], the tensors' rows in
        payload order. Fewer tokens than announced stand for a decode that failed midway.
        """
        cdef Py_ssize_t n = tokens.shape[0], i, tensor
        cdef size_t offset
        cdef CellId cell
        cdef CellMeta *meta
        if n > self._n_placed:
            raise StateError(f"{n} tokens, but cells for {self._n_placed}")
        if pos.shape[0] != n or pos.shape[1] != 4 or rows.shape[0] != n:
            raise ValueError("tokens, pos and rows differ in length")
        if n and <size_t>rows.shape[1] * self.block_tokens != self.payload_bytes:
            raise ValueError(f"a token's rows have {rows.shape[1]} bytes")
        for i in range(n):
            cell = self._placed[i]
            self._require_empty(cell, 1)
            offset = 0
            for tensor in range(self._row_bytes.shape[0]):
                memcpy(&self._rows[self._tensor_offset[tensor] + cell * self._row_bytes[tensor]],
                       &rows[i, offset], self._row_bytes[tensor])
                offset += self._row_bytes[tensor]
            meta = <CellMeta *>&self._meta[cell, 0]
            memcpy(meta.pos, &pos[i, 0], sizeof(meta.pos))
            meta.token = tokens[i]
            meta.x = pos[i, 2]
            meta.y = pos[i, 1]
            self._used[cell] = 1
        self._n_placed = 0

    # what tests look at

    def visible(self):
        """The cells that attention sees, ascending: int32 [n]."""
        return np.flatnonzero(np.asarray(self._used)).astype(np.int32)

    def meta(self, int cell):
        """(pos, token, x, y) of a visible cell, or None."""
        self._check_cells(cell, 1)
        if not self._used[cell]:
            return None
        row = [int(n) for n in np.asarray(self._meta)[cell]]
        return tuple(row[:4]), row[4], row[5], row[6]

    def rows(self, int cell):
        """The rows of one cell, visible or not: uint8 [sum(row_bytes)], a copy."""
        self._check_cells(cell, 1)
        return np.concatenate(self._views(cell))

    def overwrite(self, int cell, const unsigned char[::1] rows not None):
        """Damage: put other bytes under a cell, without a word to anybody."""
        self._check_cells(cell, 1)
        cdef Py_ssize_t offset = 0
        for view in self._views(cell):
            view[:] = rows[offset:offset + view.size]
            offset += view.size

    def _views(self, int cell):
        views = []
        for offset, n_bytes in zip(self._tensor_offset, self.row_bytes, strict=True):
            start = offset + cell * n_bytes
            views.append(self._rows_array[start:start + n_bytes])
        return views

    def _check_cells(self, int cell, int n):
        if cell < 0 or n < 0 or cell + n > self.n_slots * self.block_tokens:
            raise ValueError(f"cells {cell} to {cell + n} are not of this device")

    cdef int _require_empty(self, CellId cell, int n) except -1:
        cdef int i
        self._check_cells(cell, n)
        for i in range(n):
            if self._used[cell + i]:
                raise StateError(f"cell {cell + i} is visible, so its rows may not change")
        return 0

    cdef int _count_operation(self, str what, SlotId slot) except -1:
        self.n_operations += 1
        if self.n_operations == self._fail_at:
            raise TransferError(f"{what} of slot {slot} failed")
        return 0

    # the port

    cdef int place(self, const CellId *cells, int n) except -1:
        cdef int i
        self._n_placed = 0
        if n > self._placed.shape[0]:
            raise StateError(f"{n} tokens do not fit in {self._placed.shape[0]} cells")
        self._count_operation("place", cells[0] // self.block_tokens)
        for i in range(n):
            self._require_empty(cells[i], 1)
            self._placed[i] = cells[i]
        self._n_placed = n
        return 0

    cdef int stage_out(self, const SlotId *slots, unsigned char **payloads, int n) except -1:
        cdef int i
        for i in range(n):
            self._check_cells(slots[i] * self.block_tokens, self.block_tokens)
            try:
                self._count_operation("stage out", slots[i])
            except TransferError:
                self._copy_out(slots[i], payloads[i], self.payload_bytes // 2)
                raise
            with nogil:
                self._copy_out(slots[i], payloads[i], self.payload_bytes)
        return 0

    cdef int stage_in(self, const SlotId *slots, const unsigned char **payloads, int n) except -1:
        cdef int i
        for i in range(n):
            self._require_empty(slots[i] * self.block_tokens, self.block_tokens)
            try:
                self._count_operation("stage in", slots[i])
            except TransferError:
                self._copy_in(slots[i], payloads[i], self.payload_bytes // 2)
                raise
            with nogil:
                self._copy_in(slots[i], payloads[i], self.payload_bytes)
        return 0

    cdef int move(self, SlotId source, SlotId target) except -1:
        cdef Py_ssize_t tensor
        cdef size_t n_bytes
        self._check_cells(source * self.block_tokens, self.block_tokens)
        self._require_empty(target * self.block_tokens, self.block_tokens)
        self._count_operation("move", source)
        for tensor in range(self._row_bytes.shape[0]):
            n_bytes = self._row_bytes[tensor] * <size_t>self.block_tokens
            memcpy(&self._rows[self._tensor_offset[tensor] + target * n_bytes],
                   &self._rows[self._tensor_offset[tensor] + source * n_bytes], n_bytes)
        return 0

    cdef int publish(self, CellId cell, const CellMeta *meta, int n) except -1:
        cdef int i
        self._require_empty(cell, n)
        try:
            self._count_operation("publish", cell // self.block_tokens)
        except TransferError:
            n //= 2
            raise
        finally:
            for i in range(n):
                memcpy(&self._meta[cell + i, 0], &meta[i], sizeof(CellMeta))
                self._used[cell + i] = 1
        return 0

    cdef int clear(self, CellId cell, int n) except -1:
        cdef Py_ssize_t tensor
        self._check_cells(cell, n)
        if n == 0:
            return 0
        memset(&self._used[cell], 0, n)
        for tensor in range(self._row_bytes.shape[0]):
            memset(&self._rows[self._tensor_offset[tensor] + cell * self._row_bytes[tensor]],
                   POISON, n * self._row_bytes[tensor])
        return 0

    cdef int peek(self, CellId cell, CellMeta *meta) except -2:
        self._check_cells(cell, 1)
        if not self._used[cell]:
            return 0
        memcpy(meta, &self._meta[cell, 0], sizeof(CellMeta))
        return 1

    cdef unsigned char *slab_alloc(self, size_t n_bytes) except NULL:
        if self.slab_limit_bytes and self.slab_bytes + n_bytes > self.slab_limit_bytes:
            raise MemoryError(f"no {n_bytes} bytes of host memory")
        cdef unsigned char *slab = DevicePort.slab_alloc(self, n_bytes)
        self.slab_bytes += n_bytes
        return slab

    cdef void slab_free(self, unsigned char *slab, size_t n_bytes) noexcept:
        self.slab_bytes -= n_bytes
        DevicePort.slab_free(self, slab, n_bytes)

    cdef void _copy_out(self, SlotId slot, unsigned char *payload, size_t n_bytes) noexcept nogil:
        """The first n_bytes of a block's payload; less than all for a copy that breaks off."""
        cdef Py_ssize_t tensor
        cdef size_t whole, n
        for tensor in range(self._row_bytes.shape[0]):
            whole = self._row_bytes[tensor] * <size_t>self.block_tokens
            n = min(whole, n_bytes)
            memcpy(payload, &self._rows[self._tensor_offset[tensor] + slot * whole], n)
            payload += n
            n_bytes -= n
            if n_bytes == 0:
                break

    cdef void _copy_in(self, SlotId slot, const unsigned char *payload,
                       size_t n_bytes) noexcept nogil:
        cdef Py_ssize_t tensor
        cdef size_t whole, n
        for tensor in range(self._row_bytes.shape[0]):
            whole = self._row_bytes[tensor] * <size_t>self.block_tokens
            n = min(whole, n_bytes)
            memcpy(&self._rows[self._tensor_offset[tensor] + slot * whole], payload, n)
            payload += n
            n_bytes -= n
            if n_bytes == 0:
                break
