"""The scorers by name. The one that was asked for is the one that runs, or there is an error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import ConfigError, StateError
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.query import Query
from kvmem.kv.score import DEFAULT_THREADS, ScoreScratch, score_blocks
from kvmem.kv.summary import KeySummaries

__all__ = [
    "DEFAULT_SCORER",
    "HEADS_CENTRING",
    "SCORERS",
    "ScoreInputs",
    "Scores",
    "edge_slices",
    "fuse",
    "rank",
    "run_scorer",
]

F32 = NDArray[np.float32]

DEFAULT_SCORER = "fused"

# The part of a pair's mean row that `heads` takes off each row: a background that every word of a
# question shares. Chosen among 0, 1/4, 1/2, 3/4 and 1 (docs/retrieval.md).
HEADS_CENTRING = 0.5

# Damping of reciprocal-rank fusion: a first place counts 1/11. Source: docs/retrieval.md.
RANK_DAMPING = 10.0

# How near a block's border is near. What answers a question mostly stands behind what is like it:
# the end counts from farther away. Source: docs/retrieval.md, "Facts behind a border".
EDGE_HEAD_TOKENS = 8
EDGE_TAIL_TOKENS = 16

# Keeps the cosine of a zero vector finite. Source: the reference system's scorer.
COSINE_EPSILON = 1e-6


class Scores(NamedTuple):
    """What a scorer says of the sealed blocks; higher is better, no unit.

    edges: the parts of a block's attention score that lie near its start and near its end
    (EDGE_HEAD_TOKENS, EDGE_TAIL_TOKENS), 0 to 1; 0 where a scorer does not look at slices.
    """

    scorer: str
    blocks: F32  # [n_blocks]
    edges: F32  # [n_blocks, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs:
    """What a scorer may read. n_blocks: sealed blocks of the history, summarised and indexed.

    equal_pairs: whether each pair has the same say, as calibrated ones have. scratch: kept by the
    caller, so that scoring allocates nothing large.
    """

    n_blocks: int
    query: Query | None = None
    summaries: KeySummaries | None = None
    lexical: LexicalIndex | None = None
    equal_pairs: bool = False
    threads: int = DEFAULT_THREADS
    scratch: ScoreScratch | None = None


def run_scorer(name: str, inputs: ScoreInputs) -> Scores:
    """Run one scorer. ConfigError: unknown name, or what it reads is not there.

    StateError: summaries or token index do not cover exactly the sealed blocks.
    """
    if name not in SCORERS:
        raise ConfigError("scorer", name, f"one of {', '.join(SCORERS)}")
    blocks, edges = SCORERS[name](name, inputs)
    return Scores(name, blocks, edges)


def rank(scores: F32) -> NDArray[np.float64]:
    """Rank of each score, 1 for the highest; equal scores share the mean of their ranks."""
    _, inverse, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return mean


def fuse(first: F32, second: F32) -> F32:
    """Reciprocal-rank fusion of two scores of the same blocks: f32 [n_blocks].

    Source: Cormack, Clarke and Buettcher, SIGIR 2009, with a damping of 10 for short lists.
    """
    return (1 / (RANK_DAMPING + rank(first)) + 1 / (RANK_DAMPING + rank(second))).astype(np.float32)


def _need_heads(name: str, inputs: ScoreInputs) -> tuple[Query, KeySummaries]:
    if inputs.query is None or inputs.summaries is None:
        raise ConfigError(
            "scorer", name, "one that needs no query rows and key summaries: there are none"
        )
    if inputs.summaries.n_blocks != inputs.n_blocks:
        raise StateError(
            f"{inputs.summaries.n_blocks} blocks are summarised, not {inputs.n_blocks}"
        )
    return inputs.query, inputs.summaries


def edge_slices(slices_per_block: int, slice_tokens: int) -> tuple[int, int]:
    """How many of a block's slices are near its start, and how many near its end."""
    head, tail = (
        min(slices_per_block, max(1, n_tokens // slice_tokens))
        for n_tokens in (EDGE_HEAD_TOKENS, EDGE_TAIL_TOKENS)
    )
    return head, tail


def _attention(name: str, inputs: ScoreInputs, power: int, centring: float = 0) -> tuple[F32, F32]:
    query, summaries = _need_heads(name, inputs)
    head, tail = edge_slices(summaries.slices_per_block, summaries.slice_tokens)
    blocks, edges = score_blocks(
        query,
        summaries,
        power,
        inputs.threads,
        inputs.scratch,
        head,
        tail,
        inputs.equal_pairs,
        centring,
    )
    return blocks, np.divide(edges, blocks[:, None], np.zeros_like(edges), where=edges > 0)


def _heads(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    return _attention(name, inputs, 2, HEADS_CENTRING)


def _mass(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    return _attention(name, inputs, 1)


def _cosine(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    # The reference's score: cosine of the block's mean key and the query's mean over tokens and
    # group heads, averaged over heads, then over layers.
    query, summaries = _need_heads(name, inputs)
    edges = np.zeros((inputs.n_blocks, 2), np.float32)
    if query.n_rows == 0:
        return np.zeros(inputs.n_blocks, np.float32), edges
    by_layer: dict[int, list[NDArray[np.float64]]] = {}
    for index, pair in enumerate(summaries.pairs):
        asked = query.heads(pair).mean(axis=(0, 1), dtype=np.float64)
        keys = summaries.block_keys(index).astype(np.float64)
        norm = np.linalg.norm(keys, axis=1) * np.linalg.norm(asked) + COSINE_EPSILON
        by_layer.setdefault(pair.layer, []).append(keys @ asked / norm)
    blocks = np.mean([np.mean(heads, axis=0) for heads in by_layer.values()], axis=0)
    return blocks.astype(np.float32), edges


def _lexical(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    if inputs.query is None or inputs.lexical is None:
        raise ConfigError(
            "scorer", name, "one that needs no query tokens and token index: there are none"
        )
    if inputs.lexical.n_blocks != inputs.n_blocks:
        raise StateError(
            f"tokens of {inputs.lexical.n_blocks} blocks are indexed, not {inputs.n_blocks}"
        )
    units = inputs.lexical.score(inputs.query.tokens)
    return units.max(axis=1), np.zeros((inputs.n_blocks, 2), np.float32)


def _recency(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    del name
    blocks = np.arange(1, inputs.n_blocks + 1, dtype=np.float32)
    return blocks, np.zeros((inputs.n_blocks, 2), np.float32)


def _fused(name: str, inputs: ScoreInputs) -> tuple[F32, F32]:
    blocks, edges = _heads(name, inputs)
    words, _ = _lexical(name, inputs)
    return fuse(blocks, words), edges


SCORERS: Mapping[str, Callable[[str, ScoreInputs], tuple[F32, F32]]] = MappingProxyType(
    {
        "fused": _fused,
        "heads": _heads,
        "lexical": _lexical,
        "mass": _mass,
        "cosine": _cosine,
        "recency": _recency,
    }
)
