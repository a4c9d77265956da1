"""From records of single questions to one row a policy, and to the gates that a run must pass."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from kvmem.bench.details import clusters
from kvmem.bench.metrics import Interval, bootstrap, kle
from kvmem.bench.quality import FULL, GOLD, STOCK, Record

RECENCY: Final = "recency"
REFERENCES: Final = (STOCK, FULL, GOLD)

_VALUES: Final[dict[str, Callable[[Record], float]]] = {
    "gold recall": lambda r: r.gold_recall,
    "KL, nats": lambda r: r.kl_nats,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy. Intervals are 95 %, bootstrap over prompts.

    All but paraphrase_recall, which is over n_paraphrased questions, is over the n questions that
    share a rare word with their fact. kl_nats and top1 are against full attention over the same
    K and V; kle is 0 for recency and 1 for the gold blocks. of_full: forced answers over those of
    full attention, NaN where that has none. free: None if not tried. score_ms, bytes_per_token and
    what comes in are of the median question.
    """

    policy: str
    n: int
    n_paraphrased: int
    gold_recall: Interval
    gold_rank: float
    kl_nats: Interval
    top1: float
    kle: float
    forced: Interval
    of_full: float
    free: Interval | None
    paraphrase_recall: Interval
    session_recall: Interval
    score_ms: float
    bytes_per_token: float
    blocks_in: float
    bytes_in: float


