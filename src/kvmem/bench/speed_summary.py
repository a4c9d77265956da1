"""Medians of speed measurements, and kvmem's rate over that of the others."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvmem.bench.speed import SYSTEMS, Phase, RequestRecord, SpeedRecord, System

__all__ = ["Ratio", "RequestRow", "SpeedRow", "ratios", "request_rows", "speed_rows"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """Medians of the requests of one kind. of_ceiling: None where nothing moved.

    overhead_s: the first token's time without the decoding of the question or the history.
    phases: of the request whose first token is the median, so that they add up to it.
    """

    system: System
    kind: Literal["cold", "warm"]
    depth_tokens: int
    n: int
    decision: str
    first_token_s: float
    overhead_s: float
    phases: dict[str, float]
    bytes_in: int
    to_device_per_s: float | None
    of_ceiling: float | None


def request_rows(records: Sequence[RequestRecord]) -> list[RequestRow]:
    """One row for each system, kind and depth, in the order of the records."""
    keys = dict.fromkeys((r.depth_tokens, r.kind, r.system) for r in records)
    rows = []
    for depth, kind, system in keys:
        group = [r for r in records if (r.depth_tokens, r.kind, r.system) == (depth, kind, system)]
        rates = [r.to_device_per_s for r in group if r.to_device_per_s is not None]
        shares = [r.of_ceiling for r in group if r.of_ceiling is not None]
        rows.append(
            RequestRow(
                system=system,
                kind=kind,
                depth_tokens=depth,
                n=len(group),
                decision=statistics.mode(r.decision for r in group),
                first_token_s=_median_request(group).first_token_s,
                overhead_s=statistics.median(r.first_token_s - r.read_s - r.query_s for r in group),
                phases=_median_request(group).phases,
                bytes_in=int(statistics.median(r.bytes_in for r in group)),
                to_device_per_s=statistics.median(rates) if rates else None,
                of_ceiling=statistics.median(shares) if shares else None,
            )
        )
    return rows


def _median_request(group: Sequence[RequestRecord]) -> RequestRecord:
    """The one whose first token is the median; of an even number, the lower one."""
    return sorted(group, key=lambda r: r.first_token_s)[(len(group) - 1) // 2]


def speed_rows(records: Sequence[SpeedRecord]) -> list[SpeedRow]:
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


def ratios(records: Sequence[SpeedRecord]) -> list[Ratio]:
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
