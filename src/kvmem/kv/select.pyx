"""Which blocks should be resident: pure functions of scores and a budget."""

import numpy as np

from kvmem.errors import CapacityError

from kvmem.ids cimport BlockId

__all__ = ["block_ids", "select"]

MAX_BLOCK = 2**31 - 1


def select(scores, int n_blocks, int budget_blocks, pins=(), int sink_blocks=1, int recent_blocks=1,
           *, edge=None, float edge_threshold=float("inf")):
    """Choose the blocks to hold, at most budget_blocks of them.

    Candidates stand in one line, and the budget cuts it; so a larger budget only adds. In line are:
    the newest block (its cells are written next), the pins, the sink, the recent blocks (newest
    first), then all blocks by falling score, the newer first among equals.

    With `edge`, a block that came by its score brings its neighbours along, right behind it: each
    whose slice at the common border scores at least edge_threshold. They bring nobody.

    Args:
        scores: f32 [n_blocks], higher is better.
        pins: block ids that must be in, whatever they score.
        sink_blocks: first blocks to hold.
        recent_blocks: newest blocks to hold.
        edge: f32 [n_blocks, 2], scores of each block's first and last slice.

    Returns:
        int32 [n], ascending, unique.

    Raises:
        CapacityError: the newest block and the pins alone are more than the budget.
        ValueError: a score is NaN, a block does not exist, shapes disagree.
    """
    if n_blocks < 0 or budget_blocks < 1 or sink_blocks < 0 or recent_blocks < 0:
        raise ValueError(f"n_blocks={n_blocks}, budget_blocks={budget_blocks}, "
                         f"sink_blocks={sink_blocks}, recent_blocks={recent_blocks}")
    pinned = _known_ids(pins, n_blocks, "pins")
    ranked = _rank(scores, n_blocks)
    line = np.concatenate([
        np.arange(n_blocks - 1, n_blocks, dtype=np.int32) if n_blocks else pinned,
        pinned,
    ]).astype(np.int32, copy=False)
    n_must = np.unique(line).size
    if n_must > budget_blocks:
        raise CapacityError(f"{n_must} blocks must stay, but the budget is {budget_blocks} blocks; "
                            "raise the budget or pin less")
    line = np.concatenate([
        line,
        np.arange(min(sink_blocks, n_blocks), dtype=np.int32),
        np.arange(n_blocks - 1, max(n_blocks - recent_blocks, 0) - 1, -1, dtype=np.int32),
    ])
    if edge is None:
        edges = np.empty((0, 2), dtype=np.float32)
    else:
        edges = np.ascontiguousarray(edge, dtype=np.float32)
        if edges.shape != (n_blocks, 2):
            raise ValueError(f"edge has shape {edges.shape}, not ({n_blocks}, 2)")
    chosen = np.zeros(n_blocks, dtype=np.uint8)
    _cut_line(line, ranked, edges, edge_threshold, budget_blocks, chosen)
    return np.flatnonzero(chosen).astype(np.int32)


def _rank(scores, int n_blocks):
    """All blocks by falling score, the newer first among equals: int32 [n_blocks]."""
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (n_blocks,):
        raise ValueError(f"scores has shape {values.shape}, not ({n_blocks},)")
    if np.isnan(values).any():
        raise ValueError(f"the score of block {int(np.isnan(values).argmax())} is NaN")
    return np.argsort(values, kind="stable")[::-1].astype(np.int32)


def block_ids(blocks, str name):
    """Any row of whole numbers as int32 [n]; ValueError names what it is otherwise."""
    ids = np.asarray(blocks if isinstance(blocks, np.ndarray) else list(blocks))
    if ids.size == 0:
        return np.empty(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a row of block ids")
    if ids.min() < 0 or ids.max() > MAX_BLOCK:
        raise ValueError(f"{name} holds {ids.min()}..{ids.max()}, which are no block ids")
    return ids.astype(np.int32)


def _known_ids(blocks, int n_blocks, str name):
    ids = block_ids(blocks, name)
    if ids.size and ids.max() >= n_blocks:
        raise ValueError(f"{name} holds block {ids.max()}, but there are {n_blocks}")
    return ids


cdef inline bint _admit(unsigned char[::1] chosen, BlockId block, int *n_left) noexcept nogil:
    """Take the block if it is not in yet; False if the budget is used up."""
    if chosen[block]:
        return True
    if n_left[0] == 0:
        return False
    chosen[block] = 1
    n_left[0] -= 1
    return True


cdef void _cut_line(const int[::1] line, const int[::1] ranked, const float[:, ::1] edge,
                    float edge_threshold, int n_left, unsigned char[::1] chosen) noexcept nogil:
    cdef Py_ssize_t i
    cdef BlockId block
    cdef BlockId n_edges = <BlockId>edge.shape[0]
    for i in range(line.shape[0]):
        if not _admit(chosen, line[i], &n_left):
            return
    for i in range(ranked.shape[0]):
        block = ranked[i]
        if not _admit(chosen, block, &n_left):
            return
        if n_edges == 0:
            continue
        if block > 0 and edge[block - 1, 1] >= edge_threshold:
            if not _admit(chosen, block - 1, &n_left):
                return
        if block + 1 < n_edges and edge[block + 1, 0] >= edge_threshold:
            if not _admit(chosen, block + 1, &n_left):
                return
