"""What the records of a recall run say beyond one row a policy: by kind, by depth, and in pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvmem.bench.metrics import Interval, bootstrap
from kvmem.bench.quality import Record

__all__ = ["Difference", "Part", "by_depth", "by_kind", "compare", "mcnemar"]

N_DEPTHS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of the questions under one policy. whole: share whose evidence was all visible."""

    policy: str
    part: str
    n: int
    gold_recall: Interval
    whole: float
    forced: float


def _part(policy: str, name: str, records: Sequence[Record]) -> Part:
    return Part(
        policy=policy,
        part=name,
        n=len(records),
        gold_recall=bootstrap([r.gold_recall for r in records], clusters(records)),
        whole=float(np.mean([r.whole for r in records])),
        forced=float(np.mean([r.forced for r in records])),
    )


class OfHistory(Protocol):
    """A record of one history."""

    @property
    def generator(self) -> str: ...

    @property
    def seed(self) -> int: ...


def clusters(records: Sequence[OfHistory]) -> list[int]:
    """Which history each record is of, as a number: what the bootstrap draws."""
    names = sorted({(r.generator, r.seed) for r in records})
    index = {name: i for i, name in enumerate(names)}
    return [index[r.generator, r.seed] for r in records]


def by_kind(records: Sequence[Record], policy: str) -> list[Part]:
    """One part for each kind of question."""
    own = [r for r in records if r.policy == policy]
    kinds = sorted({r.kind for r in own})
    return [_part(policy, kind, [r for r in own if r.kind == kind]) for kind in kinds]


def by_depth(records: Sequence[Record], policy: str) -> list[Part]:
    """Fifths of the history, by where the evidence begins."""
    own = [r for r in records if r.policy == policy]
    parts = []
    for i in range(N_DEPTHS):
        inside = [r for r in own if min(N_DEPTHS - 1, int(r.depth * N_DEPTHS)) == i]
        if inside:
            name = f"{100 * i // N_DEPTHS}-{100 * (i + 1) // N_DEPTHS} %"
            parts.append(_part(policy, name, inside))
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First policy less second, question by question. p_forced: McNemar's, exact, two-sided."""

    first: str
    second: str
    n: int
    gold_recall: Interval
    kl_nats: Interval
    forced: Interval
    p_forced: float


def compare(records: Sequence[Record], first: str, second: str) -> Difference:
    """Paired differences over the questions that both policies answered.

    Raises ValueError: there are none.
    """

    def keyed(policy: str) -> dict[tuple[str, int, str, float], Record]:
        own = (r for r in records if r.policy == policy)
        return {(r.generator, r.seed, r.kind, r.depth): r for r in own}

    left, right = keyed(first), keyed(second)
    common = sorted(left.keys() & right.keys())
    if not common:
        raise ValueError(f"no question was asked under both {first} and {second}")
    pairs = [(left[key], right[key]) for key in common]
    groups = clusters([a for a, _ in pairs])
    return Difference(
        first=first,
        second=second,
        n=len(pairs),
        gold_recall=bootstrap([a.gold_recall - b.gold_recall for a, b in pairs], groups),
        kl_nats=bootstrap([a.kl_nats - b.kl_nats for a, b in pairs], groups),
        forced=bootstrap([float(a.forced) - float(b.forced) for a, b in pairs], groups),
        p_forced=mcnemar(
            sum(a.forced and not b.forced for a, b in pairs),
            sum(b.forced and not a.forced for a, b in pairs),
        ),
    )


def mcnemar(n_first: int, n_second: int) -> float:
    """Two-sided p that two methods are equally often right alone, as they were n times each.

    Source: McNemar 1947, in the exact form: a sign test on the questions that they differ in.
    """
    n = n_first + n_second
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(n_first, n_second) + 1)) / 2**n
    return float(min(1.0, 2 * tail))
