"""What other cards would need: from memory that was measured, with other weights and pools.

    python bench/gpu/card.py states.jsonl tools.jsonl

The first is `drafts.py --alone`'s, the second a tool task's, of which only the growth from its
first round to its peak is taken. Weights and pool are put in the place of those of the run; all
else (recurrent state, buffers for computing and staging, CUDA itself) is taken as measured.
Buffers shrink with the pool, so a smaller one needs a little less than this.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Q
from shape27b import sizes

from kvmem.bench.record import read_jsonl

MIB = 1 << 20
CARD_BYTES = 16 << 30
CELLS = ((36_864, 16_384), (24_576, 8_192), (12_288, 4_096))


@dataclass(frozen=True, slots=True)
class Measured:
    """An engine on a GPU. used: all that was in use on it, by anyone, at its most.

    pool: K and V of the pool, the draft head's with them. weights: on the device.
    """

    used: int
    pool: int
    pool_tokens: int
    weights: int

    def needs(self, weights: int, pool_tokens: int) -> int:
        """Bytes for these weights and this pool, all else being equal."""
        rest = self.used - self.pool - self.weights
        return rest + weights + self.pool * pool_tokens // self.pool_tokens


def load(states: Path, task: Path, matrices: Q = Q.IQ4_XS) -> dict[str, Measured]:
    """By what drafts are rolled back with; the model is shape27b.py's, with these weights."""
    first, *lines = read_jsonl(states)
    settings: dict[str, Any] = first["settings"]
    taken = [line["gpu_bytes"] for line in read_jsonl(task) if line.get("system") == "kvmem"]
    return {
        line["system"]: Measured(
            used=round(line["in use on the GPU MiB"] * MIB) + max(taken) - taken[0],
            pool=round(line["KV MiB"] * MIB),
            pool_tokens=settings["budget"] + settings["reserve"],
            weights=sizes(matrices).on_device,
        )
        for line in lines
        if line.get("what") == "memory"
    }


def rows(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """By weights, pool and drafts. spare: of a card of 16 GiB."""
    return [
        {
            "weights": matrices.name,
            "budget": budget,
            "reserve": reserve,
            "drafts": drafts,
            "MiB": round(needed / MIB),
            "spare MiB": round((CARD_BYTES - needed) / MIB),
        }
        for matrices in (Q.IQ4_XS, Q.IQ3_S)
        for budget, reserve in CELLS
        for drafts, engine in measured.items()
        for needed in [engine.needs(sizes(matrices).on_device, budget + reserve)]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("states", type=Path)
    parser.add_argument("task", type=Path)
    arguments = parser.parse_args()
    for row in rows(load(arguments.states, arguments.task)):
        print(row)


if __name__ == "__main__":
    main()
