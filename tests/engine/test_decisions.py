"""How the working set of a request is found: each way, forced, with the reason that is given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import ask, random_tokens, record

from kvmem.engine.checkpoint import Checkpoints
from kvmem.engine.events import Done
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams

SPAN = (670, 695)
LONG = random_tokens(700, seed=1)


def test_off(tiny_llama: Path) -> None:
    with record(tiny_llama, enabled=False, type_k="f16", type_v="f16") as recorded:
        memory = ask(recorded.session, LONG, span=SPAN).stats.memory
    assert (memory.decision, memory.blocks, memory.n_blocks) == ("off", [], 0)
    assert memory.read_tokens == 700


def test_all_resident(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        memory = ask(recorded.session, LONG[:256], span=(200, 220)).stats.memory
        assert (memory.decision, memory.reason) == (
            "all_resident",
            "the whole history fits in the budget",
        )
        assert memory.blocks == list(range(8))
        assert (memory.read_tokens, memory.replayed_tokens, memory.blocks_in) == (256, 0, 0)
        memory = ask(recorded.session, LONG[:257], span=(200, 220)).stats.memory
        assert memory.decision != "all_resident"  # one token more than the budget


def test_all_resident_brings_back_what_had_left(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        ask(recorded.session, LONG, span=SPAN)
        memory = ask(recorded.session, LONG[:200], span=(150, 190)).stats.memory
        assert memory.decision == "all_resident"
        assert memory.blocks == list(range(7))
        assert memory.blocks_in > 0
        assert memory.reused_tokens == 199


def test_recency_reads_no_query(tiny_llama: Path) -> None:
    with record(tiny_llama, scorer="recency") as recorded:
        memory = ask(recorded.session, LONG, span=SPAN).stats.memory
        assert (memory.decision, memory.reason, memory.scorer) == (
            "recency",
            "the scorer that was asked for",
            "recency",
        )
        assert memory.blocks == [0, *range(22 - 7, 22)]
        assert (memory.replayed_tokens, memory.times.query_s, memory.times.score_s) == (0, 0, 0)


def test_query_replay(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        memory = ask(recorded.session, LONG, span=SPAN).stats.memory
        assert (memory.decision, memory.reason) == ("query_replay", "query: the last user message")
        assert (memory.read_tokens, memory.replayed_tokens) == (700, 30)
        # the two last passes read the same tokens, and saw different blocks
        first, second = (call for call in recorded.calls if call.start == 670)
        np.testing.assert_array_equal(first.tokens, second.tokens)
        assert first.visible != second.visible
        # the reply sees what was chosen, and the block that the question filled
        assert second.visible is not None
        assert [*second.visible, 21] == memory.blocks
        assert len(memory.blocks) == 8
        assert memory.n_blocks == 22
        assert memory.blocks_in == len(set(second.visible) - set(first.visible or ()))


def test_unchanged_selection(tiny_llama: Path) -> None:
    # nothing is left to choose where the recent blocks fill the budget: all were in sight
    with record(tiny_llama, recent_tokens=192) as recorded:
        memory = ask(recorded.session, LONG, span=SPAN).stats.memory
        assert memory.decision == "unchanged_selection"
        assert memory.reason.startswith("the first pass had seen the chosen blocks")
        assert (memory.replayed_tokens, memory.blocks_in) == (0, 0)
        assert sum(call.start == 670 for call in recorded.calls) == 1


def test_cached_query_below_the_same_question(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        reply = ask(recorded.session, LONG, span=SPAN)
        n_calls = len(recorded.calls)
        more = LONG + reply.tokens + random_tokens(80, seed=2)
        memory = ask(recorded.session, more, span=SPAN).stats.memory
        assert memory.decision == "cached_query"
        assert memory.replayed_tokens == 0
        assert memory.times.query_s == 0
        assert memory.reused_tokens == len(LONG) + len(reply.tokens) - 1
        starts = [call.start for call in recorded.calls[n_calls:]]
        assert starts == sorted(set(starts))  # nothing was read twice


def test_a_question_of_another_history_is_not_taken_for_this_one(tiny_llama: Path) -> None:
    # two histories with their questions at the same place; the second is read while it still fits
    with record(tiny_llama, budget_tokens=256) as recorded:
        span = (200, 230)
        ask(recorded.session, random_tokens(300, seed=1), span=span)
        other = random_tokens(240, seed=2)
        fits = ask(recorded.session, other, span=span)
        assert fits.stats.memory.decision == "all_resident"
        grown = other + fits.tokens + random_tokens(100, seed=3)
        memory = ask(recorded.session, grown, span=span).stats.memory
        assert memory.decision == "cached_query"  # by its own question, read while it fitted
    with record(tiny_llama, budget_tokens=256) as recorded:
        ask(recorded.session, other, span=span)
        assert ask(recorded.session, grown, span=span).stats.memory.blocks == memory.blocks


def test_a_changed_question_at_the_same_place_is_read(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        ask(recorded.session, LONG, span=SPAN)
        changed = LONG[:680] + random_tokens(20, seed=9)
        memory = ask(recorded.session, changed, span=SPAN).stats.memory
        assert memory.decision in ("query_replay", "unchanged_selection")
        assert memory.read_tokens == 20


def test_without_a_marked_question_the_end_is_asked_and_said(tiny_llama: Path) -> None:
    with record(tiny_llama, recent_tokens=0) as recorded:
        memory = ask(recorded.session, LONG).stats.memory
        assert memory.reason == "query: the last 64 tokens (no question is marked)"


def test_an_empty_question_is_none(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        memory = ask(recorded.session, LONG, span=(690, 690)).stats.memory
        assert memory.reason.endswith("query: the last 64 tokens (the question is empty)")


def test_a_question_that_was_read_without_its_q_is_said_to_be_out_of_reach(
    tiny_llama: Path,
) -> None:
    with record(tiny_llama, recent_tokens=0) as recorded:
        recorded.session.read(LONG[:600])
        memory = ask(recorded.session, LONG, span=(10, 40)).stats.memory
        assert memory.reason == (
            "query: the last 64 tokens (the question is no longer in the part that is read)"
        )


def test_a_question_far_before_the_end_chooses_on_the_way(tiny_llama: Path) -> None:
    with record(tiny_llama, recent_tokens=0) as recorded:
        memory = ask(recorded.session, LONG, span=(10, 40)).stats.memory
        assert memory.decision == "early_query"
        assert (memory.read_tokens, memory.replayed_tokens) == (700, 0)
        starts = [call.start for call in recorded.calls]
        assert starts == sorted(set(starts))
        # the same question, had it been read before
        recorded.session.truncate(0)
        recorded.session.read(LONG[:10])
        query = recorded.session.query(LONG[10:40], range(30))
        recorded.session.read(LONG[10 : 700 - 128])
        chosen = recorded.session.select(recorded.session.score(query, "fused"), budget_blocks=4)
        assert [*chosen.tolist(), 18, 19, 20, 21] == memory.blocks


def test_a_hybrid_replays_from_the_checkpoint_before_the_question(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35) as recorded:
        memory = ask(recorded.session, LONG, span=SPAN).stats.memory
        assert (memory.decision, memory.reason) == ("query_replay", "query: the last user message")
        assert (memory.read_tokens, memory.replayed_tokens) == (700, 25)
        assert [call.start for call in recorded.calls].count(670) == 2
        assert 670 in recorded.memory.checkpoints.positions
        recorded.memory.check()


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_hybrid_saves_no_state_in_vain(
    is_replayed: bool, tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What opens the reply is read when it is clear what it sees, and the state before it saved."""
    saved: list[int] = []

    def save(memory: Checkpoints, n_tokens: int, *, is_needed: bool = False) -> bool:
        is_new = n_tokens not in memory.positions
        saved.extend([n_tokens] * is_new)
        return kept(memory, n_tokens, is_needed=is_needed)

    kept = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    question = Span(670, 690)
    prompt = Prompt(tokens=LONG, spans=(RoleSpan("user", question),), query_span=question)
    # with recent blocks that fill the budget, all that is chosen was in sight
    with record(tiny_qwen35, recent_tokens=32 if is_replayed else 192) as recorded:
        for event in recorded.session.generate(prompt, GenerateParams(max_tokens=4)):
            done = event
        assert isinstance(done, Done)
        memory = done.stats.memory
        assert memory.decision == ("query_replay" if is_replayed else "unchanged_selection")
        assert (memory.read_tokens, memory.replayed_tokens) == (700, 20 * is_replayed)
        starts = [call.start for call in recorded.calls]
        assert (starts.count(670), starts.count(690)) == (1 + is_replayed, 1)
        assert saved.count(690) == 1
        assert len(saved) == len(set(saved))
        assert {670, 690} <= set(memory.checkpoints)
        recorded.memory.check()


