"""Scores of blocks from the query's rows and the key summaries.

    p[h,t,s] = softmax over all slices s of (q[h,t] . key[s] * attn_scale)
    score(b) = sum over pairs, heads h of the pair, rows t, slices s in b of w_h * p[h,t,s]^power
power 2 lets rows that know speak louder than rows that do not; power 1 is attention mass.
Source: docs/retrieval.md. The softmax is streamed: each chunk of slices is reduced by its own
maximum, and rescaled once the whole history's maximum and sum are known.
"""

from concurrent.futures import ThreadPoolExecutor

from libc.float cimport FLT_MAX
from libc.math cimport exp
from libc.stdint cimport int8_t, uint16_t
from libc.stdlib cimport calloc, free, malloc
from posix.stdlib cimport posix_memalign

from kvmem.kv.summary cimport KeySummaries

import numpy as np

__all__ = ["DEFAULT_THREADS", "score_blocks", "score_slices"]

cdef extern from "kernels.h" nogil:
    enum: KV_LANES
    enum: KV_ROWS
    void kv_softmax_run(const int8_t *keys, const uint16_t *scales, int n_tiles, int n_slices,
                        int dim, const float *query, int n_groups, float *tile, float *out,
                        float *maximum, float *total)
    void kv_add_powers(const float *e, int n_rows, int width, const float *factor,
                       const float *weight, int power, float *score)

DEFAULT_THREADS = 2

# Floats that one thread holds of a pair's probabilities: 16 MB. Longer histories or more rows are
# scored in several passes over the keys.
cdef size_t MAX_PROBABILITIES = 4 * 1024 * 1024


cdef struct Chunk:
    const unsigned char *base
    int n_slices
    int n_tiles
    size_t start           # of its probabilities, for one row


