"""Times the retrieval maths on a synthetic history: scoring, summaries of a block, lexical ranks.

    python bench/micro/scoring.py [--tokens 262144] [--rows 8] [--runs 5] [--threads 2]

Keys and queries are random; the time does not depend on their values.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvmem.engine.calibration import SLICE_TOKENS, scoring
from kvmem.kv.layout import KvLayout, LayerLayout, Pair, RopeSpec
from kvmem.kv.lexical import LexicalIndex
from kvmem.kv.query import Query
from kvmem.kv.score import ScoreScratch, score_blocks
from kvmem.kv.scorers import HEADS_CENTRING
from kvmem.kv.summary import DEQUANTIZE_F16, KeySummaries

BLOCK_TOKENS = 128
HEAD_DIM = 256
KV_HEADS = 4
GROUP = 6
LAYERS = 16  # the attention layers of a 27B hybrid


def make_layout() -> KvLayout:
    """16 layers of 4 KV heads x 256 in f16, NeoX rotation of 64 dims."""
    rope = RopeSpec(n_dims=64, mode=2, freq_base=1e7)
    row = KV_HEADS * HEAD_DIM * 2
    layers = tuple(
        LayerLayout(
            il=index,
            n_head=KV_HEADS * GROUP,
            n_head_kv=KV_HEADS,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            type_k=1,
            type_v=1,
            k_offset=2 * index * BLOCK_TOKENS * row,
            v_offset=(2 * index + 1) * BLOCK_TOKENS * row,
            k_row_bytes=row,
            v_row_bytes=row,
            dequantize=DEQUANTIZE_F16,
            rope_k=rope,
            rope_q=rope,
        )
        for index in range(LAYERS)
    )
    return KvLayout(
        layers=layers, block_tokens=BLOCK_TOKENS, payload_bytes=2 * LAYERS * BLOCK_TOKENS * row
    )


def measure(call: Callable[[], object], runs: int) -> tuple[float, str]:
    """Median milliseconds of `runs` calls after one warm-up, and a line that says more.

    The CPU time is that of all threads; on a busy machine it is the figure to compare.
    """
    call()
    walls, cpus = [], []
    for _ in range(runs):
        start, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(1e3 * (time.perf_counter() - start))
        cpus.append(1e3 * (time.process_time() - cpu))
    median = statistics.median(walls)
    return median, (
        f"{median:.2f} ms ({min(walls):.2f}-{max(walls):.2f}, n={runs}; "
        f"CPU {statistics.median(cpus):.2f} ms)"
    )


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    layout = make_layout()
    n_blocks = args.tokens // BLOCK_TOKENS
    rng = np.random.default_rng(1)
    scratch = ScoreScratch()
    payload = rng.standard_normal(layout.payload_bytes // 2, np.float32).astype(np.float16)
    pos = np.zeros((BLOCK_TOKENS, 4), np.int32)
    pos[:, :3] = np.arange(BLOCK_TOKENS)[:, None]

    few = tuple(Pair(2 * index + 1, index % KV_HEADS) for index in range(8))
    for chosen, slice_tokens in (
        (few, SLICE_TOKENS),
        scoring(layout, None)[:2],
        scoring(layout, None, "mass")[:2],
    ):
        summaries = KeySummaries(layout, chosen, slice_tokens)
        start = time.perf_counter()
        for block in range(n_blocks):
            summaries.add(block, payload.ctypes.data, pos)
        per_block = 1e3 * (time.perf_counter() - start) / n_blocks
        rows = rng.standard_normal((LAYERS, args.rows, KV_HEADS * GROUP, HEAD_DIM), np.float32)
        query = Query.from_tap(layout, chosen, rows, pos[: args.rows], max_rows=args.rows)
        median, said = measure(
            lambda query=query, summaries=summaries: score_blocks(  # type: ignore[misc]
                query,
                summaries,
                threads=args.threads,
                scratch=scratch,
                centring=HEADS_CENTRING,
            ),
            args.runs,
        )
        n_bytes = summaries.n_slices * len(chosen) * (HEAD_DIM + 2)
        flop = 2 * summaries.n_slices * len(chosen) * HEAD_DIM * GROUP * args.rows
        print(
            f"score: {len(chosen)} pairs, slices of {slice_tokens}, {args.rows} rows, "
            f"{args.tokens} tokens: {said}, "
            f"{n_bytes / median / 1e6:.2f} GB/s, "
            f"{flop / median / 1e6:.0f} GFLOP/s; {summaries.bytes_per_token:.0f} B/token; "
            f"summary of a block {per_block:.2f} ms"
        )

    index = LexicalIndex(BLOCK_TOKENS)
    ids = (rng.zipf(1.2, args.tokens) % 50000).astype(np.int32)
    start = time.perf_counter()
    for block in range(n_blocks):
        index.add(block, ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
    per_block = 1e3 * (time.perf_counter() - start) / n_blocks
    for n in (16, 256):
        asked = ids[rng.integers(0, len(ids), n)]
        _, said = measure(lambda asked=asked: index.score(asked), args.runs)  # type: ignore[misc]
        print(
            f"lexical: {n} query tokens, {args.tokens} tokens: {said}; "
            f"append {per_block:.4f} ms a block"
        )


if __name__ == "__main__":
    main()
