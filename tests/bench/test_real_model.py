"""The bars of recall and of the demo on the demo model. Minutes, so `make test` leaves them out."""

from pathlib import Path

import pytest

from kvmem.bench.demo import DemoSpec, run_demo
from kvmem.bench.demo_model import SMOLLM2
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EngineHistory
from kvmem.bench.quality import Policy, Record, measure
from kvmem.bench.recall import RecallSpec
from kvmem.bench.summary import gates, summarise
from kvmem.bench.workload import Prompt, WorkloadSpec, make_prompts
from kvmem.engine.engine import Engine
from kvmem.paths import cache_folder

pytestmark = pytest.mark.slow

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
    return list(measure([prompt], lambda prompt: history, None, policies=POLICIES, shuffle=shuffle))


def test_recall_meets_its_bars_and_mixed_up_scores_miss_them(demo_model: Path) -> None:
    spec = RecallSpec(model=demo_model, n_prompts=3)
    records: list[Record] = []
    mixed_up: list[Record] = []
    with Engine(spec.engine(tiered=True)) as engine:
        for prompt in make_prompts(Harbor(), engine.vocab, WorkloadSpec(), spec.seeds):
            history = EngineHistory.read(engine, prompt.history)
            records += ask(history, prompt, shuffle=False)
            mixed_up += ask(history, prompt, shuffle=True)
    missed = [gate for gate in gates(summarise(records)) if not gate.passed]
    assert missed == []
    assert len(gates(summarise(mixed_up))) == 4
    recall_gates = [gate for gate in gates(summarise(mixed_up)) if gate.what == "gold recall"]
    assert not any(gate.passed for gate in recall_gates)


def test_the_demo_recalls_what_recency_has_lost(demo_model: Path) -> None:
    right = {r.name: r.n_right for r in run_demo(DemoSpec(model=demo_model, seed=0))}
    assert right["full cache"] >= 5
    assert right["kvmem"] >= 5
    assert right["newest blocks"] <= 2