def summarise(records: Sequence[Record]) -> list[Row]:
    """Rows in the order of first appearance of their policy."""
    names = list(dict.fromkeys(record.policy for record in records))
    direct = [r for r in records if r.shares_word]
    groups = {name: [r for r in direct if r.policy == name] for name in names}
    kl_of = {name: _mean([r.kl_nats for r in group]) for name, group in groups.items()}
    kl_recency, kl_gold = kl_of.get(RECENCY, float("nan")), kl_of.get(GOLD, float("nan"))
    rows = []
    for name, group in groups.items():
        free = [r for r in group if r.free is not None]
        ranks = [r.gold_rank for r in group if not math.isnan(r.gold_rank)]
        indirect = [r for r in records if r.policy == name and not r.shares_word]
        rows.append(
            Row(
                policy=name,
                n=len(group),
                n_paraphrased=len(indirect),
                gold_recall=_interval(group, lambda r: r.gold_recall),
                gold_rank=_median(ranks),
                kl_nats=_interval(group, lambda r: r.kl_nats),
                top1=_mean([r.top1 for r in group]),
                kle=kle(kl_of[name], kl_recency, kl_gold),
                forced=_interval(group, lambda r: r.forced),
                of_full=_of_full(group, groups.get(FULL, [])),
                free=_interval(free, lambda r: bool(r.free)) if free else None,
                paraphrase_recall=_interval(indirect, lambda r: r.gold_recall),
                session_recall=_interval(group, lambda r: r.session_recall),
                score_ms=_median([r.score_ms for r in group]),
                bytes_per_token=_median([r.bytes_per_token for r in group]),
                blocks_in=_median([r.new_blocks for r in group]),
                bytes_in=_median([r.bytes_in for r in group]),
            )
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    """NaN where there is none: of a run that was stopped, all may be paraphrased."""
    return statistics.fmean(values) if values else math.nan


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _interval(records: Sequence[Record], value: Callable[[Record], float]) -> Interval:
    known = [r for r in records if not math.isnan(value(r))]
    return bootstrap([float(value(r)) for r in known], clusters(known))


def _of_full(group: Sequence[Record], full: Sequence[Record]) -> float:
    histories = {(r.generator, r.seed) for r in group}
    right = sum(r.forced for r in full if (r.generator, r.seed) in histories)
    return sum(r.forced for r in group) / right if right else math.nan


@dataclass(frozen=True, slots=True)
class Gate:
    """A bar that one policy has to reach."""

    policy: str
    what: str
    value: float
    bar: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """A value that could not be measured fails."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


class Size(NamedTuple):
    """Tokens of a history, of the budget, and of a block."""

    n_tokens: int
    budget_tokens: int
    block_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.n_tokens} tokens, budget {self.budget_tokens} in units of {self.block_tokens}"
        )

    @classmethod
    def of(cls, cell: str) -> Self | None:
        """Of a cell by its name; None for a name that says none."""
        parts = cell.split(":")[1:4]
        is_size = len(parts) == 3 and all(part.isdigit() for part in parts)
        return cls(*map(int, parts)) if is_size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What is wanted of SmolLM2-135M at one size.

    gold_recall, gold_rank, kl_nats, kle, of_full: of `fused` from the first pass, calibrated where
    that was measured. picked: gold recall of calibrated heads from the first pass; ideal: of all
    heads alone with the ideal query. lead: of either over `cosine` on paraphrased questions.
    """

    gold_recall: float
    gold_rank: float
    kl_nats: float
    kle: float
    of_full: float
    picked: float
    ideal: float
    lead: float


DEFAULT_SIZE: Final = Size(3072, 512, 32)

TARGETS: Final[Mapping[Size, Bars]] = MappingProxyType(
    {
        DEFAULT_SIZE: Bars(
            gold_recall=0.88, gold_rank=2, kl_nats=0.25, kle=0.80, of_full=0.90,
            picked=0.75, ideal=0.70, lead=0.25,
        ),
        Size(6144, 768, 32): Bars(
            gold_recall=0.88, gold_rank=3, kl_nats=0.33, kle=0.60, of_full=0.90,
            picked=0.75, ideal=0.65, lead=0.25,
        ),
    }
)  # fmt: skip
"""Source: docs/benchmarks.md, "Gates"."""

GATED: Final = frozenset({"fused", "heads"})
"""Scorers that have bars."""

LEAST_FORCED: Final = 200
"""Questions from which on answers are held to a bar: with fewer they are noise."""


def gates(rows: Sequence[Row], size: Size) -> list[Gate]:
    """The bars of a size, of those policies that were measured; none for a size without bars."""
    by_name = {row.policy: row for row in rows}
    bars = TARGETS.get(size)
    if bars is None:
        return []
    found = []
    fused = by_name.get("fused* @first") or by_name.get("fused @first")
    if fused is not None:
        name = fused.policy
        found += [
            Gate(name, "gold recall", fused.gold_recall.mean, bars.gold_recall, True),
            Gate(name, "rank", fused.gold_rank, bars.gold_rank, False),
            Gate(name, "KL, nats", fused.kl_nats.mean, bars.kl_nats, False),
            Gate(name, "KLE", fused.kle, bars.kle, True),
        ]
        if fused.n >= LEAST_FORCED:
            found.append(Gate(name, "forced, of full", fused.of_full, bars.of_full, True))
    for policy, bar in (("heads* @first", bars.picked), ("heads alone @ideal", bars.ideal)):
        if (heads := by_name.get(policy)) is None:
            continue
        found.append(Gate(policy, "gold recall", heads.gold_recall.mean, bar, True))
        if cosine := by_name.get("cosine @ideal"):
            lead = heads.paraphrase_recall.mean - cosine.paraphrase_recall.mean
            found.append(Gate(policy, "lead over cosine, paraphrased", lead, bars.lead, True))
    return found


def regressions(kept: Sequence[Record], fresh: Sequence[Record]) -> list[Gate]:
    """Bars for a few histories of a kept run that were measured again.

    A policy may fall behind what the kept run gave on the same histories by the half width of its
    interval there, when as few of all its histories are drawn. Gold recall and KL of the questions
    that share a word, of policies in both. Raises ValueError: a history is not in the kept run.
    """
    again = {(r.generator, r.seed) for r in fresh}
    if missing := again - {(r.generator, r.seed) for r in kept}:
        raise ValueError(f"the kept run has no history {min(missing)}")
    found = []
    for policy in dict.fromkeys(r.policy for r in fresh):
        before = [r for r in kept if r.policy == policy and r.shares_word]
        same = [r for r in before if (r.generator, r.seed) in again]
        now = [r for r in fresh if r.policy == policy and r.shares_word]
        if not same:
            continue
        for what, at_least in (("gold recall", True), ("KL, nats", False)):
            value = _VALUES[what]
            whole = bootstrap([value(r) for r in before], clusters(before), n_drawn=len(again))
            slack = whole.low - whole.mean if at_least else whole.high - whole.mean
            bar = statistics.fmean(map(value, same)) + slack
            found.append(Gate(policy, what, statistics.fmean(map(value, now)), bar, at_least))
    return found
