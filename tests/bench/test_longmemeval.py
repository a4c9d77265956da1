"""LongMemEval's format: order, evidence, and what is not of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from words import Words

from kvmem.bench.longmemeval import read_longmemeval
from kvmem.errors import ConfigError


def item(**fields: Any) -> dict[str, Any]:
    return {
        "question_id": "q1",
        "question_type": "single-session-user",
        "question": "Where did I leave the red bicycle?",
        "answer": "behind the bakery",
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_dates": ["2023/05/01 (Mon) 09:00", "2023/05/20 (Sat) 12:00"],
        "haystack_session_ids": ["s1", "answer_s2"],
        "haystack_sessions": [
            [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}],
            [
                {"role": "user", "content": "I left the red bicycle behind the bakery."},
                {"role": "assistant", "content": "Noted."},
            ],
        ],
        "answer_session_ids": ["answer_s2"],
        **fields,
    }


def write(folder: Path, items: object) -> Path:
    path = folder / "longmemeval.json"
    path.write_text(json.dumps(items))
    return path


def test_sessions_stand_in_order_and_those_of_the_answer_are_gold(tmp_path: Path) -> None:
    words = Words()
    (prompt,) = read_longmemeval(write(tmp_path, [item()]), words)
    text = words.text(prompt.history)
    assert text.index("2023/05/01") < text.index("Hello.") < text.index("2023/05/20")
    (question,) = prompt.questions
    (span,) = question.gold
    gold = words.text(prompt.history[span.start : span.stop])
    assert "[2023/05/20 (Sat) 12:00]" in gold and "bakery" in gold and "Noted." in gold
    assert "Hello." not in gold
    assert question.sessions == question.gold
    asked = words.text(question.tokens[question.content.start : question.content.stop])
    assert asked == "[2023/06/01 (Thu) 10:00]\nWhere did I leave the red bicycle?"
    assert words.text(question.value) == question.value_text == "behind the bakery"


def test_marked_turns_are_the_evidence_where_there_are_any(tmp_path: Path) -> None:
    words = Words()
    marked = item()
    marked["haystack_sessions"][1][0]["has_answer"] = True
    (prompt,) = read_longmemeval(write(tmp_path, [marked]), words)
    (span,) = prompt.questions[0].gold
    gold = words.text(prompt.history[span.start : span.stop])
    assert "bakery" in gold and "Noted." not in gold


def test_questions_without_evidence_are_left_out(tmp_path: Path) -> None:
    """Abstentions name the sessions that their trap is from."""
    path = write(tmp_path, [item(answer_session_ids=[]), item(question_id="q2_abs"), item()])
    (prompt,) = read_longmemeval(path, Words())
    assert prompt.seed == 2


def test_sessions_stand_by_date_whatever_their_order(tmp_path: Path) -> None:
    backwards = {
        name: item()[name][::-1]
        for name in ("haystack_dates", "haystack_session_ids", "haystack_sessions")
    }
    words = Words()
    in_order, sorted_by_date = read_longmemeval(write(tmp_path, [item(), item(**backwards)]), words)
    assert sorted_by_date.history == in_order.history
    assert sorted_by_date.questions == in_order.questions


def test_only_histories_of_the_lengths_asked_for_are_read_to_their_end(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "On and on. " * 500}]
    long = item(haystack_sessions=[talk, item()["haystack_sessions"][1]])
    path = write(tmp_path, [item(), long, item()])
    words = Words()
    n_short, n_long, _ = (len(prompt.history) for prompt in read_longmemeval(path, words))
    seeds = [p.seed for p in read_longmemeval(path, words, range(n_short, n_short + 1))]
    assert seeds == [0, 2]
    assert [p.seed for p in read_longmemeval(path, words, range(n_short + 1, n_long + 1))] == [1]

    class Counting(Words):
        n_tokens = 0

        def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
            found = super().tokenize(text, parse_special=parse_special)
            self.n_tokens += len(found)
            return found

    counting = Counting()
    longer = item(haystack_sessions=[talk * 50, item()["haystack_sessions"][1]])
    assert not list(read_longmemeval(write(tmp_path, [longer]), counting, range(1, n_short)))
    assert counting.n_tokens < n_long


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ({"data": []}, "list of items"),
        ([item(haystack_dates=[])], "item 0"),
        ([item(), {"question": "?"}], "item 1"),
    ],
)
def test_another_format_is_named(items: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        list(read_longmemeval(write(tmp_path, items), Words()))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="readable JSON"):
        list(read_longmemeval(path, Words()))
