"""The history as tokens and positions, cut into blocks."""

cimport cython
from libc.string cimport memcpy

import numpy as np

from kvmem.errors import StateError

__all__ = ["BlockTable"]

cdef int FIRST_TOKENS = 256  # capacity of the first allocation, rounded up to blocks


@cython.final
cdef class Versions:
    """Numbers that no two contents of blocks share, whichever history they belong to."""

    def __cinit__(self):
        self.next = 1


@cython.final
cdef class BlockTable:
    """Tokens and positions of the whole history, and a version for each block's content.

    Block b owns tokens [b * block_tokens, (b + 1) * block_tokens). A complete block's content is
    fixed until the history is cut inside it; then it gets a new version, so that no copy of the old
    content can pass for the new one.

    Args:
        block_tokens: tokens of a block.
        budget: charged for the arrays, which grow with the history.
        beside: the table of another history that shares blocks with this one: no version is given
            twice between them.
    """

    def __cinit__(self, int block_tokens, HostBudget budget not None, BlockTable beside=None):
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}, but must be at least 1")
        self.block_tokens = block_tokens
        self._budget = budget
        self._versions = Versions() if beside is None else beside._versions
        self._resize(0)

    def __dealloc__(self):
        if self._budget is not None:
            self._budget.give_back(self.n_bytes)

    def tokens(self):
        """int32 [n_tokens], read-only, no copy; a longer history may live elsewhere."""
        return self._tokens_array[:self.n_tokens]

    def pos(self):
        """int32 [n_tokens, 4], read-only, no copy; a longer history may live elsewhere."""
        return self._pos_array[:self.n_tokens]

    cdef int grow(self, int n_tokens) except -1:
        """Have room for n_tokens in all; after it, append allocates nothing.

        Raises CapacityError, and changes nothing, if the budget has no room.
        """
        if n_tokens > self._capacity_tokens:
            # by a half: the old arrays stay charged until the new ones are filled
            self._resize(max(n_tokens, self._capacity_tokens * 3 // 2, FIRST_TOKENS))
        return 0

    def _resize(self, int n_tokens):
        cdef int n_blocks = (n_tokens + self.block_tokens - 1) // self.block_tokens
        cdef int n = n_blocks * self.block_tokens
        cdef size_t n_bytes = n * 5 * sizeof(int) + n_blocks * sizeof(long long)
        self._budget.take(n_bytes, f"the token table for {n} tokens")
        try:
            tokens = np.zeros(n, dtype=np.int32)
            pos = np.zeros((n, 4), dtype=np.int32)
            version = np.zeros(n_blocks, dtype=np.int64)
        except MemoryError:
            self._budget.give_back(n_bytes)
            raise
        if self.n_tokens:
            tokens[:self.n_tokens] = self._tokens_array[:self.n_tokens]
            pos[:self.n_tokens] = self._pos_array[:self.n_tokens]
            version[:self.n_blocks] = self._version[:self.n_blocks]
        self._tokens, self._pos, self._version = tokens, pos, version
        self._tokens_array, self._pos_array = tokens.view(), pos.view()
        self._tokens_array.flags.writeable = False
        self._pos_array.flags.writeable = False
        self._budget.give_back(self.n_bytes)
        self.n_bytes = n_bytes
        self._capacity_tokens = n

    cdef int append(self, const Token *tokens, const Pos *pos, int n) except -1:
        """Add n tokens, pos: [n, 4]; `grow` made room for them."""
        cdef BlockId block
        if n == 0:
            return 0
        if self.n_tokens + n > self._capacity_tokens:
            raise StateError(f"the table has no room for {n} tokens")
        memcpy(&self._tokens[self.n_tokens], tokens, n * sizeof(Token))
        memcpy(&self._pos[self.n_tokens, 0], pos, n * 4 * sizeof(Pos))
        self.n_tokens += n
        for block in range(self.n_blocks, (self.n_tokens - 1) // self.block_tokens + 1):
            self._renew(block)
        self.n_blocks = (self.n_tokens - 1) // self.block_tokens + 1
        return 0

    cdef int begin_as(self, BlockTable other, int n_tokens) except -1:
        """Take over the first n_tokens of another history; this one is empty.

        Complete blocks keep their versions: they are the same. Raises CapacityError as `grow`.
        """
        cdef int n_blocks = (n_tokens + self.block_tokens - 1) // self.block_tokens
        if self.n_tokens or not 0 <= n_tokens <= other.n_tokens:
            raise StateError(f"{n_tokens} tokens of {other.n_tokens} for a history that has "
                             f"{self.n_tokens}")
        if n_tokens == 0:
            return 0
        self.grow(n_tokens)
        memcpy(&self._tokens[0], &other._tokens[0], n_tokens * sizeof(Token))
        memcpy(&self._pos[0, 0], &other._pos[0, 0], n_tokens * 4 * sizeof(Pos))
        memcpy(&self._version[0], &other._version[0], n_blocks * sizeof(long long))
        self.n_tokens = n_tokens
        self.n_blocks = n_blocks
        if n_tokens % self.block_tokens:
            self._renew(n_blocks - 1)
        return 0

    cdef int forget(self) except -1:
        """Forget everything, and give the memory back."""
        self.n_tokens = self.n_blocks = 0
        self._resize(0)
        return 0

    cdef int cut(self, int n_tokens) except -1:
        """Forget all tokens from n_tokens on. A block that is cut inside gets a new version."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise StateError(f"{n_tokens} tokens of {self.n_tokens} cannot be kept")
        if n_tokens == self.n_tokens:
            return 0
        self.n_tokens = n_tokens
        self.n_blocks = (n_tokens + self.block_tokens - 1) // self.block_tokens
        if n_tokens % self.block_tokens:
            self._renew(self.n_blocks - 1)
        return 0

    cdef void _renew(self, BlockId block) noexcept nogil:
        self._version[block] = self._versions.next
        self._versions.next += 1

    cdef void write_meta(self, BlockId block, CellMeta *meta) noexcept nogil:
        """meta: [block_tokens], of which the first fill(block) are written."""
        cdef int i, token = block * self.block_tokens
        for i in range(self.fill(block)):
            memcpy(meta[i].pos, &self._pos[token + i, 0], sizeof(meta[i].pos))
            meta[i].token = self._tokens[token + i]
            # llama.cpp's cells keep a 2-D place: y is M-RoPE axis 1, x is axis 2.
            # Source: src/llama-kv-cache.cpp, llama_kv_cache::apply_ubatch
            meta[i].x = self._pos[token + i, 2]
            meta[i].y = self._pos[token + i, 1]
