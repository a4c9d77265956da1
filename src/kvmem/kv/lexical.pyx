"""LexicalIndex: which blocks share rare tokens with the query.

    idf(t)   = ln(1 + (N - n_t + 0.5) / (n_t + 0.5)), n_t of N units hold token t
    score(u) = sum of idf(t) over the distinct tokens t of the query that unit u holds
    score(b) = max over the units of b
The idf is BM25's (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, section
3.1); units are too short for term counts or length to matter.

No postings: a unit keeps its distinct ids (4 bytes a token), a query counts and scores in two
scans. That makes truncation free, and 256K tokens take about a millisecond.
"""

from libc.math cimport log
from libc.stdlib cimport calloc, free
from libc.string cimport memmove, memset

from cython cimport final

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.chunks cimport Chunks

import numpy as np

from kvmem.errors import ConfigError, StateError

__all__ = ["UNIT_TOKENS", "LexicalIndex"]

UNIT_TOKENS = 32

cdef int CHUNK_TOKENS = 16384


cdef struct Term:
    int token              # -1: empty
    int n_units
    float idf


cdef inline Term *_find(Term *terms, unsigned int mask, int token) noexcept nogil:
    """The term's place, or the empty place where it would go."""
    cdef unsigned int at = (<unsigned int>token * <unsigned int>2654435769) >> 7
    while terms[at & mask].token != token and terms[at & mask].token != -1:
        at += 1
    return &terms[at & mask]


@final
cdef class LexicalIndex:
    """Token ids of the sealed blocks 0 .. n_blocks - 1, in units of `unit_tokens`.

    A negative id (an image row) is no token. budget: see Chunks.
    """

    def __cinit__(self, int block_tokens, int unit_tokens=UNIT_TOKENS,
                  HostBudget budget=None):
        if block_tokens <= 0:
            raise ConfigError("block_tokens", block_tokens, "> 0")
        if unit_tokens <= 0:
            raise ConfigError("unit_tokens", unit_tokens, "> 0")
        self.block_tokens = block_tokens
        self.unit_tokens = min(unit_tokens, block_tokens)
        self.units_per_block = (block_tokens + self.unit_tokens - 1) // self.unit_tokens
        self._blocks_per_chunk = max(1, CHUNK_TOKENS // block_tokens)
        ids = <size_t>self._blocks_per_chunk * self.units_per_block * self.unit_tokens
        self._chunks = Chunks(ids * sizeof(int), "the token index", budget)

    @property
    def n_bytes(self):
        """Bytes held now, whole chunks."""
        return self._chunks.n_bytes

    cdef int *_unit(self, int unit) noexcept nogil:
        cdef int per_chunk = self._blocks_per_chunk * self.units_per_block
        cdef int *ids = <int *>self._chunks.at(unit // per_chunk)
        return ids + <size_t>(unit % per_chunk) * self.unit_tokens

    def add(self, int block, const int[::1] tokens not None):
        """Append the next block. tokens: i32 [block_tokens]. Raises StateError, CapacityError."""
        cdef int i, at, n, unit, token, end
        cdef int *ids
        if block != self.n_blocks:
            raise StateError(
                f"tokens of block {block} are out of order: the next is {self.n_blocks}"
            )
        if tokens.shape[0] != self.block_tokens:
            raise ValueError(f"{tokens.shape[0]} tokens for a block of {self.block_tokens}")
        if block // self._blocks_per_chunk < self._chunks.n_chunks:
            self._chunks.own(block // self._blocks_per_chunk)
        self._chunks.reserve(block // self._blocks_per_chunk + 1)
        with nogil:
            for unit in range(self.units_per_block):
                ids = self._unit(block * self.units_per_block + unit)
                memset(ids, 0xff, self.unit_tokens * sizeof(int))
                n = 0
                end = min((unit + 1) * self.unit_tokens, self.block_tokens)
                for i in range(unit * self.unit_tokens, end):
                    token = tokens[i]
                    at = n
                    while at > 0 and ids[at - 1] > token:
                        at -= 1
                    if token < 0 or (at > 0 and ids[at - 1] == token):
                        continue
                    memmove(ids + at + 1, ids + at, (n - at) * sizeof(int))
                    ids[at] = token
                    n += 1
        self.n_blocks += 1

    def truncate(self, int n_blocks):
        """Forget the blocks from n_blocks on."""
        if n_blocks < 0:
            raise ValueError(f"n_blocks is {n_blocks}")
        if n_blocks < self.n_blocks:
            self.n_blocks = n_blocks
            self._chunks.shrink((n_blocks + self._blocks_per_chunk - 1) // self._blocks_per_chunk)

    def branch(self, int n_blocks):
        """A new index that begins with the first n_blocks of this one.

        They share memory until one of them writes.
        """
        cdef LexicalIndex fresh = LexicalIndex(
            self.block_tokens, self.unit_tokens, self._chunks.budget)
        if not 0 <= n_blocks <= self.n_blocks:
            raise ValueError(f"n_blocks is {n_blocks} of {self.n_blocks}")
        fresh._chunks.share(
            self._chunks, (n_blocks + self._blocks_per_chunk - 1) // self._blocks_per_chunk)
        fresh.n_blocks = n_blocks
        return fresh

    def score(self, const int[::1] tokens not None):
        """Score every unit for the query's token ids: f32 [n_blocks, units_per_block]."""
        cdef int n_units = self.n_blocks * self.units_per_block
        cdef int unit, i
        cdef Py_ssize_t n
        cdef unsigned int size = 16, at
        cdef Term *terms
        cdef Term *term
        cdef int *ids
        cdef float total
        out = np.zeros((self.n_blocks, self.units_per_block), np.float32)
        if n_units == 0 or tokens.shape[0] == 0:
            return out
        cdef float[:, ::1] view = out
        cdef float *scores = &view[0, 0]
        while size < 4 * tokens.shape[0]:
            size *= 2
        terms = <Term *>calloc(size, sizeof(Term))
        if terms == NULL:
            raise MemoryError()
        with nogil:
            for at in range(size):
                terms[at].token = -1
            for n in range(tokens.shape[0]):
                if tokens[n] >= 0:
                    _find(terms, size - 1, tokens[n]).token = tokens[n]
            for unit in range(n_units):
                ids = self._unit(unit)
                for i in range(self.unit_tokens):
                    if ids[i] < 0:
                        break
                    term = _find(terms, size - 1, ids[i])
                    if term.token >= 0:
                        term.n_units += 1
            for at in range(size):
                terms[at].idf = <float>log(
                    1 + (n_units - terms[at].n_units + 0.5) / (terms[at].n_units + 0.5)
                )
            for unit in range(n_units):
                ids = self._unit(unit)
                total = 0
                for i in range(self.unit_tokens):
                    if ids[i] < 0:
                        break
                    term = _find(terms, size - 1, ids[i])
                    if term.token >= 0:
                        total += term.idf
                scores[unit] = total
        free(terms)
        return out
