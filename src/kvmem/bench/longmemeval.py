"""LongMemEval's public JSON as prompts: its sessions in order, its evidence as gold.

Source: Wu et al., LongMemEval (2024), and the README of its data: `haystack_sessions` with their
`haystack_dates` and `haystack_session_ids`, `answer_session_ids`, and `has_answer` on the turns
that hold the evidence; `question_id` ends in `_abs` where the answer is that nothing was said.
Nothing is judged: what is measured is whether the evidence is visible.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvmem.bench.workload import Prompt, Question, Tokenizer, frame_for
from kvmem.engine.prompt import Span
from kvmem.errors import ConfigError

__all__ = ["read_longmemeval"]

ABSTENTION: Final = "_abs"


def read_longmemeval(
    path: Path, tokenizer: Tokenizer, lengths: range | None = None
) -> Iterator[Prompt]:
    """One prompt and one question for each item that has evidence; abstentions have none.

    Gold are the turns that are marked, or else the whole sessions that the answer is from. Sessions
    stand by date, whatever their order in the file.
    lengths: only histories of so many tokens; no longer one is tokenized to its end.
    Raises ConfigError with the item that is not of the format.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("questions", path, f"a readable JSON file ({error})") from None
    if not isinstance(items, list):
        raise ConfigError("questions", path, "LongMemEval's list of items")
    for number, item in enumerate(items):
        try:
            prompt = _prompt(item, tokenizer, number, lengths)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "questions",
                f"{path}, item {number}",
                f"an item of LongMemEval ({type(error).__name__}: {error})",
            ) from None
        if prompt is not None:
            yield prompt


def _prompt(
    item: dict[str, Any], tokenizer: Tokenizer, number: int, lengths: range | None
) -> Prompt | None:
    """None where there is no evidence, or the history has another length."""
    if str(item["question_id"]).endswith(ABSTENTION):
        return None
    frame = frame_for(tokenizer)
    tokens: list[int] = []
    marked: list[Span] = []
    sessions: list[Span] = []

    def add(text: str) -> None:
        tokens.extend(int(token) for token in tokenizer.tokenize(text, parse_special=True))

    def say(text: str) -> list[int]:
        """Text of the data: what looks like a mark of the template is none."""
        return [int(token) for token in tokenizer.tokenize(text, parse_special=False)]

    wanted = set(item["answer_session_ids"])
    told = zip(
        item["haystack_session_ids"], item["haystack_dates"], item["haystack_sessions"], strict=True
    )
    # 2023/05/20 (Sat) 02:21: in the order of the alphabet
    for name, date, turns in sorted(told, key=lambda session: str(session[1])):
        begin = len(tokens)
        for index, turn in enumerate(turns):
            start = len(tokens)
            add(frame.open(turn["role"]))
            tokens += say((f"[{date}]\n" if index == 0 else "") + turn["content"])
            add(frame.closed)
            if lengths is not None and len(tokens) >= lengths.stop:
                return None
            if turn.get("has_answer"):
                marked.append(Span(start, len(tokens)))
        if name in wanted:
            sessions.append(Span(begin, len(tokens)))
    gold = tuple(marked or sessions)
    if not gold or (lengths is not None and len(tokens) not in lengths):
        return None
    opening = tokenizer.tokenize(frame.open("user"), parse_special=True)
    asked = say(f"[{item['question_date']}]\n{item['question']}")
    closing = tokenizer.tokenize(frame.closed + frame.open("assistant"), parse_special=True)
    answer = str(item["answer"])
    question = Question(
        kind=str(item["question_type"]),
        text=item["question"],
        value_text=answer,
        tokens=(*opening, *asked, *closing),
        content=Span(len(opening), len(opening) + len(asked)),
        prefix=(),
        value=tuple(say(answer)),
        gold=gold,
        sessions=tuple(sessions),
        shares_word=True,
    )
    return Prompt(
        generator="longmemeval", seed=number, history=tuple(tokens), questions=(question,)
    )
