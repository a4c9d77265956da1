from libc.stdlib cimport qsort

# The only place where these C types are defined. -1 is the only "none".
ctypedef int Token    # vocabulary id
ctypedef int Pos      # model position; M-RoPE repeats it inside an image
ctypedef int BlockId  # token index // block_tokens
ctypedef int SlotId   # block-sized place in the working set
ctypedef int CellId   # llama.cpp's place for one token: slot * block_tokens + index % block_tokens


cdef inline int _by_number(const void *left, const void *right) noexcept nogil:
    cdef BlockId a = (<const BlockId *>left)[0]
    cdef BlockId b = (<const BlockId *>right)[0]
    return (a > b) - (a < b)


cdef inline void sort_blocks(BlockId *blocks, int n) noexcept nogil:
    """Ascending, in place; numpy would allocate."""
    qsort(blocks, n, sizeof(BlockId), _by_number)
