"""Scores of blocks from the query's rows and the key summaries.

    p[h,t,s] = softmax over all slices s of (q[h,t] . key[s] * attn_scale)
    score(b) = sum over pairs, heads h of the pair, rows t, slices s in b of p[h,t,s]^power
power 2 lets rows that know speak louder than rows that do not; power 1 is attention mass. Rows may
be centred: what all of them like says little about any of them. Keys are int8 and rows are rounded
to int16, so that their products are exact integers, the same on every processor.
Source: docs/retrieval.md. The softmax is streamed: each chunk of slices is reduced by its own
maximum, and rescaled once the whole history's maximum and sum are known.
"""

from concurrent.futures import ThreadPoolExecutor

from libc.float cimport FLT_MAX
from libc.math cimport exp
from libc.stdint cimport int8_t, int16_t, int32_t, uint16_t
from libc.stdlib cimport calloc, free
from posix.stdlib cimport posix_memalign

from cython cimport final, no_gc_clear

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.summary cimport KeySummaries

import numpy as np

__all__ = [
    "DEFAULT_THREADS", "MOST_THREADS", "ScoreScratch", "dot_products", "score_blocks",
    "score_slices",
]

cdef extern from "kernels.h" nogil:
    enum: KV_LANES
    enum: KV_ROWS
    ctypedef void (*kv_dot)(const int8_t *keys, const int16_t *query, int pairs, int32_t *sums)
    int kv_dots(kv_dot *found)
    size_t kv_key_at(int slice, int i, int dim)
    void kv_pack_rows(const float *rows, int n_rows, int dim, int16_t *packed, float *scale)
    void kv_softmax_run(kv_dot dot, const int8_t *keys, const uint16_t *scales, int n_tiles,
                        int n_slices, int pairs, const int16_t *query, const float *query_scale,
                        int n_rows, float *out, float *maximum, float *total)
    void kv_add_powers(const float *e, int n_rows, int width, const float *factor,
                       int power, float *score)

DEFAULT_THREADS = 2

# A thread takes a part of a pair's rows at a time, one pass over its keys. So many rows pay for
# reading the keys, and leave enough parts of a few pairs for many threads.
cdef int MAX_PART_ROWS = 48

# Floats that one thread holds of a part's probabilities: 16 MB. Longer histories have smaller
# parts.
cdef size_t MAX_PROBABILITIES = 4 * 1024 * 1024

cdef enum:
    MAX_THREADS = 16
    MAX_DOTS = 4

MOST_THREADS = MAX_THREADS

# The versions of the products that this processor runs, the fastest first.
cdef kv_dot DOTS[MAX_DOTS]
cdef int N_DOTS = kv_dots(DOTS)


cdef struct Chunk:
    const unsigned char *base
    int n_slices
    int n_tiles
    size_t start           # of its probabilities, for one row


cdef struct Room:
    float *e               # [width * rows of a part], exp(logit - maximum of its chunk)
    int16_t *query         # of kv_pack_rows
    float *query_scale
    float *maximum         # [n_chunks, rows of a part]
    float *total           # as maximum
    float *factor          # as maximum


cdef int _whole_groups(int rows) noexcept nogil:
    return (rows + KV_ROWS - 1) // KV_ROWS * KV_ROWS


