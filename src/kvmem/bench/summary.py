"""From records of single questions to one row a policy, and to the gates that a run must pass."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
    K and V; kle is 0 for recency and 1 for the gold blocks. free: None if not tried.
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
    free: Interval | None
    paraphrase_recall: Interval


def summarise(records: Sequence[Record]) -> list[Row]:
    """Rows in the order of first appearance of their policy."""
    names = list(dict.fromkeys(record.policy for record in records))
    direct = [r for r in records if r.shares_word]
    groups = {name: [r for r in direct if r.policy == name] for name in names}
    kl_of = {name: statistics.fmean(r.kl_nats for r in group) for name, group in groups.items()}
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
                gold_rank=statistics.median(ranks) if ranks else math.nan,
                kl_nats=_interval(group, lambda r: r.kl_nats),
                top1=statistics.fmean(r.top1 for r in group),
                kle=kle(kl_of[name], kl_recency, kl_gold),
                forced=_interval(group, lambda r: r.forced),
                free=_interval(free, lambda r: bool(r.free)) if free else None,
                paraphrase_recall=_interval(indirect, lambda r: r.gold_recall),
            )
        )
    return rows


def _interval(records: Sequence[Record], value: Callable[[Record], float]) -> Interval:
    return bootstrap([float(value(r)) for r in records], clusters(records))


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


def gates(rows: Sequence[Row]) -> list[Gate]:
    """The bars of the default cell: SmolLM2, 3,072 tokens, budget 512 in units of 32.

    Only those whose policies were measured. Source: docs/benchmarks.md.
    """
    by_name = {row.policy: row for row in rows}
    found = []
    fused = by_name.get("fused* @first") or by_name.get("fused @first")
    if fused is not None:
        found.append(Gate(fused.policy, "gold recall", fused.gold_recall.mean, 0.80, True))
        found.append(Gate(fused.policy, "KL, nats", fused.kl_nats.mean, 0.35, False))
    if heads := by_name.get("heads alone @ideal"):
        found.append(Gate(heads.policy, "gold recall", heads.gold_recall.mean, 0.70, True))
        if cosine := by_name.get("cosine @ideal"):
            lead = heads.paraphrase_recall.mean - cosine.paraphrase_recall.mean
            found.append(Gate(heads.policy, "lead over cosine, paraphrased", lead, 0.25, True))
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
