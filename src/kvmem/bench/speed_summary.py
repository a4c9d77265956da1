"""Medians of speed measurements, and kvmem's rate over that of the others."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvmem.bench.speed import SYSTEMS, RequestRecord, SpeedRecord, System
from kvmem.bench.speed_systems import Phase

__all__ = ["Ratio", "RequestRow", "SpeedRow", "ratios", "request_rows", "speed_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Median of the rounds but round 0, and their spread.

    to_host_per_s, of_ceiling: as SpeedRecord has them.
    """

    system: System
    phase: Phase
    depth_tokens: int
    n: int
    tokens_per_s: float
    slowest: float
    fastest: float
    to_host_per_s: float | None = None
    of_ceiling: float | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """kvmem against another system: median of the ratios of the same round.

    Against its decode where the phase is "reserve".
    """

    phase: Phase
    depth_tokens: int
    against: System
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """Medians of the requests of one kind. of_ceiling: None where nothing moved. in_a_row: as
    RequestRecord has it.

    overhead_s: the first token's time without the decoding of the question or the history.
    phases: of the request whose first token is the median, so that they add up to it.
    """

    system: System
    kind: Literal["cold", "warm"]
    depth_tokens: int
    n: int
    decision: str
    first_token_s: float
    fastest_s: float
    slowest_s: float
    overhead_s: float
    phases: dict[str, float]
    bytes_in: int
    to_device_per_s: float | None
    of_ceiling: float | None
    in_a_row: bool = False


def request_rows(records: Sequence[RequestRecord]) -> list[RequestRow]:
    """One row for each system, kind and depth, in the order of the records."""

    def key(r: RequestRecord) -> tuple[int, Literal["cold", "warm"], System, bool]:
        return r.depth_tokens, r.kind, r.system, r.in_a_row

    rows = []
    for one in dict.fromkeys(map(key, records)):
        depth, kind, system, in_a_row = one
        group = [r for r in records if key(r) == one]
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
                fastest_s=min(r.first_token_s for r in group),
                slowest_s=max(r.first_token_s for r in group),
                overhead_s=statistics.median(r.first_token_s - r.read_s - r.query_s for r in group),
                phases=_median_request(group).phases,
                bytes_in=int(statistics.median(r.bytes_in for r in group)),
                to_device_per_s=statistics.median(rates) if rates else None,
                of_ceiling=statistics.median(shares) if shares else None,
                in_a_row=in_a_row,
            )
        )
    return rows


def _median_request(group: Sequence[RequestRecord]) -> RequestRecord:
    """The one whose first token is the median; of an even number, the lower one."""
    return sorted(group, key=lambda r: r.first_token_s)[(len(group) - 1) // 2]


def speed_rows(records: Sequence[SpeedRecord]) -> list[SpeedRow]:
    """One row for each system, phase and depth, in the order of the records."""
    records = [r for r in records if r.round]
    keys = dict.fromkeys((r.depth_tokens, r.phase, r.system) for r in records)
    rows = []
    for depth, phase, system in keys:
        group = [
            r for r in records if (r.depth_tokens, r.phase, r.system) == (depth, phase, system)
        ]
        rates = [r.tokens_per_s for r in group]
        stored = [r.to_host_per_s for r in group if r.to_host_per_s is not None]
        shares = [r.of_ceiling for r in group if r.of_ceiling is not None]
        rows.append(
            SpeedRow(
                system=system,
                phase=phase,
                depth_tokens=depth,
                n=len(rates),
                tokens_per_s=statistics.median(rates),
                slowest=min(rates),
                fastest=max(rates),
                to_host_per_s=statistics.median(stored) if stored else None,
                of_ceiling=statistics.median(shares) if shares else None,
            )
        )
    return rows


def ratios(records: Sequence[SpeedRecord]) -> list[Ratio]:
    """kvmem's rate over stock's and the window's, round by round."""
    rate = {(r.depth_tokens, r.phase, r.round, r.system): r.tokens_per_s for r in records}
    own = [r for r in records if r.system == "kvmem" and r.round]
    found = []
    for depth, phase in dict.fromkeys((r.depth_tokens, r.phase) for r in own):
        # a window has no reserve, and so fewer cells
        others = SYSTEMS[1:2] if phase == "reserve" else SYSTEMS[1:]
        for against in others:
            like: Phase = "decode" if phase == "reserve" else phase
            pairs = [
                (r.tokens_per_s, rate.get((depth, like, r.round, against)))
                for r in own
                if (r.depth_tokens, r.phase) == (depth, phase)
            ]
            values = [mine / theirs for mine, theirs in pairs if theirs is not None]
            if values:
                found.append(Ratio(phase, depth, against, statistics.median(values)))
    return found