cdef int _score_pair(
    const Chunk *chunks, int n_chunks, size_t key_offset, size_t scale_offset, int dim,
    size_t width, const float *query, const float *weight, int n_groups, int power, float *score,
    int chunk_slices,
) noexcept nogil:
    """Add one pair's powers to score. query: packed groups of KV_ROWS rows. -1: no memory."""
    cdef size_t rows_per_pass = MAX_PROBABILITIES // width // KV_ROWS * KV_ROWS
    cdef int groups_per_pass = <int>(rows_per_pass // KV_ROWS) if rows_per_pass >= KV_ROWS else 1
    cdef int first, groups, rows, row, c, status = 0
    cdef double top, total
    cdef float *e = NULL
    cdef float *tile = NULL
    cdef float *maximum
    cdef float *sums
    cdef float *factor
    cdef float *stats
    if groups_per_pass > n_groups:
        groups_per_pass = n_groups
    rows = groups_per_pass * KV_ROWS
    stats = <float *>malloc(3 * sizeof(float) * <size_t>rows * n_chunks)
    if (
        posix_memalign(<void **>&e, 64, sizeof(float) * width * rows)
        or posix_memalign(<void **>&tile, 64, sizeof(float) * dim * KV_LANES)
        or stats == NULL
    ):
        status = -1
    first = 0
    while status == 0 and first < n_groups:
        groups = min(groups_per_pass, n_groups - first)
        rows = groups * KV_ROWS
        maximum = stats
        sums = stats + <size_t>rows * n_chunks
        factor = stats + 2 * <size_t>rows * n_chunks
        for c in range(n_chunks):
            kv_softmax_run(
                <const int8_t *>(chunks[c].base + key_offset),
                <const uint16_t *>(chunks[c].base + scale_offset),
                chunks[c].n_tiles, chunks[c].n_slices, dim,
                query + <size_t>first * KV_ROWS * dim, groups, tile,
                e + chunks[c].start * rows, maximum + c * rows, sums + c * rows,
            )
        for row in range(rows):
            top = -FLT_MAX
            total = 0
            for c in range(n_chunks):
                top = max(top, <double>maximum[c * rows + row])
            for c in range(n_chunks):
                total += sums[c * rows + row] * exp(maximum[c * rows + row] - top)
            for c in range(n_chunks):
                factor[c * rows + row] = <float>(exp(maximum[c * rows + row] - top) / total)
        for c in range(n_chunks):
            kv_add_powers(
                e + chunks[c].start * rows, rows, chunks[c].n_tiles * KV_LANES, factor + c * rows,
                weight + first * KV_ROWS, power, score + <size_t>c * chunk_slices,
            )
        first += groups
    free(e)
    free(tile)
    free(stats)
    return status


cdef class _PairScore:
    """One pair's call: what must outlive it, and the leaf without the GIL."""

    cdef Chunk *chunks
    cdef int n_chunks
    cdef size_t width
    cdef int chunk_slices

    def __dealloc__(self):
        free(self.chunks)

    def run(self, KeySummaries summaries, int pair, const float[:, :, ::1] query,
            const float[::1] weight, int power, float[::1] score):
        cdef int status, dim = summaries._dim[pair], n_groups = <int>query.shape[0]
        cdef size_t key_offset = summaries._key_offset[pair]
        cdef size_t scale_offset = summaries._scale_offset[pair]
        with nogil:
            status = _score_pair(
                self.chunks, self.n_chunks, key_offset, scale_offset, dim, self.width,
                &query[0, 0, 0], &weight[0], n_groups, power, &score[0], self.chunk_slices,
            )
        if status < 0:
            raise MemoryError("no memory for the probabilities of one pair")


cdef _PairScore _snapshot(KeySummaries summaries, int n_blocks):
    cdef _PairScore call = _PairScore()
    cdef int c, slices = summaries.blocks_per_chunk * summaries.slices_per_block
    cdef int left = n_blocks * summaries.slices_per_block
    call.n_chunks = (left + slices - 1) // slices
    call.chunk_slices = summaries.chunk_slices
    call.chunks = <Chunk *>calloc(call.n_chunks, sizeof(Chunk))
    if call.chunks == NULL:
        raise MemoryError()
    for c in range(call.n_chunks):
        call.chunks[c].base = summaries._chunks.at(c)
        call.chunks[c].n_slices = min(left, slices)
        call.chunks[c].n_tiles = (call.chunks[c].n_slices + KV_LANES - 1) // KV_LANES
        call.chunks[c].start = call.width
        call.width += call.chunks[c].n_tiles * KV_LANES
        left -= slices
    return call


def _pack(rows, weights):
    """Rows f32 [n, dim] as [groups, dim, KV_ROWS], filled up with rows of weight 0; and weights."""
    n, dim = rows.shape
    groups = -(-n // KV_ROWS)
    padded = np.zeros((groups * KV_ROWS, dim), np.float32)
    padded[:n] = rows
    packed = np.ascontiguousarray(padded.reshape(groups, KV_ROWS, dim).transpose(0, 2, 1))
    weight = np.zeros(groups * KV_ROWS, np.float32)
    weight[:n] = weights
    return packed, weight


def score_slices(
    KeySummaries summaries not None, rows, weights, int power=2, int threads=DEFAULT_THREADS
):
    """Score every slice of the summarised history: f32 [n_slices].

    rows: for each pair of the summaries f32 [n_rows, head_dim], attn_scale multiplied in.
    weights: for each pair f32 [n_rows]. power: >= 1. Pairs are shared out over `threads`; the
    result does not depend on their number.
    """
    cdef int n_blocks = summaries.n_blocks
    cdef int n_pairs = len(summaries.pairs)
    cdef int pair
    if len(rows) != n_pairs or len(weights) != n_pairs:
        raise ValueError(f"{len(rows)} row sets and {len(weights)} weights for {n_pairs} pairs")
    if power < 1 or threads < 1:
        raise ValueError(f"power {power} and threads {threads} must be >= 1")
    for pair in range(n_pairs):
        if rows[pair].ndim != 2 or rows[pair].shape[1] != summaries._dim[pair]:
            raise ValueError(
                f"rows of pair {pair} are {rows[pair].shape}, keys have {summaries._dim[pair]} dims"
            )
    if n_blocks == 0 or all(len(r) == 0 for r in rows):
        return np.zeros(n_blocks * summaries.slices_per_block, np.float32)

    cdef _PairScore call = _snapshot(summaries, n_blocks)
    used = summaries.blocks_per_chunk * summaries.slices_per_block

    def one(pair):
        out = np.zeros(call.n_chunks * call.chunk_slices, np.float32)
        if len(rows[pair]):
            packed, weight = _pack(rows[pair], weights[pair])
            call.run(summaries, pair, packed, weight, power, out)
        return out

    # A fixed order of adding makes the sum the same for any number of threads.
    total = np.zeros(call.n_chunks * call.chunk_slices, np.float32)
    if threads == 1 or n_pairs == 1:
        for pair in range(n_pairs):
            total += one(pair)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvmem-score") as pool:
            for out in pool.map(one, range(n_pairs)):
                total += out
    slices = total.reshape(call.n_chunks, call.chunk_slices)[:, :used].reshape(-1)
    return np.ascontiguousarray(slices[: n_blocks * summaries.slices_per_block])


def score_blocks(
    query, KeySummaries summaries not None, weights=None, int power=2, int threads=DEFAULT_THREADS
):
    """Score every summarised block with the pairs of the summaries.

    query: Query, whose layers hold those of the pairs. weights: f32 [n_pairs] or [n_pairs, group],
    None means 1. Returns (blocks f32 [n_blocks], edges f32 [n_blocks, 2]: first and last slice).
    """
    n_pairs = len(summaries.pairs)
    given = np.ones(n_pairs, np.float32) if weights is None else np.asarray(weights, np.float32)
    if given.ndim not in (1, 2) or len(given) != n_pairs or not np.isfinite(given).all():
        raise ValueError(f"weights are {given.shape}, not finite [{n_pairs}] or [{n_pairs}, group]")
    rows = []
    row_weights = []
    for index, pair in enumerate(summaries.pairs):
        heads = query.heads(pair)
        n_rows, group, dim = heads.shape
        scale = summaries.layout.layers[pair.layer].score_scale
        if not np.isfinite(heads).all():
            raise ValueError(f"the query's rows of layer index {pair.layer} are not all finite")
        rows.append(heads.reshape(n_rows * group, dim) * np.float32(scale))
        row_weights.append(np.tile(np.broadcast_to(given[index], group), n_rows))
    slices = score_slices(summaries, rows, row_weights, power, threads)
    slices = slices.reshape(summaries.n_blocks, summaries.slices_per_block)
    return slices.sum(axis=1), np.ascontiguousarray(slices[:, [0, -1]])
