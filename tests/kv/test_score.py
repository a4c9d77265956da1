"""Scores against float64 twins, and what must hold of any scorer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles_retrieval import cosine, mean_rank, rotate, slice_scores
from synthetic_kv import F16, NEOX, History, make_history, make_layout, positions, store

from kvmem.errors import CapacityError, ConfigError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.layout import KvLayout, Pair, RopeSpec
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.query import Query
from kvmem.kv.score import ScoreScratch, dot_products, score_blocks, score_slices
from kvmem.kv.scorers import HEADS_CENTRING, SCORERS, ScoreInputs, fuse, rank, run_scorer
from kvmem.kv.summary import KeySummaries

# int16 rows and int8 keys against float64 rows and the same int8 keys: the logits of these tests, a
# few units wide, are off by up to 3e-4, and a power of 3 makes three times as much of it.
TOLERANCE = 1e-3


def make_query(layout: KvLayout, n_rows: int = 5, seed: int = 7, strength: float = 2.0) -> Query:
    """Random un-rotated rows for every layer."""
    rng = np.random.default_rng(seed)
    layers = {
        index: (strength * rng.standard_normal((n_rows, layer.n_head, layer.head_dim_k))).astype(
            np.float32
        )
        for index, layer in enumerate(layout.layers)
    }
    return Query(layout=layout, layers=layers, tokens=np.arange(3, dtype=np.int32))


def twin(
    query: Query, summaries: KeySummaries, power: int, centring: float = 0
) -> NDArray[np.float64]:
    """Slice scores in float64 from the summaries' own keys."""
    keys, rows = [], []
    for index, pair in enumerate(summaries.pairs):
        heads = query.heads(pair).astype(np.float64)
        n_rows, _, dim = heads.shape
        keys.append(summaries.keys(index).astype(np.float64))
        common = heads.mean(axis=(0, 1)) if n_rows > 1 else np.zeros(dim)
        rows.append((heads - centring * common).reshape(-1, dim))
    return slice_scores(keys, rows, summaries.layout.layers[0].score_scale, power)


