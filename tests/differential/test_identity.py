"""With room for the whole history, and with the memory off, kvmem is llama.cpp bit by bit.

The reference makes the same decode calls, as equality of floats is promised for those alone. The
tolerance is zero with and without `ordered`: while nothing leaves, the lowest free slot is also the
next one in position order, so attention sums in the same order as in a stock cache. It is zero on a
GPU too: there, heads of 32 have their attention on the CPU, over the scheduler's copy of the cache.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Call, ask, foresee, random_tokens, record
from stock import largest_difference, replay, stock_context
from timeline import differs_from_stock, effective

from kvmem.llama.vocab import Vocab

pytestmark = pytest.mark.usefixtures("device")

ATTENTION = ["llama", "llama_64", "qwen2", "qwen3", "qwen3_64", "qwen3moe", "smollm3"]
HYBRID = ["qwen35", "qwen35_64", "qwen35moe"]
KV_TYPES = [
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
]


def talk(path: Path, **memory: object) -> tuple[list[Call], list[str]]:
    """Three turns with prompts longer than a batch: the calls and the decisions."""
    decisions: list[str] = []
    with record(path, **memory) as recorded:
        history: tuple[int, ...] = ()
        n_read = 0
        for turn, n_tokens in enumerate((210, 150, 40)):
            history += random_tokens(n_tokens, seed=turn)
            reply = ask(recorded.session, history, max_tokens=20)
            assert reply.stats.cached_tokens == n_read
            n_read = len(history) + 19  # the last token of a reply is not decoded
            history += reply.tokens
            decisions.append(reply.stats.memory.decision)
        return recorded.calls, decisions


def assert_same(
    path: Path, calls: list[Call], types: tuple[str, str], flash_attn: str = "on"
) -> None:
    """Equal logits, and every token of the replies is the largest logit of the reference."""
    with stock_context(path, type_k=types[0], type_v=types[1], flash_attn=flash_attn) as context:
        rows = replay(context, calls)
        vocab = Vocab(context.model)
        ends = [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]
    assert largest_difference(calls, rows) == 0
    n_said = 0
    for row, call in zip(rows, calls[1:], strict=False):
        if len(call.tokens) == 1:
            assert row is not None
            row[ends] = -np.inf  # the replies were asked for without end tokens
            assert call.tokens[0] == row.argmax()
            n_said += 1
    assert n_said == 3 * 19


@pytest.mark.part(kind=["llama", "llama_64", "qwen35_64"])
@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("kind", ATTENTION + HYBRID)
def test_budget_over_history_is_stock_llama(
    kind: str, types: tuple[str, str], tiny: Callable[..., Path]
) -> None:
    path = tiny(kind)
    calls, decisions = talk(
        path, budget_tokens=1024, ordered=True, type_k=types[0], type_v=types[1]
    )
    assert decisions == ["all_resident"] * 3
    assert_same(path, calls, types)


@pytest.mark.parametrize("types", [*KV_TYPES[:2], ("f32", "f32")], ids="-".join)
def test_placement_by_lowest_slot_is_stock_llama_too(
    types: tuple[str, str], tiny_llama: Path
) -> None:
    calls, _ = talk(tiny_llama, budget_tokens=1024, type_k=types[0], type_v=types[1])
    assert_same(tiny_llama, calls, types)


@pytest.mark.parametrize("kind", ["llama", "qwen3_64", "gemma3", "qwen35"])
def test_memory_off_is_stock_llama(kind: str, tiny: Callable[..., Path]) -> None:
    path = tiny(kind)
    calls, decisions = talk(path, enabled=False, type_k="f16", type_v="f16")
    assert decisions == ["off"] * 3
    assert_same(path, calls, ("f16", "f16"), flash_attn="auto")


def test_the_comparison_sees_one_wrong_token(tiny_llama: Path) -> None:
    calls, _ = talk(tiny_llama, budget_tokens=1024, type_k="f16", type_v="f16")
    calls[0].tokens[3] ^= 1
    with stock_context(tiny_llama) as context:
        assert largest_difference(calls, replay(context, calls)) > 0.1


def talk_30_turns(
    path: Path, types: tuple[str, str], n_drafts: int, ahead: Sequence[int] = ()
) -> tuple[list[Call], list[int], int]:
    """The calls, the history with its replies, and how many drafts were accepted.

    The history only grows, save for the end of every fifth reply, which is dropped. ahead: what the
    drafts propose.
    """
    settings = {"budget_tokens": 2048, "n_drafts": n_drafts}
    with record(path, **settings, type_k=types[0], type_v=types[1]) as recorded:
        if ahead:
            drafter = recorded.memory.drafter
            assert drafter is not None
            foresee(drafter, ahead)
        history: tuple[int, ...] = ()
        n_accepted = 0
        for turn in range(30):
            history += random_tokens(25, seed=turn)
            reply = ask(recorded.session, history, max_tokens=10)
            assert reply.stats.memory.decision == "all_resident"
            n_accepted += reply.stats.draft_n_accepted
            history += reply.tokens[: 6 if turn % 5 == 4 else None]
            recorded.memory.check()
        return recorded.calls, list(history), n_accepted


WITH_HEAD: list[tuple[str, dict[str, bool], int]] = [
    ("qwen35_mtp", {}, len(KV_TYPES)),
    ("qwen3next_mtp", {}, 1),
    ("qwen35_64", {}, 0),
    ("qwen35moe", {"mtp": True}, 0),
]
"""Kind, changes, and of how many KV types the quick tests try it."""


@pytest.mark.part(kind=["qwen35_mtp"], types=[KV_TYPES[1]])
@pytest.mark.parametrize(
    ("kind", "changes", "types"),
    [
        pytest.param(
            kind, changes, types, marks=[] if i < n_quick else pytest.mark.slow,
            id="-".join((kind, *types)),
        )
        for kind, changes, n_quick in WITH_HEAD
        for i, types in enumerate(KV_TYPES)
    ],
)  # fmt: skip
def test_30_turns_of_a_hybrid_are_stock_llama_with_drafts_and_without(
    kind: str, changes: dict[str, bool], types: tuple[str, str], tiny: Callable[..., Path]
) -> None:
    """Stock llama.cpp takes rejected drafts out of its own snapshots."""
    path = tiny(kind, **changes)
    calls, said, _ = talk_30_turns(path, types, 0)
    settings: dict[str, Any] = {"type_k": types[0], "type_v": types[1]}
    assert differs_from_stock(path, calls, **settings) == 0
    for ahead in ((), said):
        calls, _, n_accepted = talk_30_turns(path, types, 3, ahead)
        assert any(call.n_stays not in (None, len(call.tokens)) for call in effective(calls))
        assert n_accepted > 50 or not ahead
        assert differs_from_stock(path, calls, n_drafts=3, **settings) == 0
