"""A trained hybrid that answers from its attention cache alone: what is not visible is not known.

The questions are held out of its training. Bars stand below what was seen (docs/retrieval.md): the
quick ones on 15 questions, the slow ones on all 300.
"""

import pytest
from recall_heldout import Outcome, Setting, ask_all, load


def ask(
    policy: str,
    tokens: tuple[int, ...],
    limit: int | None = None,
    *,
    divisor: int = 4,
    block: int = 16,
) -> Outcome:
    """At a quarter of the history, in units of 16 tokens, unless said."""
    setting = Setting(policy=policy, divisor=divisor, block_tokens=block)
    outcome = Outcome()
    for conversation in load(tokens, limit):
        ask_all(conversation, setting, outcome)
    return outcome


def test_a_quarter_of_the_history_recalls_and_its_controls_do_not() -> None:
    """The bar of CI. Seen: all 12 answers and all 19 blocks; one answer may be lost."""
    found = {p: ask(p, (1024,), limit=3) for p in ("full", "fused", "recency", "shuffled")}
    assert found["full"].recalled == 1
    assert set(found["full"].decisions) == {"all_resident"}
    assert found["fused"].recalled >= 0.9
    assert found["fused"].gold_share >= 0.94
    assert found["fused"].decisions["query_replay"] > 0
    assert found["recency"].recalled <= 0.25
    # by chance 14 of 81 at this length: more than half of 12 would be no chance
    assert found["shuffled"].recalled <= 0.5


@pytest.mark.slow
def test_all_questions() -> None:
    """The goal on all of them, one voice and the controls on the shortest."""
    lengths = {
        **dict.fromkeys(("full", "fused"), (1024, 2048, 4096)),
        **dict.fromkeys(("heads", "recency", "shuffled"), (1024,)),
    }
    found = {policy: ask(policy, tokens) for policy, tokens in lengths.items()}
    assert all(
        sum(outcome.asked.values()) == 100 * len(lengths[policy])
        for policy, outcome in found.items()
    )
    right = {name: outcome.recalled for name, outcome in found.items()}
    assert right["full"] >= 0.94
    # the goal of this memory: 98 % of what the full cache answers, at first-pass Q; seen 98.3 %
    answered = [answer.is_right for answer in found["full"].told]
    kept = [a.is_right for a, is_ours in zip(found["fused"].told, answered, strict=True) if is_ours]
    assert sum(kept) / len(kept) >= 0.975
    assert found["fused"].gold_share >= 0.98
    assert right["heads"] >= 0.9  # seen .938
    assert right["recency"] <= 0.3
    assert right["shuffled"] <= 0.3
    # what was never told is not made up, whatever is visible
    assert all(outcome.right["none"] >= 0.9 * outcome.asked["none"] for outcome in found.values())


@pytest.mark.slow
def test_an_eighth_in_units_of_8() -> None:
    """The shortest histories, where an eighth has least room.

    Seen: 74 of 81 right and .947 of the tokens; 72 and .883 in units of 16.
    """
    found = ask("fused", (1024,), divisor=8, block=8)
    assert sum(answer.is_right for answer in found.told) >= 72
    assert sum(answer.recall for answer in found.told) / len(found.told) >= 0.93
