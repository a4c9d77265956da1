"""With room for the whole history, and with the memory off, kvmem is llama.cpp bit by bit.

The reference makes the same decode calls, as equality of floats is promised for those alone. The
tolerance is zero with and without `ordered`: while nothing leaves, the lowest free slot is also the
next one in position order, so attention sums in the same order as in a stock cache. It is zero on a
GPU too: there, heads of 32 have their attention on the CPU, over the scheduler's copy of the cache.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from devices import bound
from engines import Call, ask, foresee, make_config, random_tokens, record
from recall_heldout import MODEL, load
from stock import count_said, largest_difference, replay, stock_context
from timeline import differs_from_stock, effective

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.draft import Worth
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.llama.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("device")

ATTENTION = ["llama", "llama_64", "qwen2", "qwen3", "qwen3_64", "qwen3moe", "smollm3"]
HYBRID = ["qwen35", "qwen35_64", "qwen35moe"]
QUANTISED = ["q8_0", "q5_0", "q4_0"]
MIXED = [(k, v) for k in QUANTISED for v in QUANTISED if k != v]
KV_TYPES = [("f16", "f16"), *((name, name) for name in QUANTISED), ("q8_0", "q4_0")]


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


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
        assert largest_difference(calls, rows) == 0
        assert count_said(context, calls, rows) == 3 * 19


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


@pytest.mark.parametrize("types", [types for types in MIXED if types not in KV_TYPES], ids="-".join)
def test_every_mixed_pair_is_stock_llama(types: tuple[str, str], tiny_llama: Path) -> None:
    calls, _ = talk(tiny_llama, budget_tokens=1024, ordered=True, type_k=types[0], type_v=types[1])
    assert_same(tiny_llama, calls, types)


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
    path: Path, types: tuple[str, str], n_drafts: int, *, foresees: bool = False
) -> tuple[list[Call], int, int]:
    """The calls, how many drafts there were, and how many of them were accepted.

    The history only grows, save for the end of every fifth reply, which is dropped. foresees: an
    engine without drafts says each reply first, as random weights propose none that is right. Its
    steps round otherwise, so before each turn both go on from the same history.
    """
    settings: dict[str, Any] = {"budget_tokens": 2048, "type_k": types[0], "type_v": types[1]}
    with (
        record(path, n_drafts=n_drafts, **settings) as recorded,
        Engine(make_config(path, **settings)) as plain,
    ):
        ahead: list[int] = []
        if foresees:
            drafter = recorded.memory.drafter
            assert drafter is not None
            foresee(drafter, ahead)
        other = plain.session()
        history: tuple[int, ...] = ()
        n_drafted = n_accepted = 0
        for turn in range(30):
            history += random_tokens(25, seed=turn)
            if foresees:
                ahead[:] = [*history, *ask(other, history, max_tokens=10).tokens]
            reply = ask(recorded.session, history, max_tokens=10)
            assert reply.stats.memory.decision == "all_resident"
            n_drafted += reply.stats.draft_n
            n_accepted += reply.stats.draft_n_accepted
            history += reply.tokens[: 6 if turn % 5 == 4 else None]
            recorded.memory.check()
        return recorded.calls, n_drafted, n_accepted


ALL_KV_TYPES = [
    *KV_TYPES,
    ("f32", "f32"),
    *(pair for pair in product(("q8_0", "q5_0", "q4_0"), repeat=2) if pair not in KV_TYPES),
]
WITH_HEAD: list[tuple[str, dict[str, bool], int]] = [
    ("qwen35_mtp", {}, len(KV_TYPES)),
    ("qwen3next_mtp", {}, 1),
    ("qwen35_64", {}, 0),
    ("qwen35moe", {"mtp": True}, 0),
]
"""Kind, changes, and how many KV types are quick. The first has all pairs of types."""


@pytest.mark.part(kind=["qwen35_mtp"], types=[KV_TYPES[1]])
@pytest.mark.parametrize(
    ("kind", "changes", "types"),
    [
        pytest.param(
            kind, changes, types, marks=[] if i < n_quick else pytest.mark.slow,
            id="-".join((kind, *types)),
        )
        for kind, changes, n_quick in WITH_HEAD
        for i, types in enumerate(ALL_KV_TYPES if n_quick > 1 else KV_TYPES)
    ],
)  # fmt: skip
def test_30_turns_of_a_hybrid_are_stock_llama_with_drafts_and_without(
    kind: str, changes: dict[str, bool], types: tuple[str, str], tiny: Callable[..., Path]
) -> None:
    """Stock llama.cpp takes rejected drafts out of its own snapshots."""
    path = tiny(kind, **changes)
    settings: dict[str, Any] = {"type_k": types[0], "type_v": types[1]}
    calls, _, _ = talk_30_turns(path, types, 0)
    assert differs_from_stock(path, calls, **settings) == 0
    for foresees in (False, True):
        calls, n_drafted, n_accepted = talk_30_turns(path, types, 3, foresees=foresees)
        assert any(call.n_stays not in (None, len(call.tokens)) for call in effective(calls))
        assert not foresees or n_accepted > bound(cpu=150, gpu=50), f"of {n_drafted}"
        assert differs_from_stock(path, calls, n_drafts=3, **settings) == 0


@pytest.mark.parametrize("n_drafts", [0, 3])
def test_the_recall_model_is_stock_llama_and_answers(n_drafts: int) -> None:
    """Trained weights, whose head is mostly right. Each question goes back to the one before."""
    conversation = load((1024,), 1)[0]
    settings: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0"}
    n_right = n_accepted = 0
    with (
        record(MODEL, n_drafts=n_drafts, budget_tokens=2048, **settings) as recorded,
        ChatTemplate(recorded.engine.model) as template,
    ):
        renderer = ChatRenderer(template, recorded.engine.vocab)
        params = GenerateParams(sampling=SamplingParams(temperature=0.0), max_tokens=64)
        for question in conversation["questions"]:
            messages = [*conversation["messages"], {"role": "user", "content": question["text"]}]
            prompt = renderer.render(parse_chat_request({"messages": messages})).prompt
            *events, done = recorded.session.generate(prompt, params)
            assert isinstance(done, Done)
            assert done.stats.memory.decision == "all_resident"
            recorded.calls[:] = effective(recorded.calls)
            assert differs_from_stock(MODEL, recorded.calls, n_drafts=n_drafts, **settings) == 0
            said = b"".join(event.piece for event in events if isinstance(event, TokenEvent))
            n_right += said.decode() == question["answer"]
            n_accepted += done.stats.draft_n_accepted
    assert n_right >= 4
    assert n_accepted > 20 if n_drafts else n_accepted == 0
