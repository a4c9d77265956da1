from kvmem.llama.c_llama cimport llama_model


cdef class Model:
    cdef llama_model *_ptr              # owned; NULL once closed
    cdef int _n_users                   # open contexts; close() waits for none, it refuses
    cdef readonly object path
    cdef object _progress
    cdef object _interrupt

    cdef llama_model *get(self) except NULL
