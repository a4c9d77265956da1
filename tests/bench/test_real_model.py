"""The bars of recall, speed and the demo on the demo model. Minutes, so `make test` leaves them
out."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Literal

import pytest
from kept import kept_demos

from kvmem.bench.agent import AgentSpec, run_agent
from kvmem.bench.demo import DemoSpec, run_demo
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EngineHistory
from kvmem.bench.quality import Policy, Record, measure
from kvmem.bench.recall import RecallSpec
from kvmem.bench.saved import load_recall
from kvmem.bench.speed import SpeedRecord, SpeedSpec, System, run_speed
from kvmem.bench.speed_summary import ratios, speed_rows
from kvmem.bench.speed_systems import Phase
from kvmem.bench.summary import DEFAULT_SIZE, gates, regressions, summarise
from kvmem.bench.workload import Prompt, WorkloadSpec, make_prompts
from kvmem.engine.engine import Engine

pytestmark = pytest.mark.slow

KEPT_RUN = Path(__file__).parents[2] / "bench/results/recall-smollm2-2026-11-30.jsonl"
"""All eight histories. Two of them are too few to decide on the bars of the whole run, which
tests/bench/test_kept_runs.py holds it to; here recall may not fall behind it."""

POLICIES = (
    Policy("fused", "first"),
    Policy("heads", "ideal", neighbours=False),
    Policy("cosine", "ideal"),
    Policy("recency", "none"),
)


LOST = {
    "keys": {"heads alone @ideal"},
    "words": {"fused @first"},
    "keys and words": {"heads alone @ideal", "fused @first"},
}
"""Whose bar of gold recall each control misses: `fused` finds these facts by words alone."""


def ask(
    history: EngineHistory, prompt: Prompt, policies: Sequence[Policy] = POLICIES
) -> list[Record]:
    return list(measure([prompt], lambda prompt: history, None, policies=policies))


def test_recall_is_what_it_was_and_mixed_up_parts_lose_it(demo_model: Path) -> None:
    spec = RecallSpec(model=demo_model, n_prompts=2, n_threads=1)
    records: list[Record] = []
    mixed_up: dict[str, list[Record]] = {}
    with Engine(spec.engine(tiered=True)) as engine:
        for prompt in make_prompts(Harbor(), engine.vocab, WorkloadSpec(), spec.seeds):
            history = EngineHistory.read(engine, prompt.history)
            records += ask(history, prompt)
            for parts in LOST if prompt.seed == 0 else ():
                history.mix_up(0, keys="keys" in parts, words="words" in parts)
                mixed_up[parts] = ask(history, prompt, POLICIES[:2])
    kept = [record for _, record in load_recall(KEPT_RUN)]
    bars = regressions(kept, records)
    assert {bar.policy for bar in bars} >= {policy.name for policy in POLICIES}
    assert [bar for bar in bars if not bar.passed] == []
    for parts, lost in LOST.items():
        bars = gates(summarise(mixed_up[parts]), DEFAULT_SIZE)
        missed = {bar.policy for bar in bars if bar.what == "gold recall" and not bar.passed}
        assert missed == lost, parts


def test_the_demo_recalls_what_recency_has_lost(demo_model: Path) -> None:
    """The worst of the five kept seeds, live; another processor may lose one answer by rounding."""
    kept = kept_demos()
    seed = min(kept, key=lambda seed: kept[seed]["kvmem"])
    right = {
        r.name: r.n_right for r in run_demo(DemoSpec(model=demo_model, seed=seed, n_threads=1))
    }
    assert right["full cache"] >= kept[seed]["full cache"] - 1
    assert right["kvmem"] >= kept[seed]["kvmem"] - 1
    assert right["newest blocks"] <= 2


@pytest.fixture
def cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clocks of a bench count the CPU time of this process: what else the machine does then
    hardly matters."""
    for module in ("bench.speed", "bench.speed_systems", "engine.session", "engine.memory"):
        monkeypatch.setattr(f"kvmem.{module}.perf_counter", process_time)