def assert_same_order(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> None:
    """Neighbours in the twin's order keep it wherever they lie apart by more than the tolerance."""
    order = np.argsort(-wanted)
    apart = wanted[order[:-1]] > wanted[order[1:]] * (1 + 2 * TOLERANCE)
    assert apart.mean() > 0.7
    assert (found[order[:-1]] >= found[order[1:]])[apart].all()


@settings(max_examples=25, deadline=None)
@given(
    slice_tokens=st.sampled_from([1, 2, 4, 8, 32]),
    n_blocks=st.integers(1, 40),
    n_rows=st.integers(1, 16),
    group=st.integers(1, 7),
    dim=st.sampled_from([4, 7, 64, 80, 516]),
    power=st.integers(1, 3),
    centring=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_scores_equal_the_twin(
    slice_tokens: int,
    n_blocks: int,
    n_rows: int,
    group: int,
    dim: int,
    power: int,
    centring: float,
    seed: int,
) -> None:
    layout = make_layout(n_head=2 * group, head_dim=dim, ropes=(None,))
    history = make_history(layout, n_blocks, seed)
    summaries = history.fill(KeySummaries(layout, [(1, 0), (0, 1), (0, 0)], slice_tokens))
    query = make_query(layout, n_rows, seed)
    slices = twin(query, summaries, power, centring).reshape(n_blocks, -1)
    blocks, edges = score_blocks(query, summaries, power, centring=centring)
    assert blocks.dtype == edges.dtype == np.float32
    assert np.allclose(blocks, slices.sum(axis=1), rtol=TOLERANCE, atol=1e-9)
    assert np.allclose(edges, slices[:, [0, -1]], rtol=TOLERANCE, atol=1e-9)


@pytest.mark.parametrize("slice_tokens", [1, 4, 8])
def test_edges_and_equal_pairs_equal_the_twin(slice_tokens: int) -> None:
    layout = make_layout(ropes=(None,))
    history = make_history(layout, 50, 3)
    pairs = [(1, 0), (0, 1)]
    summaries = history.fill(KeySummaries(layout, pairs, slice_tokens))
    query = make_query(layout, 5, 3)
    alone = [
        twin(query, history.fill(KeySummaries(layout, [pair], slice_tokens)), 2) for pair in pairs
    ]
    wanted = np.sum([one / one.sum() for one in alone], axis=0).reshape(50, -1)
    head, tail = 8 // slice_tokens, 16 // slice_tokens
    blocks, edges = score_blocks(
        query, summaries, head_slices=head, tail_slices=tail, equal_pairs=True
    )
    assert np.allclose(blocks, wanted.sum(axis=1), rtol=TOLERANCE, atol=1e-9)
    assert np.allclose(edges[:, 0], wanted[:, :head].sum(axis=1), rtol=TOLERANCE, atol=1e-9)
    assert np.allclose(edges[:, 1], wanted[:, -tail:].sum(axis=1), rtol=TOLERANCE, atol=1e-9)
    for wrong_head, wrong_tail in ((0, 1), (1, 33 // slice_tokens + 1)):
        with pytest.raises(ValueError, match="slices"):
            score_blocks(query, summaries, head_slices=wrong_head, tail_slices=wrong_tail)


@pytest.mark.parametrize(
    ("block_tokens", "n_blocks", "n_rows"),
    [
        (32, 600, 16),  # 19,200 slices in 19 chunks; 256 rows in parts of 48
        (1024, 100, 5),  # 80 rows x 102,400 slices are more probabilities than 48 rows may have
    ],
)
def test_several_chunks_and_parts_equal_the_twin(
    block_tokens: int, n_blocks: int, n_rows: int
) -> None:
    layout = make_layout(
        n_layers=1, n_head=16, n_head_kv=1, head_dim=4, ropes=(None,), block_tokens=block_tokens
    )
    history = make_history(layout, n_blocks)
    summaries = history.fill(KeySummaries(layout, [(0, 0)], 1))
    query = make_query(layout, n_rows)
    wanted = twin(query, summaries, 2).reshape(n_blocks, -1).sum(axis=1)
    scratch = ScoreScratch()
    blocks, _ = score_blocks(query, summaries, scratch=scratch, threads=1)
    assert np.allclose(blocks, wanted, rtol=TOLERANCE)
    assert_same_order(blocks, wanted)
    assert scratch.n_bytes < 17 * 2**20
    for threads in (2, 5):
        again, _ = score_blocks(query, summaries, threads=threads)
        assert np.array_equal(again, blocks)


def test_rows_that_are_whole_steps_lose_nothing() -> None:
    # The largest element is 32767 steps of 2^-13 and attn_scale is 1/8: int16 holds all of it.
    layout = make_layout(ropes=(None,))
    summaries = make_history(layout, 50).fill(KeySummaries(layout, layout.pairs(), 1))
    query = make_query(layout)
    for rows in query.layers.values():
        rows[:] = np.clip(np.rint(rows * 2**13), -32766, 32766) / 2**13
        rows[..., 5] = 32767 / 2**13
    blocks, _ = score_blocks(query, summaries)
    wanted = twin(query, summaries, 2).reshape(50, -1).sum(axis=1)
    assert np.allclose(blocks, wanted, rtol=2e-5)


@pytest.mark.parametrize("dim", [1, 2, 63, 256, 516, 576])
@pytest.mark.parametrize("extreme", [False, True])
def test_all_versions_of_the_products_are_exact(dim: int, extreme: bool) -> None:
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((6, dim)).astype(np.float32)
    keys = rng.integers(-127, 128, (32, dim)).astype(np.int8)
    if extreme:  # the largest sums there are: they fit an int32
        rows[:] = np.array([3, -3, 3, -1e-3, 1e30, 7], np.float32)[:, None]
        keys[:] = np.where(np.arange(32) % 2, 127, -127)[:, None]
    sums, scale = dot_products(rows, keys)
    widest = min(32767, (2**31 - 1) // 128 // dim)
    assert np.array_equal(scale, np.abs(rows).max(axis=1) / np.float32(widest))
    steps = np.rint(rows / scale[:, None]).astype(np.int64)
    assert np.abs(steps).max() == widest
    for version in sums:
        assert np.array_equal(version, steps @ keys.T.astype(np.int64))


def test_rows_of_nothing_are_zeros() -> None:
    rows = np.zeros((6, 8), np.float32)
    rows[1] = 1e-40
    sums, _ = dot_products(rows, np.full((32, 8), 127, np.int8))
    assert not sums.any()
    with pytest.raises(ValueError, match="6 rows and 32 keys"):
        dot_products(rows, np.zeros((32, 7), np.int8))


@pytest.mark.parametrize("strength", [0.0, 30.0, 300.0])
def test_flat_and_very_sharp_rows(strength: float) -> None:
    layout = make_layout(ropes=(None,))
    summaries = make_history(layout, 50).fill(KeySummaries(layout, layout.pairs(), 1))
    query = make_query(layout, 4, strength=strength)
    blocks, _ = score_blocks(query, summaries, power=1)
    # All mass is handed out: one for each of 4 rows x 4 heads x 2 layers.
    assert np.isclose(blocks.sum(), 32, rtol=1e-5)
    wanted = twin(query, summaries, 1).reshape(50, -1).sum(axis=1)
    # The error grows with the logits: the largest here are some 300 and 3,000 wide.
    assert np.allclose(blocks, wanted, rtol=TOLERANCE * max(1, strength / 10), atol=1e-6)


def test_threads_do_not_change_a_bit() -> None:
    layout = make_layout(n_layers=3)
    summaries = make_history(layout, 30).fill(KeySummaries(layout, layout.pairs(), 4))
    query = make_query(layout, 40)  # 80 rows of a pair: two parts
    one = score_blocks(query, summaries, threads=1)
    for threads in (2, 5):
        again = score_blocks(query, summaries, threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))


def test_scratch_is_kept_counted_and_given_back() -> None:
    layout = make_layout()
    summaries = make_history(layout, 30).fill(KeySummaries(layout, layout.pairs(), 1))
    query = make_query(layout, 8)
    budget = HostBudget(10**9)
    scratch = ScoreScratch(budget)
    wanted, _ = score_blocks(query, summaries)
    for _ in range(2):
        found, _ = score_blocks(query, summaries, scratch=scratch, threads=1)
        assert np.array_equal(found, wanted)
        held = scratch.n_bytes
        assert 960 * 4 < held == budget.used
    # What was left behind by a larger call does no harm.
    summaries.truncate(3)
    found, _ = score_blocks(make_query(layout, 2), summaries, scratch=scratch, threads=1)
    assert np.array_equal(found, score_blocks(make_query(layout, 2), summaries)[0])
    assert scratch.n_bytes == held
    del scratch
    assert budget.used == 0
    with pytest.raises(CapacityError, match="scoring"):
        score_blocks(query, summaries, scratch=ScoreScratch(HostBudget(100)))


def test_the_models_own_scale_is_used() -> None:
    layout = make_layout(ropes=(None,))
    sharp = replace(layout, layers=tuple(replace(x, attn_scale=1.0) for x in layout.layers))
    query = make_query(layout, strength=0.25)
    history = make_history(layout, 20)
    plain, _ = score_blocks(query, history.fill(KeySummaries(layout, layout.pairs())))
    found, _ = score_blocks(query, history.fill(KeySummaries(sharp, sharp.pairs())))
    wanted, _ = score_blocks(
        make_query(layout, strength=2.0), history.fill(KeySummaries(layout, layout.pairs()))
    )
    assert np.allclose(found, wanted, rtol=1e-4)
    assert not np.allclose(found, plain, rtol=1e-2)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999), name=st.sampled_from(["heads", "mass", "cosine", "lexical", "fused"])
)
def test_permuted_blocks_permute_their_scores(seed: int, name: str) -> None:
    # Un-rotated keys know no position, so where a block stands must not matter.
    layout = make_layout()
    history = make_history(layout, 12, seed)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, (12, 32)).astype(np.int32)
    order = rng.permutation(12)
    query = make_query(layout, seed=seed)
    plain = run_scorer(name, inputs_of(history, query, tokens))
    moved = run_scorer(name, inputs_of(history, query, tokens, order))
    # Sums run in another order; ranks, and with them `fused`, do not change.
    assert np.allclose(moved.blocks, plain.blocks[order], rtol=1e-4, atol=1e-7)
    assert np.allclose(moved.edges, plain.edges[order], rtol=1e-4, atol=1e-7)


def inputs_of(
    history: History,
    query: Query,
    tokens: NDArray[np.int32],
    order: NDArray[np.intp] | None = None,
) -> ScoreInputs:
    n = history.n_blocks
    index = LexicalIndex(history.layout.block_tokens)
    for block, record in enumerate(range(n) if order is None else order):
        index.add(block, tokens[record])
    summaries = KeySummaries(history.layout, history.layout.pairs())
    history.fill(summaries, None if order is None else order.tolist())
    return ScoreInputs(n_blocks=n, query=query, summaries=summaries, lexical=index)


def test_truncation_equals_a_fresh_build() -> None:
    layout = make_layout()
    history = make_history(layout, 40)
    query = make_query(layout)
    summaries = history.fill(KeySummaries(layout, layout.pairs()))
    summaries.truncate(17)
    fresh = KeySummaries(layout, layout.pairs())
    for block in range(17):
        fresh.add(block, history.payloads[block].ctypes.data, history.block_pos(block))
    for found, wanted in zip(
        score_blocks(query, summaries), score_blocks(query, fresh), strict=True
    ):
        assert np.array_equal(found, wanted)


class Needle:
    """Noise with one fact: in two of the pairs, 6 tokens of block 23 answer the query's rows."""

    gold = 23
    knowing = (Pair(0, 1), Pair(1, 0))

    def __init__(self, seed: int, rope: RopeSpec = NEOX) -> None:
        self.layout = make_layout(type_k=F16, block_tokens=32, n_head=4, ropes=(rope,))
        rng = np.random.default_rng(seed)
        n = 48 * 32
        pos = positions(n, 170_000)
        keys = [rng.standard_normal((n, 2, 64)) for _ in self.layout.layers]
        asked = [rng.standard_normal((8, 4, 64)) for _ in self.layout.layers]
        for layer, head in self.knowing:
            signal = 1.2 * rng.standard_normal(64)
            keys[layer][self.gold * 32 + 9 : self.gold * 32 + 15, head] += signal
            asked[layer][:, 2 * head : 2 * head + 2] += signal
        self.history = store(self.layout, keys, pos)
        query_pos = positions(8, 180_000)
        tapped = [
            rotate(rows, query_pos, layer.rope_q).astype(np.float32)
            for rows, layer in zip(asked, self.layout.layers, strict=True)
        ]
        self.query = Query.from_tap(self.layout, self.layout.pairs(), tapped, query_pos)

    def gold_rank(
        self, name: str, pairs: tuple[Pair, ...], order: list[int] | None = None
    ) -> float:
        """Rank of the fact's block, where the records come in the given order."""
        summaries = self.history.fill(KeySummaries(self.layout, pairs, 4), order)
        inputs = ScoreInputs(n_blocks=48, query=self.query, summaries=summaries)
        return float(rank(run_scorer(name, inputs).blocks)[self.gold])


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_fact_is_found_and_shuffled_summaries_lose_it(seed: int) -> None:
    needle = Needle(seed)
    assert needle.gold_rank("heads", needle.knowing) == 1
    assert needle.gold_rank("heads", needle.layout.pairs()) == 1
    shuffled = [(block + 11) % 48 for block in range(48)]
    assert needle.gold_rank("heads", needle.knowing, shuffled) > 3


def test_what_all_rows_like_does_not_hide_what_one_asks_for() -> None:
    layout = make_layout(
        type_k=F16, block_tokens=32, n_layers=1, n_head=1, n_head_kv=1, ropes=(None,)
    )
    rng = np.random.default_rng(0)
    common, asked = 1.2 * rng.standard_normal(64), 1.5 * rng.standard_normal(64)
    keys = 0.5 * rng.standard_normal((40 * 32, 1, 64))
    keys[5 * 32 : 5 * 32 + 4, 0] += common  # every row likes block 5, one of them 23
    keys[23 * 32 + 8 : 23 * 32 + 12, 0] += asked
    rows = 0.1 * rng.standard_normal((8, 1, 64)) + common
    rows[3, 0] += asked
    query = Query(layout=layout, layers={0: rows.astype(np.float32)}, tokens=np.zeros(8, np.int32))
    summaries = store(layout, [keys], positions(40 * 32)).fill(
        KeySummaries(layout, layout.pairs(), 4)
    )
    plain, _ = score_blocks(query, summaries)
    centred, _ = score_blocks(query, summaries, centring=1)
    assert rank(plain)[23] == 2
    assert rank(centred)[23] == 1


def test_without_un_rotation_the_fact_is_lost() -> None:
    # Out there even the slowest of the 32 pairs of dims has turned three times.
    needle = Needle(0, RopeSpec(n_dims=64))
    assert needle.gold_rank("heads", needle.knowing) == 1
    blind = tuple(replace(layer, rope_k=None) for layer in needle.layout.layers)
    needle.layout = replace(needle.layout, layers=blind)
    assert needle.gold_rank("heads", needle.knowing) > 3


def test_cosine_equals_the_twin() -> None:
    layout = make_layout(n_layers=3)
    history = make_history(layout, 10)
    pairs = [Pair(2, 1), Pair(0, 0), Pair(0, 1)]
    summaries = history.fill(KeySummaries(layout, pairs, 8))
    query = make_query(layout)
    wanted = cosine(
        [summaries.keys(i).astype(np.float64) for i in range(3)],
        [query.heads(p).reshape(-1, 64).astype(np.float64) for p in pairs],
        [p.layer for p in pairs],
        summaries.slices_per_block,
    )
    scores = run_scorer("cosine", ScoreInputs(n_blocks=10, query=query, summaries=summaries))
    assert np.allclose(scores.blocks, wanted, atol=1e-6)


def test_each_name_runs_its_own_scorer() -> None:
    layout = make_layout()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (25, 32)).astype(np.int32)
    inputs = inputs_of(make_history(layout, 25), make_query(layout), tokens)
    found = {name: run_scorer(name, inputs) for name in SCORERS}
    assert set(found) == {"fused", "heads", "lexical", "mass", "cosine", "recency"}
    assert all(scores.scorer == name for name, scores in found.items())
    assert all(s.blocks.shape == (25,) and s.edges.shape == (25, 2) for s in found.values())
    orders = {name: tuple(np.argsort(-s.blocks, kind="stable")) for name, s in found.items()}
    assert len(set(orders.values())) == 6
    assert orders["recency"] == tuple(range(24, -1, -1))
    centred, _ = score_blocks(inputs.query, inputs.summaries, centring=HEADS_CENTRING)  # type: ignore[arg-type]
    assert np.allclose(found["heads"].blocks, centred)
    assert np.allclose(found["mass"].blocks.sum(), 5 * 8, rtol=1e-5)
    fused = [
        1 / (10 + a) + 1 / (10 + b)
        for a, b in zip(
            mean_rank(found["heads"].blocks.tolist()),
            mean_rank(found["lexical"].blocks.tolist()),
            strict=True,
        )
    ]
    assert np.allclose(found["fused"].blocks, fused, rtol=1e-6)
    assert np.array_equal(found["fused"].edges, found["heads"].edges)


