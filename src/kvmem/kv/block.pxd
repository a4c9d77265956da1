from kvmem.ids cimport BlockId, Pos, Token
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.port cimport CellMeta


cdef class Versions:
    cdef long long next


cdef class BlockTable:
    cdef readonly int block_tokens
    cdef readonly int n_tokens
    cdef readonly int n_blocks
    cdef readonly size_t n_bytes          # charged to the budget
    cdef HostBudget _budget
    cdef int _capacity_tokens
    cdef Versions _versions
    cdef object _tokens_array
    cdef object _pos_array
    cdef Token[::1] _tokens               # [_capacity_tokens]
    cdef Pos[:, ::1] _pos                 # [_capacity_tokens, 4]
    cdef long long[::1] _version          # per block: changes whenever its content does

    cdef inline int fill(self, BlockId block) noexcept nogil:
        """Tokens in the block, 0 to block_tokens."""
        return max(0, min(self.block_tokens, self.n_tokens - block * self.block_tokens))

    cdef inline bint is_complete(self, BlockId block) noexcept nogil:
        return (block + 1) * self.block_tokens <= self.n_tokens

    cdef inline long long version(self, BlockId block) noexcept nogil:
        return self._version[block]

    cdef int grow(self, int n_tokens) except -1
    cdef int append(self, const Token *tokens, const Pos *pos, int n) except -1
    cdef int begin_as(self, BlockTable other, int n_tokens) except -1
    cdef int forget(self) except -1
    cdef int cut(self, int n_tokens) except -1
    cdef void write_meta(self, BlockId block, CellMeta *meta) noexcept nogil
    cdef void _renew(self, BlockId block) noexcept nogil