DEPTH = 1024
SMALL, WHOLE = 192, DEPTH - 64
"""Budgets: a fifth of the history, and nearly all of it, which must not pass for a small one."""


@pytest.mark.alone
@pytest.mark.usefixtures("cpu_time")
@pytest.mark.parametrize("budget", [SMALL, WHOLE], ids=["small budget", "control: nearly all"])
def test_reading_and_writing_behind_a_long_history(budget: int, demo_model: Path) -> None:
    """`kvmem bench speed` in small: 1.87 and 1.46 of stock were seen, .97 and 1.02 of a window."""
    spec = SpeedSpec(
        model=demo_model,
        depths=(DEPTH,),
        pool_tokens=budget + 64,
        reserve_tokens=64,
        window_tokens=SMALL + 64,
        prefill_tokens=64,
        decode_tokens=8,
        repeats=3,
        n_threads=1,
    )
    speeds = [record for record in run_speed(spec) if isinstance(record, SpeedRecord)]
    found = {(ratio.phase, ratio.against): ratio.value for ratio in ratios(speeds)}
    bars: dict[tuple[Phase, System], float] = {
        ("prefill", "stock"): 1.4,
        ("decode", "stock"): 1.2,
        ("prefill", "window"): 0.85,
        ("decode", "window"): 0.85,
    }
    passed = {name: found[name] >= bar for name, bar in bars.items()}
    assert set(passed.values()) == {budget == SMALL}, found


@pytest.mark.alone
@pytest.mark.usefixtures("cpu_time")
def test_a_store_that_nothing_left_for_costs_next_to_nothing(demo_model: Path) -> None:
    """The history within the pool: storing and summaries beside plain llama.cpp's reading.

    By the median of the rounds or by the fastest ones, and a second time if need be: beside other
    work the CPU time of a round varies by a tenth, so the bar of .97 is .93 here.
    """
    spec = SpeedSpec(
        model=demo_model,
        depths=(512,),
        pool_tokens=1024,
        prefill_tokens=256,
        decode_tokens=4,
        repeats=5,
        n_threads=1,
    )

    def over_stock() -> float:
        speeds = [record for record in run_speed(spec) if isinstance(record, SpeedRecord)]
        stored = [r.bytes_out for r in speeds if (r.system, r.phase) == ("kvmem", "prefill")]
        assert len(stored) == 6 and min(stored) > 0
        fastest = {row.system: row.fastest for row in speed_rows(speeds) if row.phase == "prefill"}
        found = {(ratio.phase, ratio.against): ratio.value for ratio in ratios(speeds)}
        return max(found["prefill", "stock"], fastest["kvmem"] / fastest["stock"])

    first = over_stock()
    assert first >= 0.93 or over_stock() >= 0.93, first


@pytest.mark.alone
@pytest.mark.usefixtures("cpu_time")
def test_an_agents_task_beside_plain_llama_cpp(demo_model: Path) -> None:
    """`kvmem bench agent` in small, both systems round by round: 1.55 and 1.33 were seen."""

    def spec(system: Literal["kvmem", "stock"]) -> AgentSpec:
        return AgentSpec(
            model=demo_model,
            system=system,
            n_tokens=DEPTH,
            rounds=6,
            reply_tokens=16,
            budget_tokens=SMALL,
            reserve_tokens=64,
            n_threads=1,
        )

    rounds = list(zip(run_agent(spec("kvmem")), run_agent(spec("stock")), strict=True))
    assert all(own.prompt_tokens == stock.prompt_tokens for own, stock in rounds)
    late = rounds[3:]
    reading = median(stock.prompt_s / own.prompt_s for own, stock in late)
    writing = median(stock.decode_s / own.decode_s for own, stock in late)
    assert (reading >= 1.25, writing >= 1.15) == (True, True), (reading, writing)
