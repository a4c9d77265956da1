"""Kept runs that several tests look at."""

from pathlib import Path

from kvmem.bench.record import read_jsonl

RESULTS = Path(__file__).parents[1] / "bench/results"


def kept_demos() -> dict[int, dict[str, int]]:
    """Right answers of `kvmem demo`, of six: by seed, then by what attention sees."""
    path = sorted(RESULTS.glob("demo-smollm2-20*.jsonl"))[-1]
    return {
        demo["settings"]["seed"]: {
            way["name"]: sum(asked["right"] for asked in way["asked"]) for way in demo["results"]
        }
        for demo in read_jsonl(path)
    }
