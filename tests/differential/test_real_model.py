"""The two oracles on a model that was trained: SmolLM2, 30 layers, Q4_1 weights."""

from pathlib import Path

import numpy as np
import pytest
from engines import Call, ask, record
from numpy.typing import NDArray
from stock import count_said, largest_difference, replay, replay_masked, stock_context

pytestmark = pytest.mark.slow

BLOCK = 32
KV_TYPES = [
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
]


def words(n: int, seed: int) -> tuple[int, ...]:
    """Ordinary tokens of its vocabulary, without specials and rare ends."""
    return tuple(np.random.default_rng(seed).integers(1000, 20000, n).tolist())


@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
def test_budget_over_history_is_stock_llama(types: tuple[str, str], demo_model: Path) -> None:
    type_k, type_v = types
    with record(
        demo_model, ordered=True, budget_tokens=1024, type_k=type_k, type_v=type_v
    ) as recorded:
        history: tuple[int, ...] = ()
        for turn, n_tokens in enumerate((250, 100, 30)):
            history += words(n_tokens, turn)
            history += ask(recorded.session, history, max_tokens=10).tokens
        calls = recorded.calls.copy()
    with stock_context(demo_model, type_k=type_k, type_v=type_v) as context:
        rows = replay(context, calls)
        assert largest_difference(calls, rows) == 0
        assert count_said(context, calls, rows) == 3 * 9


def differences(calls: list[Call], path: Path, kv_type: str) -> NDArray[np.float64]:
    with stock_context(path, n_seq_max=2, type_k=kv_type, type_v=kv_type) as context:
        rows = replay_masked(context, calls, BLOCK)
    return np.array(
        [
            np.abs(call.logits - row).max()
            for call, row in zip(calls, rows, strict=True)
            if call.logits is not None and row is not None
        ]
    )


def test_a_small_budget_sees_its_blocks_and_no_others(demo_model: Path) -> None:
    """30 layers and rounded activations make much of another order of summation: in F16, stock
    llama.cpp itself differs by 0.5 when a history begins 7 cells later. So the types are those
    whose sums do not depend on it, and the control is a run with one block exchanged."""
    with record(demo_model, ordered=True, type_k="q8_0", type_v="q8_0") as recorded:
        first = words(400, 1)
        reply = ask(recorded.session, first, span=(370, 395), max_tokens=40)
        assert reply.stats.memory.decision == "query_replay"
        ask(recorded.session, first + reply.tokens + words(60, 2), span=(450, 490), max_tokens=10)
        recorded.memory.check()
        calls = recorded.calls.copy()
    right = differences(calls, demo_model, "q8_0")
    for call in calls:
        shown = list(call.visible or ())
        hidden = [block for block in range(1, call.start // BLOCK) if block not in shown]
        if hidden and len(shown) > 2:
            call.visible = tuple(sorted({*shown, hidden[0]} - {shown[1]}))
    wrong = differences(calls, demo_model, "q8_0")
    assert right.max() < 0.1 * np.median(wrong)
