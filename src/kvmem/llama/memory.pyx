"""The device side of the working set, on llama.cpp's attention cache."""

cimport cython
from libcpp.vector cimport vector

import numpy as np

from kvmem.errors import StateError, TransferError

from kvmem.ids cimport CellId, SlotId
from kvmem.kv.port cimport CellMeta, DevicePort
from kvmem.llama cimport c_adapter as a
from kvmem.llama.context cimport Context

from kvmem.kv.layout import KvLayout, LayerLayout, RopeSpec
from kvmem.llama import log
from kvmem.llama.state import is_state_valid

__all__ = ["LlamaPort", "fail_cuda"]


@cython.final
@cython.no_gc_clear  # slab_free is called while others are collected
cdef class LlamaPort(DevicePort):
    """DevicePort over the bounded cache of ``context``; also reads Q while a query is decoded.

    With a DraftContext over the same context every call acts on both caches.
    """

    cdef readonly Context context
    cdef readonly object layout
    cdef object _tap_out
    cdef a.kvmem_host *_host  # of the context's device, and alive beyond it

    def __init__(self, Context context not None):
        cdef int block_tokens = context.block_tokens
        cdef int n_slots = a.kvmem_n_cells(context.memory()) // block_tokens
        assert sizeof(CellMeta) == sizeof(a.kvmem_cell_meta)
        self.context = context
        self.layout = _read_layout(context, block_tokens)
        row_bytes = _row_bytes(context.memory())
        if a.kvmem_follower(context.memory()) != NULL:
            row_bytes += _row_bytes(a.kvmem_follower(context.memory()))
        self.set_shape(n_slots, block_tokens, tuple(row_bytes))
        if self._host == NULL:
            self._host = a.kvmem_host_of(context.memory())
            if self._host == NULL:
                raise MemoryError("no memory for the block store")

    def __dealloc__(self):
        if self._tap_out is not None and self.context._memory != NULL:
            a.kvmem_tap_end(self.context._memory)  # it writes to buffers that go with this port
        a.kvmem_host_release(self._host)

    cdef int place(self, const CellId *cells, int n) except -1:
        return _check(a.kvmem_cells_place(self.context.memory(), cells, n))

    cdef int stage_out(self, const SlotId *slots, unsigned char **payloads, int n) except -1:
        cdef a.kvmem_memory *memory = self.context.memory()
        cdef int status
        with nogil:
            status = a.kvmem_rows_get(memory, slots, payloads, n)
        return _check(status)

    cdef int stage_in(self, const SlotId *slots, const unsigned char **payloads, int n) except -1:
        cdef a.kvmem_memory *memory = self.context.memory()
        cdef int status
        with nogil:
            status = a.kvmem_rows_set(memory, slots, payloads, n)
        return _check(status)

    cdef int bring_in(self, const SlotId *slots, const unsigned char **payloads,
                      const CellMeta **meta, int n) except -1:
        cdef a.kvmem_memory *memory = self.context.memory()
        cdef int status
        with nogil:
            status = a.kvmem_blocks_in(memory, slots, payloads, <const a.kvmem_cell_meta **>meta, n)
        return _check(status)

    cdef int move(self, SlotId source, SlotId target) except -1:
        cdef a.kvmem_memory *memory = self.context.memory()
        cdef int status
        with nogil:
            status = a.kvmem_rows_move(memory, source, target)
        return _check(status)

    cdef int publish(self, CellId cell, const CellMeta *meta, int n) except -1:
        return _check(a.kvmem_cells_publish(
            self.context.memory(), cell, <const a.kvmem_cell_meta *>meta, n))

    cdef int clear(self, CellId cell, int n) except -1:
        return _check(a.kvmem_cells_clear(self.context.memory(), cell, n))

    cdef int peek(self, CellId cell, CellMeta *meta) except -2:
        cdef int pos = -1
        _check(a.kvmem_cells_read(self.context.memory(), cell, &pos, 1))
        if pos < 0:
            return 0
        meta.pos[0] = meta.pos[1] = meta.pos[2] = pos
        meta.pos[3] = 0
        meta.token = -1
        meta.x = meta.y = 0
        return 1

    cdef unsigned char *slab_alloc(self, size_t n_bytes) except NULL:
        cdef unsigned char *slab
        with nogil:  # 150 MiB of pinned memory take some ten ms
            slab = a.kvmem_host_alloc(self._host, n_bytes)
        try:
            log.drain()  # it says so when memory is not pinned
        except BaseException:  # a handler of the log, or an interrupt
            if slab != NULL:
                a.kvmem_host_free(self._host, slab)
            raise
        if slab == NULL:
            raise MemoryError(f"no {n_bytes} bytes of host memory")
        return slab

    cdef void slab_free(self, unsigned char *slab, size_t n_bytes) noexcept:
        a.kvmem_host_free(self._host, slab)

    def begin_tap(self, const int[::1] layers not None, const int[::1] rows not None):
        """Read Q of the tokens ``rows``, counted over all decode calls from here on, until end_tap.

        layers: ascending indices into ``layout.layers``. rows: ascending.

        Raises StateError if a tap is open.
        """
        cdef float[:, :, ::1] view
        cdef vector[float *] out
        if layers.shape[0] == 0 or rows.shape[0] == 0:
            raise ValueError("a query tap needs layers and rows")
        for i in range(layers.shape[0]):
            if not 0 <= layers[i] < len(self.layout.layers):
                raise ValueError(f"no layer {layers[i]} among {len(self.layout.layers)}")
        for i in range(1, rows.shape[0]):
            if rows[i] <= rows[i - 1]:
                raise ValueError(f"tapped rows must ascend, but {rows[i]} follows {rows[i - 1]}")
        buffers = []
        for i in range(layers.shape[0]):
            layer = self.layout.layers[layers[i]]
            view = np.empty((rows.shape[0], layer.n_head, layer.head_dim_k), np.float32)
            buffers.append(view.base)
            out.push_back(&view[0, 0, 0])
        # an open tap writes to its own buffer, so that one is let go only when the new tap is open
        if a.kvmem_tap_begin(self.context.memory(), &layers[0], layers.shape[0],
                             &rows[0], rows.shape[0], out.data()) != a.KVMEM_OK:
            raise StateError(a.kvmem_last_error().decode("utf-8", "replace"))
        self._tap_out = buffers

    def end_tap(self):
        """Stop reading; of each layer f32 [n_rows, n_head, head_dim], rotated as attention sees it.

        Raises StateError if the rows were not all decoded.
        """
        status = a.kvmem_tap_end(self.context.memory())
        out, self._tap_out = self._tap_out, None
        if status != a.KVMEM_OK:
            raise StateError(a.kvmem_last_error().decode("utf-8", "replace"))
        return out

    @property
    def n_cells_used(self):
        """Cells that hold a token, as llama.cpp counts them."""
        return a.kvmem_cells_used(self.context.memory())

    @property
    def do_caches_agree(self):
        """Whether the cache of the MTP head, if any, holds the same positions in the same cells."""
        return a.kvmem_follower_agrees(self.context.memory()) != 0

    @property
    def is_hybrid(self):
        return a.kvmem_is_hybrid(self.context.memory()) != 0

    @property
    def recurrent_pos(self):
        """Position of the last token that the recurrent state has seen; -1 for none, None where the
        state is not usable.
        """
        cdef a.kvmem_memory *memory = self.context.memory()
        return a.kvmem_recurrent_pos(memory) if is_state_valid(self.context) else None

    @property
    def recurrent_tokens(self):
        """Tokens that the recurrent state has seen; None where it is not usable."""
        return self.context.n_seen if is_state_valid(self.context) else None

    @property
    def transfer(self):
        """How rows are copied: "generic" (ggml's copies), "cuda" (whole records), or "cuda+generic"
        where some layers are not on a CUDA device.
        """
        return a.kvmem_transfer_name(self.context.memory()).decode()

    def use_transfer(self, str name not None):
        """Copy rows this way from now on. Raises TransferError if it is not possible."""
        _check(a.kvmem_transfer_use(self.context.memory(), name.encode()))

    def copy_ceiling(self):
        """Bytes per second of a large plain copy (to the device, to the host): what no transfer
        can exceed on this machine. It takes a tenth of a second.
        """
        cdef double to_device = 0
        cdef double to_host = 0
        _check(a.kvmem_transfer_ceiling(self.context.memory(), &to_device, &to_host))
        return to_device, to_host

    def fail(self, int n, *, bint loses_device=False):
        """For tests: let the n-th block copy from now on raise TransferError; 0 disarms.

        Copies are the blocks of stage_out, stage_in and bring_in, and moves. loses_device: as an
        error that the device does not recover from.
        """
        if n < 0:
            raise ValueError(f"n is {n}, but must not be negative")
        a.kvmem_transfer_fail(self.context.memory(), n, loses_device)

    def place_cells(self, const int[::1] cells not None):
        """The tokens of the next decode go to these cells, which must be empty: int32 [n]."""
        _check(a.kvmem_cells_place(self.context.memory(), &cells[0], <int>cells.shape[0]))

    def limit_pinned(self, size_t n_bytes):
        """Pin at most this much host memory from now on; what lies beyond is plain memory."""
        a.kvmem_host_limit_pinned(self._host, n_bytes)

    def host_bytes(self):
        """(pinned bytes, plain bytes) of the host memory that is lent for records."""
        cdef size_t pinned = 0
        cdef size_t plain = 0
        a.kvmem_host_bytes(self._host, &pinned, &plain)
        return pinned, plain

    @property
    def state_bytes(self):
        """Bytes of one recurrent state, as a checkpoint holds it; 0 without such layers."""
        return a.kvmem_state_bytes(self.context.memory())

    def device_bytes(self):
        """(bytes of the attention cache, bytes of the recurrent state) on the devices."""
        cdef size_t attention = 0
        cdef size_t recurrent = 0
        a.kvmem_memory_bytes(self.context.memory(), &attention, &recurrent)
        return attention, recurrent

    @property
    def rollback_bytes(self):
        """What of the recurrent state on the devices is there so that drafts can be taken back."""
        return a.kvmem_rollback_bytes(self.context.memory())