def test_unknown_or_unfed_scorers_are_errors_and_never_another_scorer() -> None:
    layout = make_layout()
    query = make_query(layout)
    summaries = make_history(layout, 3).fill(KeySummaries(layout, layout.pairs()))
    with pytest.raises(ConfigError, match="fused, heads, lexical, mass, cosine, recency"):
        run_scorer("best", ScoreInputs(n_blocks=3))
    for name in ("heads", "mass", "cosine", "fused", "lexical"):
        with pytest.raises(ConfigError, match=f"scorer is {name}"):
            run_scorer(name, ScoreInputs(n_blocks=3, query=query))
    with pytest.raises(ConfigError, match="token index"):
        run_scorer("fused", ScoreInputs(n_blocks=3, query=query, summaries=summaries))
    with pytest.raises(StateError, match="3 blocks are summarised, not 4"):
        run_scorer("heads", ScoreInputs(n_blocks=4, query=query, summaries=summaries))
    with pytest.raises(StateError, match="0 blocks are indexed, not 4"):
        run_scorer("lexical", ScoreInputs(n_blocks=4, query=query, lexical=LexicalIndex(32)))


def test_an_empty_history_and_an_empty_query_score_nothing() -> None:
    layout = make_layout()
    empty = KeySummaries(layout, layout.pairs())
    inputs = ScoreInputs(
        n_blocks=0, query=make_query(layout), summaries=empty, lexical=LexicalIndex(32)
    )
    for name in SCORERS:
        scores = run_scorer(name, inputs)
        assert (scores.blocks.shape, scores.edges.shape) == ((0,), (0, 2))
    filled = make_history(layout, 4).fill(KeySummaries(layout, layout.pairs()))
    silent = ScoreInputs(n_blocks=4, query=make_query(layout, n_rows=0), summaries=filled)
    for name in ("heads", "mass", "cosine"):
        scores = run_scorer(name, silent)
        assert (scores.blocks == 0).all() and scores.blocks.shape == (4,)
        assert (scores.edges == 0).all() and scores.edges.shape == (4, 2)


