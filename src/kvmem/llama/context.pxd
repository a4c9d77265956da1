from kvmem.llama.c_adapter cimport kvmem_memory
from kvmem.llama.c_llama cimport llama_batch, llama_context, llama_context_params
from kvmem.llama.model cimport Model


cdef class CancelToken:
    cdef volatile int _set


cdef class Context:
    cdef llama_context *_ptr            # owned; NULL once closed
    cdef kvmem_memory *_memory          # owned by _ptr; NULL for a stock context
    cdef llama_batch _batch             # owned, n_batch tokens
    cdef llama_context_params _params   # as it was made
    cdef readonly Model model
    cdef readonly int n_vocab
    cdef readonly int n_batch
    cdef readonly int n_ubatch
    cdef readonly int n_ctx
    cdef readonly int n_rs_seq          # tokens that the recurrent state can be rolled back
    cdef readonly int n_seq_max         # sequences of its cache
    cdef readonly int block_tokens      # cells of a slot; 0 for a stock context
    cdef readonly int n_seen            # tokens in the recurrent state of a placeable memory
    cdef readonly int n_outputs         # rows of logits that the last decode left
    cdef CancelToken _cancel
    cdef object _interrupt
    cdef bint _check_signals
    cdef double _checked_s

    cdef void _free(self) noexcept
    cdef llama_context *get(self) except NULL
    cdef kvmem_memory *memory(self) except NULL
