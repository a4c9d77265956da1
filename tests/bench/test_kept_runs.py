"""The kept runs meet the bars of their sizes, and bars made of a kept run notice a loss."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmem.bench.metrics import Interval
from kvmem.bench.quality import Record
from kvmem.bench.saved import load_recall
from kvmem.bench.summary import DEFAULT_SIZE, TARGETS, Size, gates, regressions, summarise

RESULTS = Path(__file__).parents[2] / "bench/results"


@pytest.fixture(scope="module")
def kept() -> list[Record]:
    return [record for _, record in load_recall(RESULTS / "recall-smollm2-2026-11-30.jsonl")]


def test_the_kept_run_of_the_default_cell_meets_its_bars(kept: list[Record]) -> None:
    rows = summarise(kept)
    assert {row.n for row in rows} == {48}
    bars = gates(rows, DEFAULT_SIZE)
    assert len(bars) == 6  # four of `fused`, uncalibrated, and two of heads alone
    assert all(bar.passed for bar in bars)


QUALITY = sorted(RESULTS.glob("quality-smollm2-*.jsonl"))


@pytest.mark.parametrize("path", QUALITY, ids=[path.stem for path in QUALITY])
def test_a_kept_quality_run_meets_the_bars_of_each_of_its_sizes(path: Path) -> None:
    found = load_recall(path)
    sizes = {size for size in TARGETS if any(Size.of(cell) == size for cell, _ in found)}
    assert sizes == set(TARGETS)
    for size in sizes:
        records = [record for cell, record in found if Size.of(cell) == size]
        assert len({record.generator for record in records}) >= 2
        rows = summarise(records)
        assert min(row.n for row in rows) >= 100
        bars = gates(rows, size)
        assert {(bar.policy, bar.what) for bar in bars} == MEASURED
        missed = {(size, bar.policy, bar.what) for bar in bars if not bar.passed}
        assert missed == {bar for name, bar in MISSED if name == path.stem and bar[0] == size}


MISSED = {
    (
        "quality-smollm2-2026-12-01",
        (Size(6144, 768, 32), "heads alone @ideal", "lead over cosine, paraphrased"),
    ),
}
"""Not met: .23 [.10, .37] of .25 (n = 68), by the heads without a calibration."""

FUSED = ("gold recall", "rank", "KL, nats", "KLE", "forced, of full")
HEADS = ("gold recall", "lead over cosine, paraphrased")
MEASURED = {
    *(("fused* @first", what) for what in FUSED),
    *((policy, what) for policy in ("heads* @first", "heads alone @ideal") for what in HEADS),
}


def test_each_bar_is_held_by_what_it_is_of() -> None:
    """A run that is a little worse in one thing misses that bar, and only that."""
    found = load_recall(QUALITY[-1])
    records = [record for cell, record in found if Size.of(cell) == DEFAULT_SIZE]
    rows = {row.policy: row for row in summarise(records)}
    fused = rows["fused* @first"]
    low = Interval(0.7, 0.6, 0.8)
    for policy, what, worse in (
        ("fused* @first", "gold recall", {"gold_recall": low}),
        ("fused* @first", "rank", {"gold_rank": 3.0}),
        ("fused* @first", "KL, nats", {"kl_nats": Interval(0.26, 0.2, 0.3)}),
        ("fused* @first", "KLE", {"kle": 0.79}),
        ("heads* @first", "gold recall", {"gold_recall": low}),
        ("heads alone @ideal", "gold recall", {"gold_recall": Interval(0.69, 0.6, 0.8)}),
        ("cosine @ideal", "lead over cosine, paraphrased", {"paraphrase_recall": low}),
    ):
        changed = {**rows, policy: replace(rows[policy], **worse)}
        missed = {bar.what for bar in gates(list(changed.values()), DEFAULT_SIZE) if not bar.passed}
        assert missed == {what}
    # answers are held to a bar where there are enough of them
    for n, n_missed in ((199, 0), (200, 1)):
        changed = {**rows, fused.policy: replace(fused, n=n, of_full=0.89)}
        assert (
            sum(not bar.passed for bar in gates(list(changed.values()), DEFAULT_SIZE)) == n_missed
        )


def test_what_was_kept_passes_its_own_bars_and_lost_facts_do_not(kept: list[Record]) -> None:
    few = [r for r in kept if r.seed < 3 and r.policy == "fused @first"]
    assert all(bar.passed for bar in regressions(kept, few))
    recall, nats = regressions(kept, [replace(r, gold_recall=0.7 * r.gold_recall) for r in few])
    assert (recall.what, nats.what) == ("gold recall", "KL, nats")
    assert not recall.passed
    assert nats.passed
    _, nats = regressions(kept, [replace(r, kl_nats=2 * r.kl_nats) for r in few])
    assert not nats.passed
    # the bar is near what was kept, and farther the fewer histories are drawn
    whole = [r for r in kept if r.policy == "fused @first"]
    assert 0.7 < recall.bar < regressions(kept, whole)[0].bar < 1


def test_a_history_that_was_not_kept_is_named(kept: list[Record]) -> None:
    with pytest.raises(ValueError, match=r"no history \('harbor', 99\)"):
        regressions(kept, [replace(kept[0], seed=99)])
