from kvmem.llama.c_llama cimport llama_model


cdef class Model:
    cdef llama_model *_ptr              # owned; freed once closed and without contexts
    cdef int _n_contexts                # open ones
    cdef bint _is_closed
    cdef readonly object path
    cdef readonly bint is_dry           # without weights
    cdef object _progress
    cdef object _interrupt

    cdef llama_model *get(self) except NULL
    cdef void acquire(self) noexcept
    cdef void release(self) noexcept
    cdef void _free_if_unused(self) noexcept
