"""Parts of a run, and differences between policies, on made-up records."""

import math

import pytest

from kvmem.bench.details import by_depth, by_kind, compare, mcnemar
from kvmem.bench.quality import Record
from kvmem.bench.recall_plots import budgets, values


def made(policy: str, seed: int, kind: str, *, found: bool, right: bool, depth: float) -> Record:
    return Record(
        generator="made",
        seed=seed,
        kind=kind,
        shares_word=True,
        depth=depth,
        parts=1,
        policy=policy,
        selected_blocks=16,
        new_blocks=9,
        score_ms=1.0,
        gold_recall=float(found),
        whole=found,
        gold_rank=1.0,
        kl_nats=0.1 if right else 0.6,
        top1=1.0,
        forced=right,
        free=None,
    )


RECORDS = [
    made(policy, seed, kind, found=found, right=found and kind == "code", depth=depth)
    for seed in range(4)
    for kind, depth in (("code", 0.1), ("hop", 0.99))
    for policy, found in (("good", True), ("bad", seed == 0))
]


def test_parts_by_kind_and_depth_count_their_own() -> None:
    code, hop = by_kind(RECORDS, "good")
    assert (code.part, code.n, code.forced, hop.forced) == ("code", 4, 1.0, 0.0)
    first, last = by_depth(RECORDS, "bad")
    assert (first.part, last.part) == ("0-20 %", "80-100 %")
    assert first.gold_recall.mean == first.whole == 0.25
    assert first.gold_recall.low < 0.25 < first.gold_recall.high


def test_differences_are_paired_by_question() -> None:
    found = compare(RECORDS, "good", "bad")
    assert found.n == 8
    assert found.gold_recall.mean == 0.75
    assert found.forced.mean == pytest.approx(3 / 8)
    assert found.kl_nats.mean == pytest.approx(-0.5 * 3 / 8)
    assert found.p_forced == mcnemar(3, 0)
    with pytest.raises(ValueError, match="both good and none"):
        compare(RECORDS, "good", "none")


def test_plots_take_values_by_the_name_of_their_policy() -> None:
    """A cell may lack a policy that the first one has."""
    found = [("harbor:3072:512:32:4", record) for record in RECORDS]
    found += [("harbor:3072:1024:32:4", r) for r in RECORDS if r.policy == "bad"]
    found += [("harbor:4096:512:32:4", r) for r in RECORDS]
    ((length, rows),) = budgets(found).items()
    assert length == "3072 tokens in units of 32"
    assert values(rows[512], ["good", "bad"], "gold_recall") == [1.0, 0.25]
    few = values(rows[1024], ["good", "bad"], "gold_recall")
    assert math.isnan(few[0])
    assert few[1] == 0.25


@pytest.mark.parametrize(
    ("first", "second", "p"), [(0, 0, 1.0), (3, 0, 0.25), (6, 0, 2 / 64), (5, 5, 1.0)]
)
def test_mcnemar_is_a_sign_test(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(p)
