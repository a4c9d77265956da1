"""Whole windows and single blocks, out to the host and in again, beside the machine's own copy."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from synthetic_pool import BLOCK, Pool, Settings, pool

from kvmem.llama.model import Model

Row = dict[str, Any]


def transfers(model: Model, settings: Settings) -> Iterator[Row]:
    """Whole windows out and in, by each way, beside the machine's own pinned copy."""
    with pool(model, settings, reserve=1) as p:
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
        with pool(model, settings, transfer=way, reserve=1) as p:
            if memory == "plain":
                p.port.limit_pinned(0)
            name = f"{way}, {memory} memory"
            n = 288
            rates = []
            p.fake(BLOCK)
            for _ in range(6):
                if p.ws.room() < (n - 1) * BLOCK:
                    p.ws.apply(p.ws.resident()[-1:])
                p.append(n - 1)
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
        p.append(n_blocks)
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
