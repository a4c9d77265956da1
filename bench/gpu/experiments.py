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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.bench.record import environment, json_line
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama import runtime
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

BLOCK = 128
BUDGET_BLOCKS, RESERVE_BLOCKS = 288, 128  # 36,864 and 16,384 tokens
REST_TOKENS = 4096  # of the workspace, behind the far history
HOST_LIMIT = 64 << 30

Row = dict[str, Any]


class Settings:
    """far_tokens: of the history in `depth`, and at most in the others."""

    far_tokens = 258_048
    threads = 4


class Pool:
    """A context with a working set over it, and helpers to fill it without computing."""

    def __init__(
        self,
        model: Model,
        *,
        budget: int | None = None,
        reserve: int | None = None,
        kv: str = "q8_0",
        n_rs_seq: int = 0,
        transfer: str | None = None,
        ubatch: int = 512,
    ) -> None:
        budget, reserve = budget or BUDGET_BLOCKS, reserve or RESERVE_BLOCKS
        self.context = Context(
            model,
            n_ctx=Settings.far_tokens + 2 * REST_TOKENS,
            n_cells=(budget + reserve) * BLOCK,
            block_tokens=BLOCK,
            n_batch=2048,
            n_ubatch=ubatch,
            type_k=kv,
            type_v=kv,
            n_threads=Settings.threads,
            n_threads_batch=Settings.threads,
            n_rs_seq=n_rs_seq,
        )
        self.port = LlamaPort(self.context)
        if transfer:
            self.port.use_transfer(transfer)
        self.budget = HostBudget(HOST_LIMIT)
        self.ws = WorkingSet(
            self.port,
            block_tokens=BLOCK,
            budget_blocks=budget,
            reserve_blocks=reserve,
            slack_blocks=0,
            budget=self.budget,
        )
        self.rng = np.random.default_rng(3)

    def fake(self, n_tokens: int) -> None:
        """Append tokens that were never computed; blocks that fill are stored, old ones leave."""
        while n_tokens > 0:
            n = min(n_tokens, 64 * BLOCK)
            if self.ws.room() < n:
                self.ws.seal()
                self.ws.apply(self.ws.resident()[-1:])
            self.ws.prepare(n)
            start = self.ws.n_tokens
            self.ws.commit(np.ones(n, np.int32), positions(start, n))
            n_tokens -= n
        self.ws.seal()

    def decode(self, n: int, *, reply: bool = True, outputs: Any = "last") -> None:
        self.ws.prepare(n, reply=reply)
        start = self.ws.n_tokens
        tokens = self.rng.integers(0, min(1000, self.context.n_vocab), n).astype(np.int32)
        pos = positions(start, n)
        self.context.decode(tokens, np.ascontiguousarray(pos[:, 0]), outputs=outputs)
        self.ws.commit(tokens, pos)

    def random_selection(self, n_blocks: int) -> NDArray[np.int32]:
        """n_blocks of the history with the newest among them, ascending."""
        newest = self.ws.n_blocks - 1
        chosen = self.rng.choice(newest, n_blocks - 1, replace=False)
        return np.sort(np.append(chosen, newest)).astype(np.int32)

    def far(self, n_tokens: int | None = None, *, window: int | None = None) -> None:
        """A history of n_tokens; the budget (or `window` blocks) of it is visible."""
        n_tokens = n_tokens or Settings.far_tokens
        self.fake(n_tokens - BLOCK)
        self.ws.apply(self.ws.resident()[-1:])
        self.decode(BLOCK, reply=False)
        self.ws.seal()
        self.ws.apply(
            self.ws.resident()[-1:]
        )  # what was faked is not visible until it comes back from the host
        self.ws.apply(self.random_selection(window or BUDGET_BLOCKS))

    def close(self) -> None:
        del self.ws
        self.context.close()


def positions(start: int, n: int) -> NDArray[np.int32]:
    pos = np.zeros((n, 4), np.int32)
    pos[:, :3] = np.arange(start, start + n, dtype=np.int32)[:, None]
    return pos


@contextmanager
def pool(model: Model, **kwargs: Any) -> Iterator[Pool]:
    made = Pool(model, **kwargs)
    try:
        yield made
    finally:
        made.close()


def steps_per_s(p: Pool, n_rows: int = 1, n_steps: int = 24, repeats: int = 5) -> list[float]:
    """Rows per second of decode steps of n_rows tokens, one value a repeat, after a warm-up."""
    for _ in range(6):
        p.decode(n_rows, outputs="all")
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(n_steps):
            p.decode(n_rows, outputs="all")
        rates.append(n_rows * n_steps / (time.perf_counter() - started))
    return rates


def free_bytes() -> int:
    return sum(gpu.free_bytes for gpu in runtime.gpus())