def test_ranks_share_places() -> None:
    scores = np.array([3, 1, 3, 0, 0, 0, 9], np.float32)
    assert rank(scores).tolist() == mean_rank(scores.tolist()) == [2.5, 4, 2.5, 6, 6, 6, 1]
    # A lexical rank that knows nothing leaves the other order alone.
    other = np.array([1, 5, 2, 4], np.float32)
    assert np.argsort(-fuse(other, np.zeros(4, np.float32))).tolist() == [1, 3, 2, 0]


def test_doors_refuse_what_cannot_be() -> None:
    layout = make_layout()
    summaries = make_history(layout, 2).fill(KeySummaries(layout, [(0, 0), (1, 0)]))
    query = make_query(layout)
    with pytest.raises(ValueError, match="layer index 1"):
        only = Query(layout=layout, layers={0: query.layers[0]}, tokens=query.tokens)
        score_blocks(only, summaries)
    with pytest.raises(ValueError, match="power 0"):
        score_blocks(query, summaries, power=0)
    with pytest.raises(ValueError, match="centring 2"):
        score_blocks(query, summaries, centring=2)
    with pytest.raises(ValueError, match="keys have 64"):
        score_slices(summaries, [np.ones((1, 32), np.float32)] * 2)
    with pytest.raises(ValueError, match="1 row sets for 2 pairs"):
        score_slices(summaries, [np.ones((2, 64), np.float32)])
    broken = {k: np.where(v > 2, np.nan, v).astype(np.float32) for k, v in query.layers.items()}
    with pytest.raises(ValueError, match="not all finite"):
        score_blocks(Query(layout=layout, layers=broken, tokens=query.tokens), summaries)
