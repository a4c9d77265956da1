from kvmem.ids cimport CellId, Pos, SlotId, Token


# What the device must know of a token to let attention see its rows.
cdef struct CellMeta:
    Pos pos[4]     # one per M-RoPE axis; a plain model reads the first
    Token token
    int x          # place inside an image: pos[2] and pos[1], as llama.cpp derives them
    int y


cdef class DevicePort:
    cdef readonly int n_slots
    cdef readonly int block_tokens
    cdef readonly tuple row_bytes       # bytes of one token's row, per tensor, in payload order
    cdef readonly size_t payload_bytes  # of one block: block_tokens * sum(row_bytes)

    cdef int set_shape(self, int n_slots, int block_tokens, tuple row_bytes) except -1

    # The next decode call's tokens go to these cells, in order.
    cdef int place(self, const CellId *cells, int n) except -1
    # Copy the rows of n whole blocks to payloads; the bytes are there on return.
    cdef int stage_out(self, const SlotId *slots, unsigned char **payloads, int n) except -1
    # Copy the rows of n whole blocks from payloads.
    cdef int stage_in(self, const SlotId *slots, const unsigned char **payloads, int n) except -1
    # stage_in, and publish the blocks: one CellMeta per token each. A device may do both at once;
    # after an error the caller clears all the slots.
    cdef int bring_in(self, const SlotId *slots, const unsigned char **payloads,
                      const CellMeta **meta, int n) except -1
    # Copy one block's rows on the device.
    cdef int move(self, SlotId source, SlotId target) except -1
    # Let attention see n cells from `cell` on as these tokens.
    cdef int publish(self, CellId cell, const CellMeta *meta, int n) except -1
    # Forget n cells; empty ones are no error. With cells of the device it never fails.
    cdef int clear(self, CellId cell, int n) except -1
    # For check(): 1 if the cell holds a token (then meta is filled; token -1 if the device keeps
    # only positions), 0 if it is empty, -1 if the device cannot tell.
    cdef int peek(self, CellId cell, CellMeta *meta) except -2

    # Host memory, 4 KiB aligned, that this device copies fast from and to; or MemoryError.
    cdef unsigned char *slab_alloc(self, size_t n_bytes) except NULL
    cdef void slab_free(self, unsigned char *slab, size_t n_bytes) noexcept


cdef class ArrayPort(DevicePort):
    cdef readonly int n_operations
    cdef readonly size_t slab_bytes
    cdef public size_t slab_limit_bytes
    cdef int _n_placed
    cdef int _fail_at
    cdef object _rows_array
    cdef unsigned char[::1] _rows       # tensor after tensor, [n_cells, row_bytes[tensor]]
    cdef size_t[::1] _row_bytes
    cdef size_t[::1] _tensor_offset
    cdef int[:, ::1] _meta              # CellMeta per cell
    cdef unsigned char[::1] _used
    cdef int[::1] _placed

    cdef int _count_operation(self, str what, SlotId slot) except -1
    cdef void _copy_out(self, SlotId slot, unsigned char *payload, size_t n_bytes) noexcept nogil
    cdef void _copy_in(self, SlotId slot, const unsigned char *payload,
                       size_t n_bytes) noexcept nogil
    cdef int _require_empty(self, CellId cell, int n) except -1