cdef int _part_rows(size_t width, int n_rows) noexcept nogil:
    """Rows of a part, the last one may have fewer. Whole groups, and about as many in each."""
    cdef size_t fitting = min(<size_t>MAX_PART_ROWS, MAX_PROBABILITIES // width)
    cdef int most = max(1, <int>fitting // KV_ROWS) * KV_ROWS
    cdef int n_parts = (n_rows + most - 1) // most
    return _whole_groups((n_rows + n_parts - 1) // n_parts)


@final
@no_gc_clear  # __dealloc__ gives the bytes back to the budget
cdef class ScoreScratch:
    """Working memory of scoring, kept from call to call. One call at a time may use it.

    budget: charged for what is held; None counts nothing.
    """

    cdef HostBudget _budget
    cdef float *_data[MAX_THREADS]
    cdef size_t _sizes[MAX_THREADS]  # floats

    def __cinit__(self, HostBudget budget=None):
        self._budget = budget

    def __dealloc__(self):
        cdef int i
        for i in range(MAX_THREADS):
            free(self._data[i])
            if self._budget is not None and self._sizes[i]:
                self._budget.give_back(self._sizes[i] * sizeof(float))

    @property
    def n_bytes(self):
        """Bytes held now."""
        cdef size_t total = 0
        cdef int i
        for i in range(MAX_THREADS):
            total += self._sizes[i]
        return total * sizeof(float)

    cdef int take(self, int thread, int rows, size_t width, int dim, int n_chunks,
                  Room *room) except -1:
        """Room for a part of `rows` query rows, whole groups. It only grows."""
        cdef size_t stats = <size_t>rows * n_chunks
        cdef size_t packed = <size_t>rows * ((dim + 1) // 2)  # floats as wide as two int16
        cdef size_t need = width * rows + packed + rows + 3 * stats
        cdef float *fresh = NULL
        if need > self._sizes[thread]:
            if self._budget is not None:
                self._budget.take((need - self._sizes[thread]) * sizeof(float), "scoring")
            free(self._data[thread])
            self._data[thread] = NULL
            if posix_memalign(<void **>&fresh, 64, need * sizeof(float)):
                if self._budget is not None:
                    self._budget.give_back(need * sizeof(float))
                self._sizes[thread] = 0
                raise MemoryError()
            self._data[thread] = fresh
            self._sizes[thread] = need
        room.e = self._data[thread]
        room.query = <int16_t *>(room.e + width * rows)
        room.query_scale = room.e + width * rows + packed
        room.maximum = room.query_scale + rows
        room.total = room.maximum + stats
        room.factor = room.total + stats
        return 0


cdef void _score_part(
    const Chunk *chunks, int n_chunks, size_t key_offset, size_t scale_offset, int dim,
    const float *query, int rows, int power, float *score, int chunk_slices, Room room,
) noexcept nogil:
    """Add the powers of one part of a pair's rows to score. query: f32 [rows, dim]."""
    cdef int row, c, at
    cdef double top, total
    kv_pack_rows(query, rows, dim, room.query, room.query_scale)
    for c in range(n_chunks):
        kv_softmax_run(
            DOTS[0],
            <const int8_t *>(chunks[c].base + key_offset),
            <const uint16_t *>(chunks[c].base + scale_offset),
            chunks[c].n_tiles, chunks[c].n_slices, (dim + 1) // 2,
            room.query, room.query_scale, rows,
            room.e + chunks[c].start * rows, room.maximum + c * rows, room.total + c * rows,
        )
    for row in range(rows):
        top = -FLT_MAX
        total = 0
        for c in range(n_chunks):
            top = max(top, <double>room.maximum[c * rows + row])
        for c in range(n_chunks):
            at = c * rows + row
            total += room.total[at] * exp(room.maximum[at] - top)
        for c in range(n_chunks):
            at = c * rows + row
            room.factor[at] = <float>(exp(room.maximum[at] - top) / total)
    for c in range(n_chunks):
        kv_add_powers(
            room.e + chunks[c].start * rows, rows, chunks[c].n_tiles * KV_LANES,
            room.factor + c * rows, power, score + <size_t>c * chunk_slices,
        )


cdef class _History:
    """The chunks as they are now: they stay where they are while a worker adds blocks."""

    cdef KeySummaries summaries
    cdef Chunk *chunks
    cdef int n_chunks
    cdef size_t width
    cdef int chunk_slices

    def __dealloc__(self):
        free(self.chunks)

    def part_rows(self, int n_rows):
        return _part_rows(self.width, n_rows)

    def score(self, int pair, const float[:, ::1] query, int power, float[::1] score,
              ScoreScratch scratch, int thread):
        """Add what one part of a pair's rows says to score: query [rows, dim]."""
        cdef int dim = self.summaries._dim[pair], rows = <int>query.shape[0]
        cdef size_t key_offset = self.summaries._key_offset[pair]
        cdef size_t scale_offset = self.summaries._scale_offset[pair]
        cdef Room room
        scratch.take(thread, _whole_groups(rows), self.width, dim, self.n_chunks, &room)
        with nogil:
            _score_part(
                self.chunks, self.n_chunks, key_offset, scale_offset, dim, &query[0, 0],
                rows, power, &score[0], self.chunk_slices, room,
            )


cdef _History _snapshot(KeySummaries summaries, int n_blocks):
    cdef _History history = _History()
    cdef int c, slices = summaries.blocks_per_chunk * summaries.slices_per_block
    cdef int left = n_blocks * summaries.slices_per_block
    history.summaries = summaries
    history.n_chunks = (left + slices - 1) // slices
    history.chunk_slices = summaries.chunk_slices
    history.chunks = <Chunk *>calloc(history.n_chunks, sizeof(Chunk))
    if history.chunks == NULL:
        raise MemoryError()
    for c in range(history.n_chunks):
        history.chunks[c].base = summaries._chunks.at(c)
        history.chunks[c].n_slices = min(left, slices)
        history.chunks[c].n_tiles = (history.chunks[c].n_slices + KV_LANES - 1) // KV_LANES
        history.chunks[c].start = history.width
        history.width += history.chunks[c].n_tiles * KV_LANES
        left -= slices
    return history


def score_slices(
    KeySummaries summaries not None, rows, int power=2, int threads=DEFAULT_THREADS,
    ScoreScratch scratch=None, bint equal_pairs=False,
):
    """Score every slice of the summarised history: f32 [n_slices].

    equal_pairs: what each pair says is divided by its sum, so that a pair with few sharp rows does
    not outvote the others.

    rows: for each pair of the summaries f32 [n_rows, head_dim], attn_scale multiplied in.
    power: >= 1. Pairs, and parts of their rows, are shared out over `threads`; the result does not
    depend on their number. scratch: None takes its own for this call.
    """
    cdef int n_blocks = summaries.n_blocks
    cdef int n_pairs = len(summaries.pairs)
    cdef int pair
    if len(rows) != n_pairs:
        raise ValueError(f"{len(rows)} row sets for {n_pairs} pairs")
    if power < 1 or not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"power {power} must be >= 1, threads {threads} in 1 .. {MAX_THREADS}")
    for pair in range(n_pairs):
        if rows[pair].ndim != 2 or rows[pair].shape[1] != summaries._dim[pair]:
            raise ValueError(
                f"rows of pair {pair} are {rows[pair].shape}, keys have {summaries._dim[pair]} dims"
            )
    if n_blocks == 0 or all(len(r) == 0 for r in rows):
        return np.zeros(n_blocks * summaries.slices_per_block, np.float32)

    history = _snapshot(summaries, n_blocks)
    scratch = ScoreScratch() if scratch is None else scratch
    parts = []
    for pair in range(n_pairs):
        if len(rows[pair]):
            step = history.part_rows(len(rows[pair]))
            parts += [(pair, first, first + step) for first in range(0, len(rows[pair]), step)]
    outs = np.zeros((len(parts), history.n_chunks * history.chunk_slices), np.float32)
    left = iter(range(len(parts)))

    def work(thread):
        # `left` is shared: whoever is free takes the next part.
        for index in left:
            pair, first, end = parts[index]
            part = np.ascontiguousarray(rows[pair][first:end], np.float32)
            history.score(pair, part, power, outs[index], scratch, thread)

    threads = min(threads, len(parts))
    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvmem-score") as pool:
            list(pool.map(work, range(threads)))
    if equal_pairs:
        of_pair = np.array([pair for pair, _, _ in parts])
        totals = np.bincount(of_pair, weights=outs.sum(axis=1))[of_pair, None]
        outs /= np.where(totals > 0, totals, 1).astype(np.float32)
    # Added up in the order of the parts, whoever was done first.
    slices = outs.sum(axis=0).reshape(history.n_chunks, history.chunk_slices)
    used = summaries.blocks_per_chunk * summaries.slices_per_block
    slices = slices[:, :used].reshape(-1)
    return np.ascontiguousarray(slices[: n_blocks * summaries.slices_per_block])


def score_blocks(
    query, KeySummaries summaries not None, int power=2, int threads=DEFAULT_THREADS,
    ScoreScratch scratch=None, int head_slices=1, int tail_slices=1, bint equal_pairs=False,
    float centring=0,
):
    """Score every summarised block with the pairs of the summaries.

    query: Query, whose layers hold those of the pairs. Returns (blocks f32 [n_blocks], edges f32
    [n_blocks, 2]: the parts of the score in the first head_slices and in the last tail_slices of a
    block). equal_pairs: see score_slices.
    centring: this part of the mean row of a pair is taken off each of its rows, 0 .. 1; a single
    row stays as it is.
    """
    if not (1 <= head_slices <= summaries.slices_per_block
            and 1 <= tail_slices <= summaries.slices_per_block):
        raise ValueError(f"head_slices {head_slices} and tail_slices {tail_slices} must be in "
                         f"1 .. {summaries.slices_per_block}")
    if not 0 <= centring <= 1:
        raise ValueError(f"centring {centring} must be in 0 .. 1")
    rows = []
    for pair in summaries.pairs:
        heads = query.heads(pair)
        n_rows, group, dim = heads.shape
        scale = summaries.layout.layers[pair.layer].score_scale
        if not np.isfinite(heads).all():
            raise ValueError(f"the query's rows of layer index {pair.layer} are not all finite")
        scaled = heads.reshape(n_rows * group, dim) * np.float32(scale)
        if centring and n_rows > 1:
            scaled -= np.float32(centring) * scaled.mean(axis=0, dtype=np.float64)
        rows.append(scaled)
    slices = score_slices(summaries, rows, power, threads, scratch, equal_pairs)
    slices = slices.reshape(summaries.n_blocks, summaries.slices_per_block)
    edges = np.stack(
        [slices[:, :head_slices].sum(axis=1), slices[:, -tail_slices:].sum(axis=1)], axis=1
    )
    return slices.sum(axis=1), edges


def dot_products(const float[:, ::1] rows not None, const int8_t[:, ::1] keys not None):
    """What each version that this processor runs makes of rows and keys, plain C last, for tests.

    rows: f32 [KV_ROWS, dim], keys: i8 [KV_LANES, dim]. Returns (sums i32 [versions, KV_ROWS,
    KV_LANES], what 1 stands for in a row's sums f32 [KV_ROWS]).
    """
    cdef int dim = <int>rows.shape[1], pairs = (dim + 1) // 2, lane, i, version
    if rows.shape[0] != KV_ROWS or keys.shape[0] != KV_LANES or keys.shape[1] != dim or dim == 0:
        raise ValueError(f"needed are {KV_ROWS} rows and {KV_LANES} keys of as many dims")
    cdef int8_t[::1] tile = np.full(pairs * KV_LANES * 2, -128, np.int8)
    cdef int16_t[::1] packed = np.zeros(pairs * KV_ROWS * 2, np.int16)
    scale = np.zeros(KV_ROWS, np.float32)
    sums = np.zeros((N_DOTS, KV_ROWS, KV_LANES), np.int32)
    cdef float[::1] scale_view = scale
    cdef int32_t[:, :, ::1] sums_view = sums
    for lane in range(KV_LANES):
        for i in range(dim):
            tile[kv_key_at(lane, i, dim)] = keys[lane, i]
    kv_pack_rows(&rows[0, 0], KV_ROWS, dim, &packed[0], &scale_view[0])
    for version in range(N_DOTS):
        DOTS[version](<const int8_t *>&tile[0], &packed[0], pairs, &sums_view[version, 0, 0])
    return sums, scale
