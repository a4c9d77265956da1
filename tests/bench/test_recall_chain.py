"""Questions in chains of tool calls: what they ask for stands where the chain says, and the forced
paths are the ones that are taken."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recall_chain import WHERE, write_chains
from recall_heldout import Outcome, Setting, ask_all, load
from recall_language import ADJECTIVES, NOUNS, is_held_out
from recall_paths import spread, whole_first

PLACE = re.compile(rf"\b({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)})\b")


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    return load(limit=4)


def test_the_fact_stands_where_the_chain_says(items: list[dict[str, Any]]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        for chain in write_chains(item, 3):
            seen[chain.where] += 1
            results = [step.result for step in chain.steps]
            assert 2 <= len(results) <= 4
            holding = [i for i, text in enumerate(results) if chain.told and chain.told in text]
            place = PLACE.search(chain.opening)
            assert place
            if chain.where == "before":
                assert not chain.told and chain.spans
            elif chain.where == "last":
                assert holding == [len(results) - 1] and not chain.spans
            elif chain.where == "between":
                assert len(holding) == 1 and holding[0] < len(results) - 1
            else:
                assert not chain.told and chain.spans and place[0] not in chain.question
                assert sum(place[0] in text for text in results) == 1
            # and each result has a look-alike
            for text in results:
                others = {found[0] for found in PLACE.finditer(text)} - {place[0]}
                assert others and all(map(is_held_out, others))
    assert set(seen) == set(WHERE) and min(seen.values()) > 10


def test_the_same_seed_writes_the_same_chains(items: list[dict[str, Any]]) -> None:
    first, again, other = (list(write_chains(items[0], 3, seed)) for seed in (0, 0, 1))
    assert first == again != other


def ask(setting: Setting) -> Outcome:
    """Two questions of a short conversation, at half of it."""
    outcome = Outcome()
    (conversation,) = load((1024,), 1)
    few = {**conversation, "questions": conversation["questions"][:2]}
    ask_all(few, replace(setting, divisor=2), outcome)
    return outcome


@pytest.mark.slow
def test_chains_are_answered_and_a_path_that_is_forced_is_taken() -> None:
    full = ask(Setting(policy="full", chain=3))
    assert full.recalled == 1
    assert set(full.decisions) == {"all_resident"}
    served = ask(Setting(policy="fused", chain=3))
    assert [answer.key for answer in served.answers] == [answer.key for answer in full.answers]
    assert served.recalled >= 0.8
    assert "query_replay" not in served.decisions
    for path, decision in (("legacy replay", "query_replay"), ("never kept", "cached_query")):
        assert set(ask(Setting(policy="fused", chain=3, path=path)).decisions) == {decision}
    skipped = ask(Setting(policy="fused", chain=3, path="no replay"))
    assert sum(answer.replayed_tokens for answer in skipped.answers) == 0
    assert any("replay_skipped" in answer.before for answer in skipped.answers)


@pytest.mark.slow
def test_several_facts_are_told_in_one_reply() -> None:
    assert ask(Setting(policy="full", together=True)).recalled == 1


def test_a_spread_is_even() -> None:
    assert spread(np.arange(10), 5).tolist() == [1, 3, 5, 7, 9]
    assert spread(np.arange(3), 5).tolist() == [0, 1, 2]
    assert spread(np.arange(3), 0).tolist() == []


def test_whole_messages_come_first_while_they_fit() -> None:
    values = np.array([0, 1, 9, 2, 5, 0, 3.0])
    messages = [range(0, 2), range(1, 4), range(4, 6), range(6, 9)]
    fixed = np.array([6])
    # the message of block 2 takes three, that of block 4 two; then the best of what is left
    assert whole_first(values, messages, fixed, 6)[:5] == [1, 2, 3, 4, 5]
    assert whole_first(values, messages, fixed, 4)[:3] == [1, 2, 3]
    assert whole_first(values, messages, fixed, 3)[:2] == [4, 5]