def transfers(model: Model) -> Iterator[Row]:
    """Whole windows out and in, by each way, beside the machine's own pinned copy."""
    with pool(model, reserve=1) as p:
        fastest = p.port.transfer
        both = [p.port.copy_ceiling() for _ in range(7)]
    ceilings = {}
    for i, name in enumerate(("to device", "to host")):
        ceilings[name] = statistics.median(pair[i] for pair in both) / 1e9
        yield {"what": f"plain copy {name}", "GB/s": ceilings[name], "n": len(both)}

    ways = [("generic", "plain")]
    if fastest != "generic":
        ways = [(fastest, "pinned"), (fastest, "plain"), ("generic", "pinned")]
    for way, memory in ways:
        with pool(model, transfer=way, reserve=1) as p:
            if memory == "plain":
                p.port.limit_pinned(0)
            name = f"{way}, {memory} memory"
            n = 288
            rates = []
            p.fake(BLOCK)
            for _ in range(6):
                if p.ws.room() < (n - 1) * BLOCK:
                    p.ws.apply(p.ws.resident()[-1:])
                p.ws.prepare((n - 1) * BLOCK)
                p.ws.commit(
                    np.ones((n - 1) * BLOCK, np.int32), positions(p.ws.n_tokens, (n - 1) * BLOCK)
                )
                started = time.perf_counter()
                p.ws.seal()
                rates.append((n - 1) * p.port.payload_bytes / (time.perf_counter() - started) / 1e9)
            yield {
                "what": f"seal {n - 1} blocks into new slabs, {name}",
                "GB/s": statistics.median(rates[1:]),
                "n": len(rates) - 1,
            }
            yield from outward(p, name, ceilings["to host"])
            rates, seconds = [], []
            newest = p.ws.n_blocks - 1
            halves = [np.append(np.arange(a, a + n - 1), newest).astype(np.int32) for a in (0, n)]
            p.ws.apply(halves[1])
            for i in range(14):
                started = time.perf_counter()
                moved = p.ws.apply(halves[i % 2])
                seconds.append(time.perf_counter() - started)
                rates.append(moved.bytes_in / seconds[-1] / 1e9)
            yield {
                "what": f"apply a whole new window of {n - 1} blocks, {name}",
                "GB/s": statistics.median(rates[2:]),
                "of the plain copy": statistics.median(rates[2:]) / ceilings["to device"],
                "ms": 1e3 * statistics.median(seconds[2:]),
                "slowest ms": 1e3 * max(seconds[2:]),
                "n": len(rates) - 2,
            }


def outward(p: Pool, name: str, ceiling: float) -> Iterator[Row]:
    """The newest blocks, dropped from the host and stored again in the same slab: what a seal costs
    when it allocates nothing. Eight blocks fill while 1,024 tokens are read.
    """

    def append(n_blocks: int) -> float:
        if p.ws.room() < n_blocks * BLOCK:
            p.ws.apply(p.ws.resident()[-1:])
        p.ws.prepare(n_blocks * BLOCK)
        p.ws.commit(np.ones(n_blocks * BLOCK, np.int32), positions(p.ws.n_tokens, n_blocks * BLOCK))
        started = time.perf_counter()
        p.ws.seal()
        return time.perf_counter() - started

    p.ws.apply(p.ws.resident()[-1:])
    per_slab = (64 << 20) // (p.port.payload_bytes + 4096)
    while p.ws.n_sealed % per_slab != per_slab - 1:
        append(1)
    for n_blocks in (1, 8):
        seconds = []
        for _ in range(9):
            p.ws.truncate(p.ws.n_tokens - n_blocks * BLOCK)
            seconds.append(append(n_blocks))
        rate = n_blocks * p.port.payload_bytes / statistics.median(seconds) / 1e9
        yield {
            "what": f"seal {n_blocks} blocks into a slab that is there, {name}",
            "GB/s": rate,
            "of the plain copy": rate / ceiling,
            "ms": 1e3 * statistics.median(seconds),
            "n": len(seconds),
        }


def graphs(model: Model) -> Iterator[Row]:
    """Block swaps between decode steps.

    What they do to the steps around them, and to the logits.
    """
    logits = {}
    for way in ("cuda", "generic"):
        with pool(model, transfer=way) as p:
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


def tap(model: Model) -> Iterator[Row]:
    """What reading Q costs a query pass: 16 rows of 16 layers."""
    with pool(model) as p:
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


def snapshots(model: Model) -> Iterator[Row]:
    """Recurrent snapshots: their memory, and the step time of a verify batch of four rows."""
    for n_rs_seq in (0, 3):
        before = free_bytes()
        with pool(model, n_rs_seq=n_rs_seq) as p:
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


def verify(model: Model) -> Iterator[Row]:
    """Verify steps of 1 to 4 rows: KV type, and slots compact or spread over the whole pool."""
    for kv in ("q8_0", "f16"):
        for spread in (False, True):
            with pool(model, kv=kv) as p:
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


def depth(model: Model) -> Iterator[Row]:
    """Decode and prefill behind a far history.

    The pool, a cache that holds everything, and stock with the pool's cells.
    """
    far = f"{Settings.far_tokens // 1024}K"

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
    with pool(model) as p:
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
    for name, tokens in (("32K", 32_768), (far, Settings.far_tokens)):
        blocks = tokens // BLOCK
        with pool(model, budget=blocks + 1, reserve=REST_TOKENS // BLOCK) as p:
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
    yield from stock(model, 32_768)
    yield from stock(model, BUDGET_BLOCKS * BLOCK)


def stock(model: Model, n_tokens: int) -> Iterator[Row]:
    """Plain llama.cpp with a real history of n_tokens."""
    rng = np.random.default_rng(5)
    with Context(
        model,
        n_ctx=n_tokens + 4096,
        n_batch=2048,
        n_ubatch=512,
        type_k="q8_0",
        type_v="q8_0",
        n_threads=Settings.threads,
        n_threads_batch=Settings.threads,
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


EXPERIMENTS: dict[str, Callable[[Model], Iterator[Row]]] = {
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
        "--far", type=int, default=Settings.far_tokens, help="tokens of the far history"
    )
    parser.add_argument("-t", "--threads", type=int, default=Settings.threads)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    Settings.threads = arguments.threads
    Settings.far_tokens = arguments.far // BLOCK * BLOCK
    if arguments.out:
        where = environment(arguments.model, vars(arguments), "experiments")
        with arguments.out.open("a") as file:
            file.write(json_line(where) + "\n")
    with Model(arguments.model) as model:
        for name in arguments.names or EXPERIMENTS:
            started = time.perf_counter()
            try:
                for row in EXPERIMENTS[name](model):
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
