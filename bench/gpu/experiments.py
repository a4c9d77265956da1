"""Experiments on a GPU that the design stands on: transfers, CUDA graphs, the query tap, snapshots,
verify steps, depth.

    python bench/gpu/experiments.py model.gguf [names...] [--out results.jsonl]

The far history is synthetic: cells and records of the right sizes that were never computed; what a
step costs does not depend on their values. Every row is a median with its n; both sides of a ratio
are measured in the same process.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from synthetic_pool import (
    BLOCK,
    BUDGET_BLOCKS,
    RESERVE_BLOCKS,
    REST_TOKENS,
    Pool,
    Settings,
    free_bytes,
    pool,
    steps_per_s,
)
from transfers import Row, transfers

from kvmem.bench.record import environment, json_line
from kvmem.llama.context import Context
from kvmem.llama.model import Model


def graphs(model: Model, settings: Settings) -> Iterator[Row]:
    """Block swaps between decode steps.

    What they do to the steps around them, and to the logits.
    """
    logits = {}
    for way in ("cuda", "generic"):
        with pool(model, settings, transfer=way) as p:
            p.far(80_000)
            plain = steps_per_s(p, n_steps=64, repeats=5)
            spans, swaps = [], []
            resident = p.ws.resident()
            for _ in range(5):
                tail = p.ws.resident()[p.ws.resident() > resident[-1]]
                keep = p.rng.choice(resident[:-1], len(resident) - 17, replace=False)
                rest = np.setdiff1d(np.arange(resident[-1]), p.ws.resident())
                new = p.rng.choice(rest, 16, replace=False)
                chosen = np.unique(np.concatenate([keep, new, resident[-1:], tail])).astype(
                    np.int32
                )
                p.ws.seal()
                started = time.perf_counter()
                p.ws.apply(chosen)
                swaps.append(time.perf_counter() - started)
                resident = chosen[chosen <= resident[-1]]
                started = time.perf_counter()
                for _ in range(64):
                    p.decode(1)
                spans.append(64 / (time.perf_counter() - started))
            logits[way] = p.context.logits()
            yield {
                "what": f"decode, no swaps, {way}",
                "t/s": statistics.median(plain),
                "n": len(plain),
            }
            yield {
                "what": f"decode after a swap of 16 blocks every 64 steps, {way}",
                "t/s": statistics.median(spans),
                "swap ms": 1e3 * statistics.median(swaps),
                "n": len(spans),
            }
    yield {
        "what": "logits after five swaps, cuda against generic, largest difference",
        "value": float(np.abs(logits["cuda"] - logits["generic"]).max()),
        "n": 1,
    }


def tap(model: Model, settings: Settings) -> Iterator[Row]:
    """What reading Q costs a query pass: 16 rows of 16 layers."""
    with pool(model, settings) as p:
        p.far(60_000, window=256)
        layers = np.arange(len(p.port.layout.layers), dtype=np.int32)
        for n in (64, 512):
            times: dict[bool, list[float]] = {False: [], True: []}
            for i in range(14):
                tapped = bool(i % 2)
                if p.ws.room() < n:
                    p.ws.apply(p.ws.resident()[-200:])
                rows = np.linspace(0, n - 1, 16).astype(np.int32)
                started = time.perf_counter()
                if tapped:
                    p.port.begin_tap(layers, rows)
                p.decode(n, reply=False)
                if tapped:
                    p.port.end_tap()
                times[tapped].append(time.perf_counter() - started)
            plain, with_tap = (statistics.median(times[key][2:]) for key in (False, True))
            yield {
                "what": f"query pass of {n} tokens",
                "ms": 1e3 * plain,
                "ms with tap": 1e3 * with_tap,
                "extra ms": 1e3 * (with_tap - plain),
                "n": 5,
            }


def snapshots(model: Model, settings: Settings) -> Iterator[Row]:
    """Recurrent snapshots: their memory, and the step time of a verify batch of four rows."""
    for n_rs_seq in (0, 3):
        before = free_bytes()
        with pool(model, settings, n_rs_seq=n_rs_seq) as p:
            p.far(60_000)
            rates = steps_per_s(p, n_rows=4)
            yield {
                "what": f"n_rs_seq={n_rs_seq}, 4 rows a step",
                "rows/s": statistics.median(rates),
                "ms/step": 4e3 / statistics.median(rates),
                "recurrent MiB": p.port.device_bytes()[1] / 2**20,
                "VRAM MiB": (before - free_bytes()) / 2**20,
                "n": len(rates),
            }


def verify(model: Model, settings: Settings) -> Iterator[Row]:
    """Verify steps of 1 to 4 rows: KV type, and slots compact or spread over the whole pool."""
    for kv in ("q8_0", "f16"):
        for spread in (False, True):
            with pool(model, settings, kv=kv) as p:
                p.far(90_000, window=RESERVE_BLOCKS if spread else BUDGET_BLOCKS)
                if (
                    spread
                ):  # others hold the lowest slots while the window comes in above, then leave
                    low = p.ws.resident()[:-1]
                    rest = np.setdiff1d(np.arange(p.ws.n_blocks), low)[: BUDGET_BLOCKS - 8]
                    p.ws.apply(
                        np.unique(np.concatenate([low, rest, p.ws.resident()[-1:]])).astype(
                            np.int32
                        )
                    )
                    p.ws.evict(low.tolist())
                for rows in (1, 2, 4):
                    rates = steps_per_s(p, n_rows=rows, n_steps=16)
                    yield {
                        "what": f"{kv}, {'spread' if spread else 'compact'}, {rows} rows a step",
                        "rows/s": statistics.median(rates),
                        "highest cell": p.ws.highest_used_cell,
                        "n": len(rates),
                    }


def depth(model: Model, settings: Settings) -> Iterator[Row]:
    """Decode and prefill behind a far history.

    The pool, a cache that holds everything, and stock with the pool's cells.
    """
    far = f"{settings.far_tokens // 1024}K"

    def prefill(p: Pool, seal: bool) -> list[float]:
        rates = []
        for _ in range(6):
            if p.ws.room(reply=True) < 2048:
                p.ws.seal()
                p.ws.apply(p.ws.resident()[-(BUDGET_BLOCKS - 64) :])
            started = time.perf_counter()
            p.decode(2048)
            if seal:
                p.ws.seal()
            rates.append(2048 / (time.perf_counter() - started))
        return rates[1:]

    before = free_bytes()
    with pool(model, settings) as p:
        p.far()
        rates = steps_per_s(p)
        yield {
            "what": f"kvmem: decode at {far}, budget 36,864",
            "t/s": statistics.median(rates),
            "n": len(rates),
            "highest cell": p.ws.highest_used_cell,
            "VRAM MiB": (before - free_bytes()) / 2**20,
            "KV MiB": p.port.device_bytes()[0] / 2**20,
            "host MiB": p.budget.used / 2**20,
        }
        for seal in (False, True):
            rates = prefill(p, seal)
            yield {
                "what": f"kvmem: prefill at {far}, {'stored' if seal else 'not stored'}",
                "t/s": statistics.median(rates),
                "n": len(rates),
                "highest cell": p.ws.highest_used_cell,
            }
        p.ws.seal()
        p.ws.apply(p.random_selection(BUDGET_BLOCKS + RESERVE_BLOCKS - 2))
        rates = steps_per_s(p, n_steps=8, repeats=5)
        yield {
            "what": f"kvmem: decode at {far}, reserve full too",
            "t/s": statistics.median(rates),
            "n": len(rates),
            "highest cell": p.ws.highest_used_cell,
        }
    for name, tokens in (("32K", 32_768), (far, settings.far_tokens)):
        blocks = tokens // BLOCK
        with pool(model, settings, budget=blocks + 1, reserve=REST_TOKENS // BLOCK) as p:
            p.far(tokens, window=blocks)
            rates = steps_per_s(p)
            yield {
                "what": f"everything resident: decode at {name}",
                "t/s": statistics.median(rates),
                "n": len(rates),
                "highest cell": p.ws.highest_used_cell,
            }
            rates = []
            for _ in range(5):
                if p.ws.room(reply=True) < 2048:
                    break
                started = time.perf_counter()
                p.decode(2048)
                rates.append(2048 / (time.perf_counter() - started))
            if rates:
                yield {
                    "what": f"everything resident: prefill at {name}",
                    "t/s": statistics.median(rates),
                    "n": len(rates),
                }
    yield from stock(model, settings, 32_768)
    yield from stock(model, settings, BUDGET_BLOCKS * BLOCK)


def stock(model: Model, settings: Settings, n_tokens: int) -> Iterator[Row]:
    """Plain llama.cpp with a real history of n_tokens."""
    rng = np.random.default_rng(5)
    with Context(
        model,
        n_ctx=n_tokens + 4096,
        n_batch=2048,
        n_ubatch=512,
        type_k="q8_0",
        type_v="q8_0",
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
    ) as context:
        at = 0

        def decode(n: int) -> float:
            nonlocal at
            started = time.perf_counter()
            context.decode(
                rng.integers(0, min(1000, context.n_vocab), n).astype(np.int32),
                np.arange(at, at + n, dtype=np.int32),
            )
            at += n
            return n / (time.perf_counter() - started)

        reads = [decode(2048) for _ in range(n_tokens // 2048)]
        rates = []
        for i in range(6):
            started = time.perf_counter()
            for _ in range(24):
                decode(1)
            if i:
                rates.append(24 / (time.perf_counter() - started))
        yield {
            "what": f"stock: decode at {n_tokens} tokens (real)",
            "t/s": statistics.median(rates),
            "n": len(rates),
        }
        yield {
            "what": f"stock: prefill at {n_tokens} tokens (real)",
            "t/s": statistics.median(reads[-5:]),
            "n": 5,
        }


EXPERIMENTS: dict[str, Callable[[Model, Settings], Iterator[Row]]] = {
    "transfers": transfers,
    "graphs": graphs,
    "tap": tap,
    "snapshots": snapshots,
    "verify": verify,
    "depth": depth,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"of {', '.join(EXPERIMENTS)}; all if none is given",
    )
    parser.add_argument(
        "--far", type=int, default=Settings().far_tokens, help="tokens of the far history"
    )
    parser.add_argument("-t", "--threads", type=int, default=Settings().threads)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    settings = Settings(far_tokens=arguments.far // BLOCK * BLOCK, threads=arguments.threads)
    if arguments.out:
        where = environment(arguments.model, vars(arguments), "experiments")
        with arguments.out.open("a") as file:
            file.write(json_line(where) + "\n")
    with Model(arguments.model) as model:
        for name in arguments.names or EXPERIMENTS:
            started = time.perf_counter()
            try:
                for row in EXPERIMENTS[name](model, settings):
                    text = {
                        key: round(value, 2) if isinstance(value, float) else value
                        for key, value in row.items()
                    }
                    print(f"{name:10} {json.dumps(text)}", flush=True)
                    if arguments.out:
                        with arguments.out.open("a") as file:
                            file.write(json.dumps({"experiment": name, **row}) + "\n")
            except Exception:  # one experiment must not cost the others
                print(f"{name:10} FAILED", file=sys.stderr, flush=True)
                traceback.print_exc()
            print(f"{name:10} took {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
