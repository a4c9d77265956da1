from kvmem.llama.c_bridge cimport kvmem_reply


cdef class ReplyParser:
    cdef kvmem_reply *_ptr              # owned; NULL once closed
    cdef readonly dict rendered
    cdef kvmem_reply *get(self) except NULL
