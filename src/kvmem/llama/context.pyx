"""A llama_context: batches in, logits out."""

import threading
from typing import NamedTuple

import numpy as np

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kvmem.errors import Cancelled, CapacityError, ConfigError, DecodeError, ModelError, StateError
from kvmem.kv import layout
from kvmem.llama cimport c_adapter as a
from kvmem.llama cimport c_llama as c
from kvmem.llama import log
from kvmem.llama.runtime import KV_TYPES

__all__ = ["CancelToken", "Context", "Share", "shares_of"]

cdef enum:
    MAX_SHARES = 32

FLASH_ATTENTION = {
    "on": <int>c.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": <int>c.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": <int>c.LLAMA_FLASH_ATTN_TYPE_AUTO,
}

# How often a decode looks for Ctrl-C; taking the GIL costs microseconds.
cdef double SIGNAL_PERIOD_S = 0.05


cdef class CancelToken:
    """Set from any thread to end the decode call that watches it."""

    def set(self):
        self._set = 1

    def clear(self):
        self._set = 0

    def is_set(self):
        return self._set != 0


class Share(NamedTuple):
    """What a context takes of one device, in bytes.

    device: ggml's name of it; "" for the memory of the host, for which free and total are 0.
    compute: the buffers of llama.cpp's graphs.
    """

    device: str
    free: int
    total: int
    weights: int
    cells: int
    states: int
    compute: int


def shares_of(Model model not None, *, int n_ctx, int n_cells, int n_batch, int n_ubatch,
              str type_k, str type_v, str flash_attn="on", int n_rs_seq=0, bint replay=False,
              tuple draft_types=None):
    """What a Context of these settings would take: a Share for each device.

    llama.cpp reserves it as ever, without memory for cells and graphs. The model may be one without
    weights (dry). draft_types: of K and V of the head that drafts; None for no such head.

    Raises as Context does, and CapacityError where not even a recurrent state can be had.
    """
    cdef c.llama_context_params params
    cdef c.llama_context_params draft
    cdef c.llama_context_params *draft_ptr = NULL
    cdef c.llama_model *model_ptr = model.get()
    cdef a.kvmem_share shares[MAX_SHARES]
    cdef unsigned int n = MAX_SHARES
    cdef int status
    _set_params(&params, model, n_ctx, n_batch, n_ubatch, type_k, type_v, flash_attn, 1, 1, True, 1,
                n_rs_seq)
    if draft_types is not None:
        draft = params
        draft.type_k = <c.ggml_type><int>KV_TYPES[draft_types[0]]
        draft.type_v = <c.ggml_type><int>KV_TYPES[draft_types[1]]
        draft_ptr = &draft
    with nogil:
        status = a.kvmem_shares_of(
            model_ptr, &params, n_cells, replay, draft_ptr, shares, &n)
    errors = log.drain()
    if status != a.KVMEM_OK:
        _check_status(model, status)
        reason = a.kvmem_last_error().decode("utf-8", "replace")
        what = f"cannot tell what {n_cells} cells take: {reason}"
        if status != a.KVMEM_ERR_NO_MEMORY:
            raise StateError(what)
        raise CapacityError("; ".join([what, *errors]))
    return _shares(shares, n)


cdef list _shares(const a.kvmem_share *shares, unsigned int n):
    return [Share(shares[i].device.decode(), shares[i].free, shares[i].total, shares[i].weights,
                  shares[i].cells, shares[i].states, shares[i].compute) for i in range(n)]


cdef double _now_s() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef bint _should_abort(void *data) noexcept nogil:
    """ggml asks between nodes, on the thread that called decode (the CPU back end alone does)."""
    cdef double now
    if (<Context>data)._cancel._set:
        return True
    if not (<Context>data)._check_signals:
        return False
    now = _now_s()
    if now - (<Context>data)._checked_s < SIGNAL_PERIOD_S:
        return False
    (<Context>data)._checked_s = now
    with gil:
        try:
            PyErr_CheckSignals()
        except BaseException as error:
            (<Context>data)._interrupt = error
            return True
        return False


