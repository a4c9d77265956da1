"""What other cards would need: from a task that was measured, with other weights and pools.

    python bench/gpu/card.py tools.jsonl [tools-drafts.jsonl]

Weights and pool are put in the place of those of the run; all else (recurrent state, buffers for
computing and staging, CUDA itself) is taken as measured. Buffers shrink with the pool, so a smaller
one needs a little less than this.
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
class Task:
    """A run of `kvmem bench agent` on a GPU. used: the most in use on it, by all.

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


def load(path: Path, matrices: Q = Q.IQ4_XS) -> Task:
    """The run in a file; its model is shape27b.py's, with these weights."""
    first, *lines = read_jsonl(path)
    settings: dict[str, Any] = first["settings"]
    rounds = [line for line in lines if line.get("system") == "kvmem"]
    return Task(
        used=max(line["gpu_used_bytes"] for line in rounds),
        pool=rounds[-1]["device_bytes"],
        pool_tokens=settings["budget_tokens"] + settings["reserve_tokens"],
        weights=sizes(matrices).on_device,
    )


def rows(tasks: dict[str, Task]) -> list[dict[str, Any]]:
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
        for drafts, task in tasks.items()
        for needed in [task.needs(sizes(matrices).on_device, budget + reserve)]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plain", type=Path, help="records of the task without drafts")
    parser.add_argument("drafts", type=Path, nargs="?", help="and with them")
    arguments = parser.parse_args()
    tasks = {"no": load(arguments.plain)}
    if arguments.drafts:
        tasks["yes"] = load(arguments.drafts)
    for row in rows(tasks):
        print(row)


if __name__ == "__main__":
    main()