def fail_cuda(int n, *, int count=1, bint loses_device=False):
    """For tests: let calls to CUDA fail that copies and their buffers need, of any context.

    n: the first of them, counted from now on; 0 disarms. count: how many fail. loses_device: in
    place of the first the device breaks, for the rest of the process. Returns whether what was
    armed before is still waiting. Without CUDA nothing is ever called.
    """
    if n < 0 or count < 1:
        raise ValueError(f"n is {n} and count {count}, but must be at least 0 and 1")
    return a.kvmem_cuda_fail(n, count, loses_device) != 0


cdef int _check(int status) except -1:
    if status != a.KVMEM_OK:
        log.drain()
        raise TransferError(a.kvmem_last_error().decode("utf-8", "replace"))
    return 0


cdef object _rope(const a.kvmem_rope *rope):
    if rope.n_dims == 0:
        return None
    return RopeSpec(
        n_dims=rope.n_dims,
        mode=rope.mode,
        n_ctx_orig=rope.n_ctx_orig,
        freq_base=rope.freq_base,
        freq_scale=rope.freq_scale,
        ext_factor=rope.ext_factor,
        attn_factor=rope.attn_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        sections=(rope.sections[0], rope.sections[1], rope.sections[2], rope.sections[3]),
        offset=rope.offset,
        freq_factors=tuple([rope.freq_factors[i] for i in range(rope.n_freq_factors)]) or None,
        weights=tuple([rope.weights[i] for i in range(rope.n_weights)]) or None,
    )


