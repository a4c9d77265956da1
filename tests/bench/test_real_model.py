"""The bars of recall and of the demo on the demo model. Minutes, so `make test` leaves them out."""

from pathlib import Path

import pytest

from kvmem.bench.demo import DemoSpec, run_demo
from kvmem.bench.demo_model import SMOLLM2
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EngineHistory
from kvmem.bench.quality import Policy, Record, measure
from kvmem.bench.recall import RecallSpec
from kvmem.bench.saved import load_recall
from kvmem.bench.summary import gates, regressions, summarise
from kvmem.bench.workload import Prompt, WorkloadSpec, make_prompts
from kvmem.engine.engine import Engine
from kvmem.paths import cache_folder

pytestmark = pytest.mark.slow

KEPT_RUN = Path(__file__).parents[2] / "bench/results/recall-smollm2-2026-11-30.jsonl"
"""All eight histories. Three of them are too few to decide on the bars of the whole run, which
tests/bench/test_kept_runs.py holds it to; here recall may not fall behind it."""

POLICIES = (
    Policy("fused", "first"),
    Policy("heads", "ideal", neighbours=False),
    Policy("cosine", "ideal"),
    Policy("recency", "none"),
)


@pytest.fixture(scope="module")
def demo_model() -> Path:
    path = cache_folder() / SMOLLM2.file_name
    if not path.exists():
        pytest.skip("the demo model is not in the cache; `kvmem demo-model` fetches it")
    return path


def ask(history: EngineHistory, prompt: Prompt, *, shuffle: bool) -> list[Record]:
    policies = POLICIES[:2] if shuffle else POLICIES
    return list(measure([prompt], lambda prompt: history, None, policies=policies, shuffle=shuffle))


def test_recall_is_what_it_was_and_mixed_up_scores_lose_it(demo_model: Path) -> None:
    spec = RecallSpec(model=demo_model, n_prompts=3, n_threads=1)
    records: list[Record] = []
    mixed_up: list[Record] = []
    with Engine(spec.engine(tiered=True)) as engine:
        for prompt in make_prompts(Harbor(), engine.vocab, WorkloadSpec(), spec.seeds):
            history = EngineHistory.read(engine, prompt.history)
            records += ask(history, prompt, shuffle=False)
            mixed_up += ask(history, prompt, shuffle=True)
    kept = [record for _, record in load_recall(KEPT_RUN)]
    bars = regressions(kept, records)
    assert {bar.policy for bar in bars} >= {policy.name for policy in POLICIES}
    assert [bar for bar in bars if not bar.passed] == []
    scorers = {"fused @first", "heads alone @ideal"}
    for bars in (regressions(kept, mixed_up), gates(summarise(mixed_up))):
        lost = [bar for bar in bars if bar.policy in scorers and bar.what == "gold recall"]
        assert len(lost) == 2
        assert not any(bar.passed for bar in lost)


def test_the_demo_recalls_what_recency_has_lost(demo_model: Path) -> None:
    right = {r.name: r.n_right for r in run_demo(DemoSpec(model=demo_model, seed=4))}
    assert right["full cache"] >= 5
    assert right["kvmem"] >= 5
    assert right["newest blocks"] <= 2
