"""Scores of blocks from the query's rows and the key summaries.

    p[h,t,s] = softmax over all slices s of (q[h,t] . key[s] * attn_scale)
    score(b) = sum over pairs, heads h of the pair, rows t, slices s in b of w_h * p[h,t,s]^power
power 2 lets rows that know speak louder than rows that do not; power 1 is attention mass. Rows may
be centred: what all of them like says little about any of them.
Source: docs/retrieval.md. The softmax is streamed: each chunk of slices is reduced by its own
maximum, and rescaled once the whole history's maximum and sum are known.
"""

from concurrent.futures import ThreadPoolExecutor

from libc.float cimport FLT_MAX
from libc.math cimport exp
from libc.stdint cimport int8_t, int16_t, uint16_t
from libc.stdlib cimport calloc, free
from posix.stdlib cimport posix_memalign

from cython cimport final, no_gc_clear

from kvmem.kv.budget cimport HostBudget
from kvmem.kv.summary cimport KeySummaries

import numpy as np

__all__ = ["DEFAULT_THREADS", "MOST_THREADS", "ScoreScratch", "score_blocks", "score_slices"]

cdef extern from "kernels.h" nogil:
    enum: KV_LANES
    enum: KV_ROWS
    enum: KV_VNNI_MAX_DIM
    int kv_has_vnni()
    void kv_quantize_rows(const float *query, int dim, int n_groups, int16_t *out, float *scale)
    void kv_softmax_run(const int8_t *keys, const uint16_t *scales, int n_tiles, int n_slices,
                        int dim, const float *query, const int16_t *whole,
                        const float *whole_scale, int n_groups, float *tile, float *out,
                        float *maximum, float *total)
    void kv_add_powers(const float *e, int n_rows, int width, const float *factor,
                       const float *weight, int power, float *score)

DEFAULT_THREADS = 2

# Floats that one thread holds of a pair's probabilities: 16 MB. Longer histories or more rows are
# scored in several passes over the keys.
cdef size_t MAX_PROBABILITIES = 4 * 1024 * 1024

cdef enum:
    MAX_THREADS = 16

MOST_THREADS = MAX_THREADS


cdef struct Chunk:
    const unsigned char *base
    int n_slices
    int n_tiles
    size_t start           # of its probabilities, for one row


cdef struct Room:
    float *e               # [width * rows of a pass], exp(logit - maximum of its chunk)
    float *tile            # [dim * KV_LANES]
    float *maximum         # [n_chunks, rows of a pass]
    float *total           # as maximum
    float *factor          # as maximum
    float *whole_scale     # [rows of a pass]
    int16_t *whole         # [rows of a pass * dim], the query in whole numbers; NULL without VNNI