cdef list _row_bytes(a.kvmem_memory *memory):
    """Bytes of one token's row, per tensor of this cache, in payload order."""
    cdef a.kvmem_layer layer
    sizes = []
    for i in range(a.kvmem_n_layers(memory)):
        _check(a.kvmem_layer_get(memory, i, &layer))
        sizes += [layer.k_row_bytes, layer.v_row_bytes]
    return sizes


cdef object _read_layout(Context context, int block_tokens):
    """KvLayout of the context's cache, as the adapter found it in the graph."""
    cdef a.kvmem_memory *memory = context.memory()
    cdef a.kvmem_layer layer
    layers = []
    offset = 0
    for i in range(a.kvmem_n_layers(memory)):
        _check(a.kvmem_layer_get(memory, i, &layer))
        k_bytes = block_tokens * layer.k_row_bytes
        layers.append(LayerLayout(
            il=layer.il,
            n_head=layer.n_head,
            n_head_kv=layer.n_head_kv,
            head_dim_k=layer.head_dim_k,
            head_dim_v=layer.head_dim_v,
            type_k=layer.type_k,
            type_v=layer.type_v,
            k_offset=offset,
            v_offset=offset + k_bytes,
            k_row_bytes=layer.k_row_bytes,
            v_row_bytes=layer.v_row_bytes,
            dequantize=<size_t>layer.dequantize_k,
            rope_k=_rope(&layer.rope_k),
            rope_q=_rope(&layer.rope_q),
            hadamard=layer.hadamard,
            attn_scale=layer.kq_scale,
        ))
        offset += k_bytes + block_tokens * layer.v_row_bytes
    return KvLayout(layers=tuple(layers), block_tokens=block_tokens,
                    payload_bytes=a.kvmem_payload_bytes(memory))
