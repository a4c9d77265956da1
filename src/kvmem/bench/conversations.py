"""Conversations of one's own as prompts: one JSON object a line, with token spans of the evidence.

The format is that of bench/recall_model/heldout.jsonl: `messages` and `questions`; a question has
`text`, `answer`, `kind`, and in `spans` the token ranges [start, stop) of its evidence in the
rendered history. `n_tokens` is the length of that history, so it holds for one vocabulary.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvmem.bench.workload import Prompt, Question
from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.prompt import Span
from kvmem.errors import ConfigError
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

__all__ = ["UNTOLD", "read_conversations"]

UNTOLD: Final = "none"
"""The kind of a question about what was never told: it has no evidence."""


def read_conversations(
    path: Path, model: Model, vocab: Vocab, lengths: range | None = None
) -> Iterator[Prompt]:
    """One prompt for each line, rendered with the model's chat template.

    lengths: only histories of so many tokens. Raises ConfigError with the line that is not of the
    format, or not of this vocabulary.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("questions", path, f"a readable file ({error.strerror})") from None
    with ChatTemplate(model) as template:
        renderer = ChatRenderer(template, vocab)
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                if lengths is not None and int(item["n_tokens"]) not in lengths:
                    continue
                asked = [_render(renderer, item, question) for question in item["questions"]]
                prompt = _prompt(item, asked, vocab, number)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    "questions",
                    f"{path}, line {number}",
                    f"a conversation for this model ({type(error).__name__}: {error})",
                ) from None
            yield prompt


def _render(
    renderer: ChatRenderer, item: dict[str, Any], question: dict[str, Any]
) -> tuple[tuple[int, ...], Span]:
    messages = [*item["messages"], {"role": "user", "content": question["text"]}]
    prompt = renderer.render(parse_chat_request({"messages": messages})).prompt
    if prompt.query_span is None:
        raise ValueError(f"the question cannot be found in its prompt: {prompt.query_fallback}")
    return tuple(prompt.tokens), prompt.query_span


def _prompt(
    item: dict[str, Any],
    asked: Sequence[tuple[tuple[int, ...], Span]],
    vocab: Vocab,
    number: int,
) -> Prompt:
    n_tokens = int(item["n_tokens"])
    if not asked:
        raise ValueError("no questions")
    history = asked[0][0][:n_tokens]
    questions = []
    for question, (tokens, span) in zip(item["questions"], asked, strict=True):
        if tokens[:n_tokens] != history or span.start < n_tokens:
            raise ValueError(f"n_tokens={n_tokens} is not where the last user message begins")
        gold = tuple(Span(start, stop) for start, stop in question["spans"])
        if any(part.stop > n_tokens for part in gold):
            raise ValueError("a span ends behind the history")
        questions.append(
            Question(
                kind=question["kind"],
                text=question["text"],
                value_text=question["answer"],
                tokens=tokens[n_tokens:],
                content=Span(span.start - n_tokens, span.stop - n_tokens),
                prefix=(),
                value=tuple(vocab.tokenize(question["answer"], parse_special=False)),
                gold=gold,
                shares_word=True,
            )
        )
    name = str(item.get("target_tokens", "conversation"))
    return Prompt(generator=name, seed=number, history=history, questions=tuple(questions))