cdef int _groups_per_pass(size_t width, int n_groups) noexcept nogil:
    cdef size_t groups = MAX_PROBABILITIES // (width * KV_ROWS)
    return <int>max(1, min(groups, <size_t>n_groups))


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
        """Room for passes of `rows` query rows. It only grows."""
        cdef size_t stats = _round(<size_t>rows * n_chunks)
        cdef size_t scales = _round(rows)
        cdef size_t need = (width * rows + <size_t>dim * KV_LANES + 3 * stats + scales
                            + _round(<size_t>rows * dim) // 2)
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
        room.tile = room.e + width * rows
        room.maximum = room.tile + <size_t>dim * KV_LANES
        room.total = room.maximum + stats
        room.factor = room.total + stats
        room.whole_scale = room.factor + stats
        room.whole = NULL
        if kv_has_vnni() and dim % 2 == 0 and dim <= KV_VNNI_MAX_DIM:
            room.whole = <int16_t *>(room.whole_scale + scales)
        return 0


cdef size_t _round(size_t n) noexcept nogil:
    return (n + KV_LANES - 1) // KV_LANES * KV_LANES


cdef void _score_pair(
    const Chunk *chunks, int n_chunks, size_t key_offset, size_t scale_offset, int dim,
    size_t width, const float *query, const float *weight, int n_groups, int power, float *score,
    int chunk_slices, Room room,
) noexcept nogil:
    """Add one pair's powers to score. query: packed groups of KV_ROWS rows."""
    cdef int groups_per_pass = _groups_per_pass(width, n_groups)
    cdef int first = 0, groups, rows, row, c, at
    cdef double top, total
    while first < n_groups:
        groups = min(groups_per_pass, n_groups - first)
        rows = groups * KV_ROWS
        if room.whole != NULL:
            kv_quantize_rows(query + <size_t>first * KV_ROWS * dim, dim, groups, room.whole,
                             room.whole_scale)
        for c in range(n_chunks):
            kv_softmax_run(
                <const int8_t *>(chunks[c].base + key_offset),
                <const uint16_t *>(chunks[c].base + scale_offset),
                chunks[c].n_tiles, chunks[c].n_slices, dim,
                query + <size_t>first * KV_ROWS * dim, room.whole, room.whole_scale, groups,
                room.tile, room.e + chunks[c].start * rows, room.maximum + c * rows,
                room.total + c * rows,
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
                room.factor + c * rows, weight + first * KV_ROWS, power,
                score + <size_t>c * chunk_slices,
            )
        first += groups


cdef class _History:
    """The chunks as they are now: they stay where they are while a worker adds blocks."""

    cdef KeySummaries summaries
    cdef Chunk *chunks
    cdef int n_chunks
    cdef size_t width
    cdef int chunk_slices

    def __dealloc__(self):
        free(self.chunks)

    def score(self, int pair, const float[:, :, ::1] query, const float[::1] weight, int power,
              float[::1] score, ScoreScratch scratch, int thread):
        cdef int dim = self.summaries._dim[pair], n_groups = <int>query.shape[0]
        cdef size_t key_offset = self.summaries._key_offset[pair]
        cdef size_t scale_offset = self.summaries._scale_offset[pair]
        cdef int rows = _groups_per_pass(self.width, n_groups) * KV_ROWS
        cdef Room room
        scratch.take(thread, rows, self.width, dim, self.n_chunks, &room)
        with nogil:
            _score_pair(
                self.chunks, self.n_chunks, key_offset, scale_offset, dim, self.width,
                &query[0, 0, 0], &weight[0], n_groups, power, &score[0], self.chunk_slices, room,
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
    KeySummaries summaries not None, rows, weights, int power=2, int threads=DEFAULT_THREADS,
    ScoreScratch scratch=None, bint equal_pairs=False,
):
    """Score every slice of the summarised history: f32 [n_slices].

    equal_pairs: what each pair says is divided by its sum, so that a pair with few sharp rows does
    not outvote the others.

    rows: for each pair of the summaries f32 [n_rows, head_dim], attn_scale multiplied in.
    weights: for each pair f32 [n_rows]. power: >= 1. Pairs are shared out over `threads`; the
    result does not depend on their number. scratch: None takes its own for this call.
    """
    cdef int n_blocks = summaries.n_blocks
    cdef int n_pairs = len(summaries.pairs)
    cdef int pair
    if len(rows) != n_pairs or len(weights) != n_pairs:
        raise ValueError(f"{len(rows)} row sets and {len(weights)} weights for {n_pairs} pairs")
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
    outs = np.zeros((n_pairs, history.n_chunks * history.chunk_slices), np.float32)
    left = iter(range(n_pairs))

    def work(thread):
        # `left` is shared: whoever is free takes the next pair.
        for pair in left:
            if len(rows[pair]):
                packed, weight = _pack(rows[pair], weights[pair])
                history.score(pair, packed, weight, power, outs[pair], scratch, thread)

    threads = min(threads, n_pairs)
    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvmem-score") as pool:
            list(pool.map(work, range(threads)))
    if equal_pairs:
        totals = outs.sum(axis=1, keepdims=True)
        outs /= np.where(totals > 0, totals, 1)
    # Added up in the order of the pairs, whoever was done first.
    slices = outs.sum(axis=0).reshape(history.n_chunks, history.chunk_slices)
    used = summaries.blocks_per_chunk * summaries.slices_per_block
    slices = slices[:, :used].reshape(-1)
    return np.ascontiguousarray(slices[: n_blocks * summaries.slices_per_block])


def score_blocks(
    query, KeySummaries summaries not None, weights=None, int power=2, int threads=DEFAULT_THREADS,
    ScoreScratch scratch=None, int head_slices=1, int tail_slices=1, bint equal_pairs=False,
    float centring=0,
):
    """Score every summarised block with the pairs of the summaries.

    query: Query, whose layers hold those of the pairs. weights: f32 [n_pairs] or [n_pairs, group],
    None means 1. Returns (blocks f32 [n_blocks], edges f32 [n_blocks, 2]: the parts of the score in
    the first head_slices and in the last tail_slices of a block). equal_pairs: see score_slices.
    centring: this part of the mean row of a pair is taken off each of its rows, 0 .. 1; a single
    row stays as it is.
    """
    if not (1 <= head_slices <= summaries.slices_per_block
            and 1 <= tail_slices <= summaries.slices_per_block):
        raise ValueError(f"head_slices {head_slices} and tail_slices {tail_slices} must be in "
                         f"1 .. {summaries.slices_per_block}")
    if not 0 <= centring <= 1:
        raise ValueError(f"centring {centring} must be in 0 .. 1")
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
        scaled = heads.reshape(n_rows * group, dim) * np.float32(scale)
        if centring and n_rows > 1:
            scaled -= np.float32(centring) * scaled.mean(axis=0, dtype=np.float64)
        rows.append(scaled)
        row_weights.append(np.tile(np.broadcast_to(given[index], group), n_rows))
    slices = score_slices(summaries, rows, row_weights, power, threads, scratch, equal_pairs)
    slices = slices.reshape(summaries.n_blocks, summaries.slices_per_block)
    edges = np.stack(
        [slices[:, :head_slices].sum(axis=1), slices[:, -tail_slices:].sum(axis=1)], axis=1
    )
    return slices.sum(axis=1), edges