@cython.no_gc_clear  # __dealloc__ needs the model
cdef class Context:
    """Owns one llama_context over ``model``.

    Args:
        n_ctx: the logical workspace, in tokens.
        n_cells: cells of a bounded, placeable attention cache; 0 for a stock one of n_ctx cells.
        block_tokens: cells of one slot, for n_cells.
        n_batch, n_ubatch: most tokens of one decode call, and of one graph.
        type_k, type_v: names in runtime.KV_TYPES.
        flash_attn: "on", "off" or "auto".
        n_seq_max: sequences, of a unified cache.
        n_rs_seq: tokens that a recurrent state can be rolled back, by a snapshot for each.
        replay: by their recorded inputs instead.

    Raises:
        ConfigError: a size below 1, a name that is not known.
        ModelError: the model cannot continue a text, or its cache cannot be tiered; the message
            says why.
        CapacityError: the memory for it cannot be had.
    """

    def __init__(self, Model model not None, *, int n_ctx, int n_cells=0, int block_tokens=0,
                 int n_batch=512, int n_ubatch=512, str type_k="f16", str type_v="f16",
                 str flash_attn="on", int n_threads=1, int n_threads_batch=1,
                 bint offload_kqv=True, int n_seq_max=1, int n_rs_seq=0, bint replay=False):
        cdef c.llama_context_params params
        cdef c.llama_model *model_ptr = model.get()
        cdef int status = 0
        if self._ptr != NULL:
            raise StateError("a Context is made once")
        if model.is_dry:
            raise StateError(f"the model {model.path} was opened without its weights")
        if n_cells < 0 or (n_cells and not 1 <= block_tokens <= n_cells):
            raise ConfigError("n_cells", n_cells, f"0 or at least one block of {block_tokens}")
        if replay and (n_cells == 0 or n_rs_seq < 1 or n_seq_max > 1):
            raise ConfigError("replay", replay, "with n_cells, n_rs_seq and one sequence, or off")
        _set_params(&params, model, n_ctx, n_batch, n_ubatch, type_k, type_v, flash_attn,
                    n_threads, n_threads_batch, offload_kqv, n_seq_max, n_rs_seq)
        self.model = model
        self.block_tokens = block_tokens
        self._cancel = CancelToken()
        with nogil:
            if n_cells:
                status = a.kvmem_context_init(
                    model_ptr, &params, n_cells, block_tokens, replay, &self._ptr, &self._memory)
            else:
                self._ptr = c.llama_init_from_model(model_ptr, params)
        if self._ptr != NULL:
            model.acquire()  # before an interrupt, or a handler of the log, can come between
        errors = log.drain()
        if self._ptr == NULL:
            reason = "llama.cpp could not create it"
            if n_cells:
                reason = a.kvmem_last_error().decode("utf-8", "replace")
            _check_status(model, status)
            what = f"no context of {n_cells or n_ctx} cells in batches of {n_ubatch}: {reason}"
            raise CapacityError("; ".join([what, *errors]))
        if c.llama_get_memory(self._ptr) == NULL:
            self._free()
            _check_continues(model, a.KVMEM_NO_CACHE)
        self.n_vocab = model_n_vocab(model)
        self.n_batch = c.llama_n_batch(self._ptr)
        self.n_ubatch = c.llama_n_ubatch(self._ptr)
        self.n_ctx = c.llama_n_ctx(self._ptr)
        self.n_rs_seq = c.llama_n_rs_seq(self._ptr)
        self.n_seq_max = n_seq_max
        self._params = params
        self._batch = c.llama_batch_init(self.n_batch, 0, n_seq_max)
        c.llama_set_abort_callback(self._ptr, <c.ggml_abort_callback>_should_abort, <void *>self)

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        cdef c.llama_context *ptr = self._ptr
        self._ptr = NULL
        self._memory = NULL
        if ptr != NULL:
            c.llama_batch_free(self._batch)
            with nogil:
                c.llama_free(ptr)
            self.model.release()

    cdef c.llama_context *get(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the context is closed")
        return self._ptr

    cdef a.kvmem_memory *memory(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the context is closed")
        if self._memory == NULL:
            raise StateError("a stock context has no placeable memory")
        return self._memory

    def close(self):
        """Free the context. A second call does nothing."""
        self._free()
        log.drain()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def n_threads_batch(self):
        """Threads of a prefill batch, as they were given."""
        return self._params.n_threads_batch

    @property
    def is_closed(self):
        return self._ptr == NULL

    def shares(self):
        """What it takes with its weights, a Share for each device; not of a stock context."""
        cdef a.kvmem_share shares[MAX_SHARES]
        cdef unsigned int n = MAX_SHARES
        if a.kvmem_shares(self.memory(), shares, &n) != a.KVMEM_OK:
            raise StateError(a.kvmem_last_error().decode("utf-8", "replace"))
        return _shares(shares, n)

    def decode(self, const int[::1] tokens not None, const int[::1] pos not None, *,
               outputs="last", seqs=(0,), CancelToken cancel=None, meanwhile=None):
        """Run one batch through the model; the GIL is released.

        tokens, pos: int32 [n], 1 <= n <= n_batch. outputs: "last", "all", "none" or a sequence of
        token indices, the rows of logits to keep. seqs: the sequences that the tokens belong to.
        meanwhile: called without arguments once all of it is queued, which a GPU still works on.

        Raises:
            DecodeError: llama.cpp refused or failed; which tokens it still holds is up to the
                caller to find out.
            Cancelled: ``cancel`` was set. Any exception of a signal handler, KeyboardInterrupt
                above all.
        """
        cdef c.llama_context *ctx = self.get()
        cdef int n = <int>tokens.shape[0]
        cdef int i, j
        cdef int n_seq = len(seqs)
        cdef int status
        if n < 1 or n > self.n_batch or pos.shape[0] != n:
            raise DecodeError(f"a batch of {n} tokens and {pos.shape[0]} positions; "
                              f"it may hold 1 to {self.n_batch}")
        if cancel is not None and cancel._set:
            raise Cancelled("cancelled before the batch")
        if not 1 <= n_seq <= self.n_seq_max or (self._memory != NULL and tuple(seqs) != (0,)):
            raise DecodeError(f"the sequences {seqs}: a tiered cache has the first alone, and this "
                              f"context at most {self.n_seq_max}")
        self._batch.n_tokens = n
        for i in range(n):
            if not 0 <= tokens[i] < self.n_vocab:
                raise DecodeError(f"token {tokens[i]} is outside the vocabulary of {self.n_vocab}")
            self._batch.token[i] = tokens[i]
            self._batch.pos[i] = pos[i]
            self._batch.n_seq_id[i] = n_seq
            for j in range(n_seq):
                self._batch.seq_id[i][j] = seqs[j]
            self._batch.logits[i] = outputs == "all"
        self.n_outputs = n if outputs == "all" else 0
        if outputs == "last":
            outputs = (n - 1,)
        if not isinstance(outputs, str):
            for i in outputs:
                if not 0 <= i < n:
                    raise DecodeError(f"no token {i} in a batch of {n}")
                self._batch.logits[i] = True
            self.n_outputs = len(outputs)
        self._cancel = cancel if cancel is not None else CancelToken()
        self._check_signals = threading.current_thread() is threading.main_thread()
        self._interrupt = None
        with nogil:
            status = a.kvmem_decode(ctx, self._batch)
        if status == 0:
            self.n_seen += n
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                with nogil:
                    c.llama_synchronize(ctx)
            return
        errors = log.drain()
        self.n_outputs = 0
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
        if status == 2:
            raise Cancelled("cancelled during the batch")
        reason = {1: "no free cells for it", -1: "an invalid batch",
                  -2: "no memory for the compute buffers"}.get(status, f"status {status}")
        if status == -4:
            reason = a.kvmem_last_error().decode("utf-8", "replace")
        raise DecodeError("; ".join([f"llama.cpp could not decode {n} tokens: {reason}", *errors]))

    def logits(self, int i=-1):
        """Logits of the i-th token of the last batch, -1 for the last: f32 [n_vocab], a copy."""
        cdef float *row = c.llama_get_logits_ith(self.get(), i)
        cdef float[::1] view
        if row == NULL:
            log.drain()
            raise StateError(f"the last batch kept no logits for token {i}")
        out = np.empty(self.n_vocab, np.float32)
        view = out
        memcpy(&view[0], row, self.n_vocab * sizeof(float))
        return out

    # The calls below act on a stock context: a placeable memory is managed by its port.

    def keep_hidden_rows(self):
        """From now on run the last layer over all tokens of a batch, as a draft head needs."""
        a.kvmem_keep_hidden_rows(self.get())

    def clear(self):
        """Forget every token."""
        c.llama_memory_clear(c.llama_get_memory(self.get()), False)
        self.n_seen = 0

    def seq_rm(self, int seq, int start, int stop):
        """Remove the positions [start, stop) of a sequence, -1 for an open end.

        False if that is not possible.
        """
        return c.llama_memory_seq_rm(c.llama_get_memory(self.get()), seq, start, stop)

    def seq_cp(self, int source, int target, int start, int stop):
        c.llama_memory_seq_cp(c.llama_get_memory(self.get()), source, target, start, stop)

    def seq_pos_max(self, int seq):
        """The newest position of a sequence, -1 if there is none."""
        return c.llama_memory_seq_pos_max(c.llama_get_memory(self.get()), seq)


cdef int _set_params(c.llama_context_params *params, Model model, int n_ctx, int n_batch,
                     int n_ubatch, str type_k, str type_v, str flash_attn, int n_threads,
                     int n_threads_batch, bint offload_kqv, int n_seq_max,
                     int n_rs_seq) except -1:
    """llama.cpp's parameters, checked: it aborts the process over some of them."""
    cdef unsigned int head_k = 0
    cdef unsigned int head_v = 0
    for name, value in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch),
                        ("n_threads", n_threads),
                        ("n_threads_batch", n_threads_batch), ("n_seq_max", n_seq_max)):
        if value < 1:
            raise ConfigError(name, value, "at least 1")
    for name, value in (("type_k", type_k), ("type_v", type_v)):
        if value not in KV_TYPES:
            raise ConfigError(name, value, f"one of {', '.join(KV_TYPES)}")
    if flash_attn not in FLASH_ATTENTION:
        raise ConfigError("flash_attn", flash_attn, f"one of {', '.join(FLASH_ATTENTION)}")
    _check_continues(model, a.kvmem_model_refusal(model.get()))
    n_positions = a.kvmem_model_n_positions(model.get())
    if 0 < n_positions < n_ctx:
        raise ConfigError("workspace_tokens", n_ctx,
                          f"at most {n_positions}, the positions that the model has learnt")
    a.kvmem_model_head_dims(model.get(), &head_k, &head_v)
    for name, value, dim in (("type_k", type_k, head_k), ("type_v", type_v, head_v)):
        group = layout.KV_TYPES[KV_TYPES[value]].block
        if dim % group and flash_attn != "off":
            raise ConfigError(name, value, f"f16 or f32 for heads of {dim} values, as {value} "
                                           f"has groups of {group}")
    params[0] = c.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = n_batch
    params.n_ubatch = n_ubatch
    params.n_seq_max = n_seq_max
    params.kv_unified = True
    params.n_rs_seq = n_rs_seq
    params.n_threads = n_threads
    params.n_threads_batch = n_threads_batch
    params.type_k = <c.ggml_type><int>KV_TYPES[type_k]
    params.type_v = <c.ggml_type><int>KV_TYPES[type_v]
    params.offload_kqv = offload_kqv
    params.no_perf = True
    params.flash_attn_type = <c.llama_flash_attn_type><int>FLASH_ATTENTION[flash_attn]
    return 0


cdef int _check_status(Model model, int status) except -1:
    """Raise ModelError where the last call of the adapter failed because of the model."""
    if status == a.KVMEM_ERR_MODEL:
        _check_continues(model, a.kvmem_last_error())
    if status == a.KVMEM_ERR_UNSUPPORTED:
        reason = a.kvmem_last_error().decode("utf-8", "replace")
        raise ModelError(f"{model.architecture} models cannot run with KV memory: {reason}; "
                         "try --no-kvmem, which is plain llama.cpp")
    return 0


cdef int _check_continues(Model model, const char *refusal) except -1:
    """Raise ModelError where there is a reason why the model cannot continue a text."""
    if refusal[0]:
        reason = refusal.decode()
        raise ModelError(f"{model.architecture} models cannot run: {reason}; try another model")
    return 0


cdef int model_n_vocab(Model model) except -1:
    return c.llama_vocab_n_tokens(c.llama_model_get_vocab(model.get()))
