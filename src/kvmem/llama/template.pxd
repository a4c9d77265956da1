from kvmem.llama.c_bridge cimport kvmem_chat


cdef class ChatTemplate:
    cdef kvmem_chat *_ptr               # owned; NULL once closed
    cdef kvmem_chat *get(self) except NULL


cdef dict rendered_of(int status, char *text, size_t n_text)
