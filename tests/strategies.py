"""Hypothesis strategies for the memory's parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmem.kv.residency import Residency

seeds = st.integers(0, 2**32 - 1)
faults = st.integers(0, 12).map(lambda n: n if n <= 6 else 0)
"""Which copy of a call fails; 0: none."""


@dataclass
class Pool:
    """A residency, and the same as a dict of block to slot."""

    residency: Residency
    held: dict[int, int]


@st.composite
def pools(draw: st.DrawFn, max_blocks: int = 24) -> Pool:
    """Any blocks in any slots of a pool of any regions."""
    residency = Residency(draw(st.integers(1, 8)), draw(st.integers(0, 4)), draw(st.integers(0, 2)))
    seed = draw(seeds)
    random = np.random.default_rng(seed)
    n_used = draw(st.integers(0, min(residency.n_slots, max_blocks)))
    blocks = random.permutation(max_blocks)[:n_used].tolist()
    slots = random.permutation(residency.n_slots)[:n_used].tolist()
    held = dict(zip(blocks, slots, strict=True))
    for block, slot in held.items():
        residency.put(block, slot)
    return Pool(residency, held)


@st.composite
def selections_of(
    draw: st.DrawFn, pool: Pool, n_most: int, max_blocks: int = 24
) -> NDArray[np.int32]:
    """Ascending block ids, at most n_most: some that are held and some that are not."""
    random = np.random.default_rng(draw(seeds))
    held = random.permutation(np.array(sorted(pool.held), dtype=np.int32))
    absent = random.permutation(np.setdiff1d(np.arange(max_blocks, dtype=np.int32), held))
    n_held = draw(st.integers(0, min(len(held), n_most)))
    n_absent = draw(st.integers(0, min(len(absent), n_most - n_held)))
    return np.sort(np.concatenate([held[:n_held], absent[:n_absent]])).astype(np.int32)


@dataclass
class Choice:
    """Arguments of one selection."""

    scores: NDArray[np.float32]
    edge: NDArray[np.float32] | None
    edge_threshold: float
    budget_blocks: int
    pins: list[int]
    sink_blocks: int
    recent_blocks: int

    @property
    def n_blocks(self) -> int:
        return len(self.scores)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    """Scores of few values, so that ties are common."""
    n_blocks = draw(st.integers(1, 24))
    values = st.sampled_from([float("-inf"), -1.0, 0.0, 0.25, 0.5, 3.0])
    scores = draw(st.lists(values, min_size=n_blocks, max_size=n_blocks))
    edge = None
    if draw(st.booleans()):
        flat = draw(st.lists(values, min_size=2 * n_blocks, max_size=2 * n_blocks))
        edge = np.array(flat, dtype=np.float32).reshape(n_blocks, 2)
    return Choice(
        scores=np.array(scores, dtype=np.float32),
        edge=edge,
        edge_threshold=draw(st.sampled_from([0.25, 0.5, float("inf")])),
        budget_blocks=draw(st.integers(1, 26)),
        pins=draw(st.lists(st.integers(0, n_blocks - 1), max_size=4)),
        sink_blocks=draw(st.integers(0, 3)),
        recent_blocks=draw(st.integers(0, 3)),
    )
