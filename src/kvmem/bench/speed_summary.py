"""Medians of speed measurements, and kvmem's rate over that of the others."""

import statistics
from dataclasses import dataclass

from kvmem.bench.speed import SYSTEMS, Phase, SpeedRecord, System

__all__ = ["Ratio", "SpeedRow", "ratios", "speed_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Median of the rounds, and their spread."""

    system: System
    phase: Phase
    depth_tokens: int
    n: int
    tokens_per_s: float
    slowest: float
    fastest: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """kvmem against another system: median of the ratios of the same round."""

    phase: Phase
    depth_tokens: int
    against: System
    value: float


def speed_rows(records: list[SpeedRecord]) -> list[SpeedRow]:
    """One row for each system, phase and depth, in the order of the records."""
    keys = dict.fromkeys((r.depth_tokens, r.phase, r.system) for r in records)
    rows = []
    for depth, phase, system in keys:
        rates = [
            r.tokens_per_s
            for r in records
            if (r.depth_tokens, r.phase, r.system) == (depth, phase, system)
        ]
        rows.append(
            SpeedRow(
                system=system,
                phase=phase,
                depth_tokens=depth,
                n=len(rates),
                tokens_per_s=statistics.median(rates),
                slowest=min(rates),
                fastest=max(rates),
            )
        )
    return rows


def ratios(records: list[SpeedRecord]) -> list[Ratio]:
    """kvmem's rate over stock's and the window's, round by round."""
    rate = {(r.depth_tokens, r.phase, r.round, r.system): r.tokens_per_s for r in records}
    found = []
    for depth, phase in dict.fromkeys((r.depth_tokens, r.phase) for r in records):
        rounds = sorted({r.round for r in records if r.depth_tokens == depth})
        for against in SYSTEMS[1:]:
            values = [
                rate[depth, phase, turn, "kvmem"] / rate[depth, phase, turn, against]
                for turn in rounds
            ]
            found.append(Ratio(phase, depth, against, statistics.median(values)))
    return found