@pytest.mark.parametrize("scorer", ["fused", "heads", "lexical", "mass", "cosine"])
def test_the_scorer_that_was_asked_for_is_the_one_that_runs(scorer: str, tiny_llama: Path) -> None:
    with record(tiny_llama, scorer=scorer) as recorded:
        session = recorded.session
        memory = ask(session, LONG, span=SPAN, max_tokens=0).stats.memory
        assert memory.scorer == scorer
        # the same choice by hand: history up to the question, the question's Q, the scorer
        session.truncate(0)
        session.read(LONG[:670])
        query = session.query(LONG[670:], range(25))
        scores = session.score(query, scorer)
        assert scores.scorer == scorer
        chosen = session.select(scores, budget_blocks=7)
        assert [*chosen.tolist(), 21] == memory.blocks


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_query_and_logits_keep_nothing(kind: str, tiny: Callable[..., Path]) -> None:
    with record(tiny(kind)) as recorded:
        session = recorded.session
        session.read(LONG)
        before = recorded.memory.working_set.resident().tolist()
        session.query(LONG[:90], range(90))
        assert session.n_tokens == 700
        assert recorded.memory.working_set.resident().tolist() == before
        rows = session.logits(LONG[:40], 3)
        assert rows.shape == (3, recorded.memory.context.n_vocab)
        np.testing.assert_array_equal(session.logits(LONG[:40], 3), rows)
        assert session.n_tokens == 700
        recorded.memory.check()


@pytest.mark.parametrize("n_tokens", [700, 704, 705])
@pytest.mark.parametrize("span", [None, SPAN])
@pytest.mark.parametrize("scorer", ["fused", "recency"])
def test_the_same_prompt_again_sees_the_same_blocks(
    scorer: str, span: tuple[int, int] | None, n_tokens: int, tiny_llama: Path
) -> None:
    prompt = random_tokens(n_tokens, seed=1)
    with record(tiny_llama, scorer=scorer) as recorded:
        first = ask(recorded.session, prompt, span=span, max_tokens=150)
        again = ask(recorded.session, prompt, span=span, max_tokens=150)
        assert again.stats.memory.blocks == first.stats.memory.blocks
        assert again.stats.cached_tokens == n_tokens - 1
        assert again.stats.memory.reason == "the prompt before, once more: its selection stands"
        assert again.tokens == first.tokens
