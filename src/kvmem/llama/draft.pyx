"""The MTP head of a model: a second context, whose cache follows the cells of the first."""

cimport cython
import numpy as np

from libc.string cimport memcpy

from kvmem.errors import CapacityError, ConfigError, DecodeError, ModelError, StateError
from kvmem.llama cimport c_adapter as a
from kvmem.llama cimport c_llama as c
from kvmem.llama.context cimport Context
from kvmem.llama import log
from kvmem.llama.runtime import KV_TYPES

__all__ = ["DraftContext"]


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the model
cdef class DraftContext:
    """The head over ``leader``; the model must have been loaded with ``load_mtp``.

    To be made before anything is decoded, and before a LlamaPort: from here on a block's payload
    ends with the head's K and V. Its cells are the leader's, token by token.

    type_k, type_v: of the head's K and V, names in runtime.KV_TYPES.

    Raises:
        ModelError: the model has no such head, or not one that can be driven.
        CapacityError: the memory for it cannot be had.
    """

    cdef c.llama_context *_ptr          # owned; NULL once closed
    cdef a.kvmem_memory *_memory        # owned by _ptr
    cdef readonly Context leader
    cdef readonly int n_embd            # values of a hidden row
    cdef float[::1] _row                # of the newest proposal

    def __init__(self, Context leader not None, *, str type_k="f16", str type_v="f16"):
        cdef c.llama_context_params params = leader._params
        cdef c.llama_model *model_ptr = leader.model.get()
        cdef a.kvmem_memory *memory = leader.memory()
        cdef int status
        if self._ptr != NULL:
            raise StateError("a DraftContext is made once")
        for name, value in (("type_k", type_k), ("type_v", type_v)):
            if value not in KV_TYPES:
                raise ConfigError(name, value, f"one of {', '.join(KV_TYPES)}")
        params.type_k = <c.ggml_type><int>KV_TYPES[type_k]
        params.type_v = <c.ggml_type><int>KV_TYPES[type_v]
        self.leader = leader
        with nogil:
            status = a.kvmem_draft_init(memory, model_ptr, &params, &self._ptr, &self._memory)
        if status == a.KVMEM_OK:
            leader.model.acquire()  # before an interrupt, or a handler of the log, can come between
        else:
            self._ptr = NULL
        errors = log.drain()
        if status != a.KVMEM_OK:
            reason = a.kvmem_last_error().decode("utf-8", "replace")
            if status == a.KVMEM_ERR_UNSUPPORTED:
                raise ModelError(f"{leader.model.architecture}: no drafts: {reason}; "
                                 "leave --spec-type out")
            raise CapacityError("; ".join([f"no context for drafts: {reason}", *errors]))
        self.n_embd = c.llama_model_n_embd_out(model_ptr)
        self._row = np.empty(self.n_embd, np.float32)

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        cdef c.llama_context *ptr = self._ptr
        self._ptr = NULL
        self._memory = NULL
        if ptr != NULL:
            with nogil:
                c.llama_free(ptr)
            self.leader.model.release()

    cdef a.kvmem_memory *memory(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the draft context is closed")
        return self._memory

    def close(self):
        """Free the context, behind all use of a LlamaPort. A second call does nothing."""
        self._free()
        log.drain()

    @property
    def is_closed(self):
        return self._ptr == NULL

    def clear(self):
        """Forget every token."""
        self.memory()
        c.llama_memory_clear(c.llama_get_memory(self._ptr), False)

    def hidden_row(self, int i, float[::1] out not None):
        """Copy the hidden row of token i of the leader's last batch to ``out``: f32 [n_embd]."""
        cdef const float *rows = self._hidden_rows(i + 1)
        if i < 0 or out.shape[0] != self.n_embd:
            raise ValueError(f"row {i} does not go into {out.shape[0]} values")
        memcpy(&out[0], rows + <size_t>i * self.n_embd, <size_t>self.n_embd * sizeof(float))

    def follow(self, const int[::1] cells not None, const int[::1] tokens not None,
               const int[::1] pos not None, const float[::1] hidden not None, *, int skip=0):
        """Take in the tokens of the leader's last batch, from token ``skip`` on.

        cells, tokens, pos: int32 [n] of that batch, or of its beginning. hidden: f32 [n_embd], the
        row of the token before the batch.

        Raises DecodeError; then none of them is in.
        """
        cdef int n = <int>tokens.shape[0]
        cdef const float *rows = self._hidden_rows(n)
        cdef const float *first
        self._require(cells, tokens, pos, hidden, n)
        if not 0 <= skip <= n:
            raise ValueError(f"{skip} of {n} tokens cannot be skipped")
        if skip == n:
            return
        if skip == 0:
            first = &hidden[0]
        else:
            first = rows + <size_t>(skip - 1) * self.n_embd
            rows += <size_t>skip * self.n_embd
        self._decode(&cells[skip], &tokens[skip], &pos[skip], first, rows, n - skip, False)

    def skip(self, const int[::1] cells not None, const int[::1] tokens not None,
             const int[::1] pos not None):
        """Leave tokens out that the leader has decoded: the head goes on behind them, without them.

        cells, tokens, pos: int32 [n], as `follow` has them. Raises StateError; then nothing is in.
        """
        cdef a.kvmem_memory *memory = self.memory()
        cdef int n = <int>tokens.shape[0]
        cdef int status
        if n < 1 or cells.shape[0] != n or pos.shape[0] != n:
            raise ValueError(f"{n} tokens, {cells.shape[0]} cells and {pos.shape[0]} positions "
                             "do not go together")
        with nogil:
            status = a.kvmem_draft_skip(memory, &cells[0], &tokens[0], &pos[0], n)
        if status != a.KVMEM_OK:
            raise StateError(a.kvmem_last_error().decode("utf-8", "replace"))

    def draft(self, const int[::1] cells not None, const int[::1] tokens not None,
              const int[::1] pos not None, const float[::1] hidden not None, int[::1] out not None,
              *, float p_min=0):
        """What the head proposes behind a token: as many as ``out`` holds, each the likeliest.

        cells, pos: int32 [n] at least, those of the token and of the proposals. tokens: int32 [1],
        the token. hidden: f32 [n_embd], the row of the token before it. The token stays in the
        head's cache, the proposals do not. p_min: the first that is less probable than this, among
        the ten likeliest, is left out, and so is what would follow it.

        Returns how many there are. Raises DecodeError; then nothing is in.
        """
        cdef a.kvmem_memory *memory = self.memory()
        cdef int n = <int>out.shape[0]
        cdef int n_found = 0
        cdef int n_decoded = 1
        cdef int token
        cdef float p = 1
        cdef float *wanted = &p if p_min > 0 else NULL
        if n < 1 or cells.shape[0] < n or pos.shape[0] < n:
            raise ValueError(f"{n} proposals, {cells.shape[0]} cells, {pos.shape[0]} positions")
        self._require(cells[:1], tokens, pos[:1], hidden, 1)
        token = tokens[0]
        try:
            self._decode(&cells[0], &token, &pos[0], &hidden[0], NULL, 1, True)
            while True:
                if a.kvmem_draft_result(memory, &token, &self._row[0], wanted) != a.KVMEM_OK:
                    raise DecodeError(a.kvmem_last_error().decode("utf-8", "replace"))
                if p < p_min:
                    break
                out[n_found] = token
                n_found += 1
                if n_found == n:
                    break
                self._decode(&cells[n_found], &token, &pos[n_found], &self._row[0], NULL, 1, True)
                n_decoded += 1
        except BaseException:
            a.kvmem_draft_forget(memory, &cells[0], n)
            raise
        if n_decoded > 1:
            a.kvmem_draft_forget(memory, &cells[1], n_decoded - 1)
        return n_found

    cdef const float *_hidden_rows(self, int n) except NULL:
        cdef const float *rows = a.kvmem_hidden_rows(self.leader.memory())
        if rows == NULL or n > self.leader.n_batch:
            raise StateError(f"the leader's last batch has no {n} hidden rows")
        return rows

    cdef int _require(self, const int[::1] cells, const int[::1] tokens, const int[::1] pos,
                      const float[::1] hidden, int n) except -1:
        if tokens.shape[0] != n or cells.shape[0] != n or pos.shape[0] != n \
                or hidden.shape[0] != self.n_embd or n < 1:
            raise ValueError(f"{tokens.shape[0]} tokens, {cells.shape[0]} cells, {pos.shape[0]} "
                             f"positions and {hidden.shape[0]} hidden values do not go together")
        for i in range(n):
            if not 0 <= tokens[i] < self.leader.n_vocab:
                raise ValueError(f"token {tokens[i]} is outside the vocabulary")
        return 0

    cdef int _decode(self, const int *cells, const int *tokens, const int *pos, const float *first,
                     const float *rows, int n, bint wants_result) except -1:
        cdef a.kvmem_memory *memory = self.memory()
        cdef int status
        with nogil:
            status = a.kvmem_draft_decode(memory, cells, tokens, pos, first, rows, n, wants_result)
            if status == a.KVMEM_OK:
                c.llama_synchronize(self._ptr)
        if status != a.KVMEM_OK:
            errors = log.drain()
            reason = a.kvmem_last_error().decode("utf-8", "replace")
            raise DecodeError("; ".join([f"the MTP head could not take {n} tokens: {reason}",
                                         *errors]))
        return 0
