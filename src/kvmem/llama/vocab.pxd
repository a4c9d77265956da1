from kvmem.llama.c_llama cimport llama_vocab
from kvmem.llama.model cimport Model


cdef class Vocab:
    cdef readonly Model model           # owns the vocabulary
    cdef readonly int n_tokens
    cdef const llama_vocab *get(self) except NULL
