"""The block ids that requests are given, where a naive choice would give others."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from engines import Recorded, ask, record
from handset import fact

BLOCK: Final = 32
SHORT: Final = " and the other thing" * 5
FILLER: Final = " and the other thing" * 12


def tokenizer(recorded: Recorded) -> Callable[[str], tuple[int, ...]]:
    return lambda text: tuple(recorded.engine.vocab.tokenize(text))


def said(recorded: Recorded, tokens: tuple[int, ...]) -> str:
    return recorded.engine.vocab.piece(tokens[0]).decode()


def place_of(history: tuple[int, ...], part: tuple[int, ...]) -> int:
    """The block of a token that the history has once."""
    (token,) = part
    assert history.count(token) == 1
    return history.index(token) // BLOCK


def test_an_old_long_answer_does_not_hide_a_new_document(handset: Path) -> None:
    """A reply longer than the budget, then a document as long: the question is about the latter."""
    with record(handset, budget_tokens=320, recent_tokens=32) as recorded:
        tokens = tokenizer(recorded)
        question = tokens("tell me [q1] now")
        history = tokens(fact(1, 6) + FILLER)
        span = (len(history), len(history) + len(question))
        history += question
        answered_from = len(history)
        history += ask(recorded.session, history, span=span, max_tokens=420).tokens
        answer = set(range(answered_from // BLOCK, len(history) // BLOCK + 1))
        assert len(answer) > 10  # more than the budget holds
        document = "".join(f"{fact(key, key + 5)}{FILLER}" for key in range(2, 10))
        history += tokens(document)
        assert len(tokens(document)) > 320
        span = (len(history), len(history) + len(tokens("tell me [q4]")))
        history += tokens("tell me [q4]")
        reply = ask(recorded.session, history, span=span, max_tokens=1)
        seen = set(reply.stats.memory.blocks)
        assert place_of(history, tokens(fact(4, 9))) in seen
        assert said(recorded, reply.tokens) == "[a9]"
        assert len(seen & answer) < len(seen) / 2


def test_facts_of_the_latest_tool_results_survive(handset: Path) -> None:
    """Each result of a long chain is whole in sight when the reply below it begins."""
    with record(handset, budget_tokens=320, recent_tokens=32) as recorded:
        tokens = tokenizer(recorded)
        history = tokens(f"{FILLER * 4} tell me what comes of it")
        span = (len(tokens(FILLER * 4)), len(history))
        for key in range(2, 8):
            history += ask(recorded.session, history, span=span, max_tokens=2).tokens
            start = len(history)
            history += tokens(f"{SHORT}{fact(key, key + 5)}{SHORT}")
            assert len(history) - start < 160  # half of the budget
            reply = ask(recorded.session, history, span=span, max_tokens=1)
            seen = set(reply.stats.memory.blocks)
            result = set(range(start // BLOCK, (len(history) - 1) // BLOCK + 1))
            assert result <= seen
            assert place_of(history, tokens(fact(key, key + 5))) in seen
        assert len(history) > 2 * 320
        assert not set(range(20)) <= seen  # what is older has had to leave


def test_a_new_question_after_an_old_one_gets_its_own_window(handset: Path) -> None:
    """What the first one wanted is not in the way: the blocks are those of a fresh session."""
    with record(handset, budget_tokens=160, recent_tokens=32) as recorded:
        tokens = tokenizer(recorded)
        facts = tokens("".join(f"{fact(key, key + 5)}{FILLER}" for key in range(10)))
        first = facts + tokens("tell me [q1]")
        reply = ask(recorded.session, first, span=(len(facts), len(first)), max_tokens=1)
        assert said(recorded, reply.tokens) == "[a6]"
        before = set(reply.stats.memory.blocks)
        wanted = place_of(first, tokens(fact(7, 12)))
        assert wanted not in before
        history = first + reply.tokens
        second = history + tokens("tell me [q7]")
        span = (len(history), len(second))
        reply = ask(recorded.session, second, span=span, max_tokens=1)
        seen = reply.stats.memory.blocks
        assert wanted in seen
        assert said(recorded, reply.tokens) == "[a12]"
        assert place_of(first, tokens(fact(1, 6))) not in seen
    with record(handset, budget_tokens=160, recent_tokens=32) as recorded:
        assert ask(recorded.session, second, span=span, max_tokens=1).stats.memory.blocks == seen
