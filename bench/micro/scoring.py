"""Times the retrieval maths on a synthetic history: scoring, summaries of a block, lexical ranks.

    python bench/micro/scoring.py [--tokens 262144] [--rows 8 16] [--threads 1 2 16] [--out FILE]

The layout is a 27B hybrid's with q8_0 K, which llama.cpp rotates by a Hadamard matrix. Keys and
queries are random; the time does not depend on their values.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.record import environment, json_line
from kvmem.engine.calibration import SLICE_TOKENS, scoring
from kvmem.kv.layout import KV_TYPES, KvLayout, LayerLayout, Pair, RopeSpec
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
TYPES = {kind.name: number for number, kind in KV_TYPES.items()}

Row = dict[str, Any]


def make_layout(kind: str) -> KvLayout:
    """16 layers of 4 KV heads x 256, NeoX rotation of 64 dims."""
    number = TYPES[kind]
    group, n_bytes = KV_TYPES[number].block, KV_TYPES[number].n_bytes
    rope = RopeSpec(n_dims=64, mode=2, freq_base=1e7)
    row = KV_HEADS * HEAD_DIM // group * n_bytes
    layers = tuple(
        LayerLayout(
            il=index,
            n_head=KV_HEADS * GROUP,
            n_head_kv=KV_HEADS,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            type_k=number,
            type_v=number,
            k_offset=2 * index * BLOCK_TOKENS * row,
            v_offset=(2 * index + 1) * BLOCK_TOKENS * row,
            k_row_bytes=row,
            v_row_bytes=row,
            dequantize=DEQUANTIZE_F16 if kind == "f16" else ggml_function(f"dequantize_row_{kind}"),
            hadamard=0 if kind == "f16" else HEAD_DIM,
            rope_k=rope,
            rope_q=rope,
        )
        for index in range(LAYERS)
    )
    return KvLayout(
        layers=layers, block_tokens=BLOCK_TOKENS, payload_bytes=2 * LAYERS * BLOCK_TOKENS * row
    )


def ggml_function(name: str) -> int:
    """Its address, in the library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next(line.split()[-1] for line in maps if "libkvmem-ggml-base" in line)
    address = ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p).value
    assert address
    return address


def random_payload(layout: KvLayout, kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    if kind == "f16":
        values = rng.standard_normal(layout.payload_bytes // 2, np.float32)
        return values.astype(np.float16).view(np.uint8)
    payload = rng.integers(0, 256, layout.payload_bytes, np.uint8)
    groups = payload.reshape(-1, KV_TYPES[TYPES[kind]].n_bytes)
    groups[:, :2] = np.full(len(groups), 0.01, np.float16).view(np.uint8).reshape(-1, 2)  # scales
    return payload


def measure(call: Callable[[], object], runs: int) -> Row:
    """Median milliseconds of `runs` calls after one warm-up.

    The CPU time is that of all threads; on a busy machine it is the figure to compare.
    """
    call()
    walls, cpus = [], []
    for _ in range(runs):
        start, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(1e3 * (time.perf_counter() - start))
        cpus.append(1e3 * (time.process_time() - cpu))
    return {
        "ms": statistics.median(walls),
        "fastest ms": min(walls),
        "slowest ms": max(walls),
        "CPU ms": statistics.median(cpus),
        "n": runs,
    }


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    layout = make_layout(arguments.kv)
    n_blocks = arguments.tokens // BLOCK_TOKENS
    rng = np.random.default_rng(1)
    payload = random_payload(layout, arguments.kv, rng)
    pos = np.zeros((BLOCK_TOKENS, 4), np.int32)
    pos[:, :3] = np.arange(BLOCK_TOKENS)[:, None]
    few = tuple(Pair(2 * index + 1, index % KV_HEADS) for index in range(8))
    for name, chosen, slice_tokens in (
        ("calibrated", few, SLICE_TOKENS),
        ("uncalibrated", *scoring(layout, None)[:2]),
        ("all pairs", *scoring(layout, None, "mass")[:2]),
    ):
        what = f"{name}, {len(chosen)} pairs, slices of {slice_tokens}"
        summaries = KeySummaries(layout, chosen, slice_tokens)
        start = time.perf_counter()
        for block in range(n_blocks):
            summaries.add(block, payload.ctypes.data, pos)
        seconds = time.perf_counter() - start
        yield {
            "what": f"summaries of {arguments.kv} keys, {what}",
            "ms a block": 1e3 * seconds / n_blocks,
            "tokens/s": arguments.tokens / seconds,
            "bytes a token": summaries.bytes_per_token,
            "threads": 1,
            "n": n_blocks,
        }
        for n_rows in arguments.rows:
            yield from score(layout, summaries, what, n_rows, rng, arguments)
    yield from lexical(rng, arguments)


def score(
    layout: KvLayout,
    summaries: KeySummaries,
    what: str,
    n_rows: int,
    rng: np.random.Generator,
    arguments: argparse.Namespace,
) -> Iterator[Row]:
    chosen = summaries.pairs
    tapped = rng.standard_normal((LAYERS, n_rows, KV_HEADS * GROUP, HEAD_DIM), np.float32)
    pos = np.zeros((n_rows, 4), np.int32)
    pos[:, :3] = np.arange(n_rows)[:, None]
    query = Query.from_tap(layout, chosen, tapped, pos, max_rows=n_rows)
    scratch = ScoreScratch()
    n_bytes = summaries.n_slices * len(chosen) * (HEAD_DIM + 2)
    for threads in arguments.threads:
        measured = measure(
            lambda threads=threads: score_blocks(  # type: ignore[misc]
                query, summaries, threads=threads, scratch=scratch, centring=HEADS_CENTRING
            ),
            arguments.runs,
        )
        yield {
            "what": f"score {arguments.tokens} tokens, {what}",
            "rows": n_rows,
            "threads": threads,
            **measured,
            "GB/s": n_bytes / measured["ms"] / 1e6,
        }


def lexical(rng: np.random.Generator, arguments: argparse.Namespace) -> Iterator[Row]:
    index = LexicalIndex(BLOCK_TOKENS)
    ids = (rng.zipf(1.2, arguments.tokens) % 50000).astype(np.int32)
    n_blocks = arguments.tokens // BLOCK_TOKENS
    start = time.perf_counter()
    for block in range(n_blocks):
        index.add(block, ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
    per_block = 1e3 * (time.perf_counter() - start) / n_blocks
    for n in (16, 256):
        asked = ids[rng.integers(0, len(ids), n)]
        yield {
            "what": f"lexical ranks of {arguments.tokens} tokens, {n} query tokens",
            **measure(lambda asked=asked: index.score(asked), arguments.runs),  # type: ignore[misc]
            "ms to add a block": per_block,
        }


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--kv", choices=("q8_0", "q5_0", "q4_0", "f16"), default="q8_0")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, os.cpu_count() or 1])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    lines: list[Row] = [environment(None, vars(arguments), "scoring")]
    for row in run(arguments):
        lines.append({"experiment": "scoring", **row})
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(shown, flush=True)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.writelines(json_line(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
