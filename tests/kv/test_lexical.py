"""The token index against a twin made of sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_retrieval import lexical

from kvmem.errors import CapacityError, ConfigError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.lexical import LexicalIndex


def fill(index: LexicalIndex, tokens: np.ndarray, first: int = 0) -> LexicalIndex:
    size = index.block_tokens
    for block in range(first, len(tokens) // size):
        index.add(block, np.ascontiguousarray(tokens[block * size : (block + 1) * size], np.int32))
    return index


@settings(max_examples=60, deadline=None)
@given(
    block=st.sampled_from([1, 4, 12, 32]),
    unit=st.sampled_from([1, 4, 8, 32]),
    n_blocks=st.integers(0, 9),
    vocabulary=st.sampled_from([2, 10, 200_000]),
    n_query=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_units_score_as_the_twin_says(
    block: int, unit: int, n_blocks: int, vocabulary: int, n_query: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-1, vocabulary, block * n_blocks).astype(np.int32)
    query = rng.integers(-1, vocabulary, n_query).astype(np.int32)
    if len(tokens):
        query[: n_query // 2] = rng.choice(tokens, n_query // 2)
    index = fill(LexicalIndex(block, unit), tokens)
    found = index.score(query)
    assert found.shape == (n_blocks, index.units_per_block)
    wanted = lexical(tokens.tolist(), query.tolist(), block, index.unit_tokens)
    assert np.allclose(found, np.array(wanted).reshape(found.shape), rtol=1e-5, atol=1e-6)


def test_a_rare_word_beats_many_common_ones() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, 128 * 50).astype(np.int32)
    tokens[128 * 31 + 77] = 9999
    units = fill(LexicalIndex(128), tokens).score(np.array([1, 2, 3, 9999], np.int32))
    assert units.argmax() == 31 * 4 + 2


def test_truncated_and_refilled_equals_fresh() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, 32 * 1200).astype(np.int32)  # 3 chunks
    query = rng.integers(0, 50, 10).astype(np.int32)
    index = fill(LexicalIndex(32), tokens)
    for keep in (1100, 600, 0):
        index.truncate(keep)
        fresh = fill(LexicalIndex(32), tokens[: 32 * keep])
        assert np.array_equal(index.score(query), fresh.score(query))
        assert index.n_bytes == fresh.n_bytes
        fill(index, rng.integers(0, 50, len(tokens)).astype(np.int32), keep)
        index.truncate(keep)
        fill(index, tokens, keep)
        assert np.array_equal(index.score(query), fill(LexicalIndex(32), tokens).score(query))


def test_bytes_are_counted_and_given_back() -> None:
    budget = HostBudget(10**6)
    index = fill(LexicalIndex(128, budget=budget), np.zeros(128 * 130, np.int32))
    assert budget.used == index.n_bytes == 2 * 16384 * 4
    index.truncate(128)
    assert budget.used == index.n_bytes == 16384 * 4
    del index
    assert budget.used == 0
    full = LexicalIndex(128, budget=HostBudget(100))
    with pytest.raises(CapacityError, match="token index"):
        full.add(0, np.zeros(128, np.int32))
    assert full.n_blocks == 0


def test_permuted_blocks_permute_their_scores() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 300, (40, 64)).astype(np.int32)
    order = rng.permutation(40)
    query = rng.integers(0, 300, 12).astype(np.int32)
    plain = fill(LexicalIndex(64), tokens.reshape(-1)).score(query)
    moved = fill(LexicalIndex(64), tokens[order].reshape(-1)).score(query)
    assert np.array_equal(moved, plain[order])
    assert not np.array_equal(moved, plain)


def test_doors_refuse_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        LexicalIndex(0)
    with pytest.raises(ConfigError, match="unit_tokens"):
        LexicalIndex(32, 0)
    index = LexicalIndex(32)
    with pytest.raises(StateError, match="out of order"):
        index.add(1, np.zeros(32, np.int32))
    with pytest.raises(ValueError, match="31 tokens"):
        index.add(0, np.zeros(31, np.int32))
    with pytest.raises(ValueError, match="n_blocks"):
        index.truncate(-1)
