"""The kept run of the default cell meets the bars, and bars made of a kept run notice a loss."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmem.bench.quality import Record
from kvmem.bench.saved import load_recall
from kvmem.bench.summary import gates, regressions, summarise

RESULTS = Path(__file__).parents[2] / "bench/results"


@pytest.fixture(scope="module")
def kept() -> list[Record]:
    return [record for _, record in load_recall(RESULTS / "recall-smollm2-2026-11-30.jsonl")]


def test_the_kept_run_of_the_default_cell_meets_its_bars(kept: list[Record]) -> None:
    rows = summarise(kept)
    assert {row.n for row in rows} == {48}
    bars = gates(rows)
    assert len(bars) == 4
    assert all(bar.passed for bar in bars)


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
