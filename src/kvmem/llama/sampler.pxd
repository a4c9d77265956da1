from kvmem.llama.c_bridge cimport kvmem_sampler
from kvmem.llama.model cimport Model


cdef class Sampler:
    cdef kvmem_sampler *_ptr            # owned; NULL once closed
    cdef readonly Model model
    cdef kvmem_sampler *get(self) except NULL
