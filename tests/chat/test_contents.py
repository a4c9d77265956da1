"""A prompt that goes on one before: contents are where a renderer that knows nothing finds them."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_vocab

from kvmem.chat.contents import ContentFinder
from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.prompt import Prompt
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

Message = dict[str, Any]

BACKWARDS = "{%- for m in messages[::-1] %}({{ m.role }}: {{ m.content }}){%- endfor %}"
TRIMMING = "{%- for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/]\n{%- endfor %}"
NUMBERED = "{%- for m in messages %}{{ loop.index }}. {{ m.content }}\n{%- endfor %}"
COUNTED = "{{ messages | length }}{%- for m in messages %}<|im_start|>{{ m.content }}{%- endfor %}"
USER_FIRST = (
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if loop.first and m.role != 'user' %}{{ raise_exception('a user begins') }}{%- endif %}"
    "<|im_start|>{{ m.role + '\n' + (m.content or '') }}<|im_end|>{%- endfor %}"
)
SHORTENED = (
    "{%- for m in messages %}<|im_start|>"
    "{{ m.content if loop.last else (m.content or '')[:300] }}<|im_end|>{%- endfor %}"
)
TEMPLATES = {
    "chatml": tiny_vocab.CHATML,
    "tools": tiny_vocab.CHATML_TOOLS,
    "json": tiny_vocab.CHATML_JSON,
    "trimming": TRIMMING,
    "backwards": BACKWARDS,
    "numbered": NUMBERED,
    "counted": COUNTED,
    "user first": USER_FIRST,
    "shortened": SHORTENED,
}


class CountingTemplate:
    """A template that notes how much it is given to render for its prompt alone."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.rendered: list[int] = []

    def info(self) -> dict[str, Any]:
        return self._template.info()

    def render(self, request: dict[str, Any]) -> dict[str, Any]:
        self.rendered.append(len(request["messages"]))
        return self._template.render(request)


def said(rng: random.Random, *, long: bool) -> str:
    words = ["the", "harbour", "is", "open", "\n", "  ", "<|im_end|>", "é", "</think>", "user"]
    return " ".join(rng.choices(words, k=rng.randrange(120, 200) if long else rng.randrange(1, 8)))


def conversation(rng: random.Random) -> Iterator[list[Message]]:
    """One that grows as an agent's does; now and then something before its end is changed."""
    messages: list[Message] = [{"role": "system", "content": said(rng, long=False)}]
    for turn in range(14):
        if turn == 0 or rng.random() < 0.4:
            messages.append({"role": "user", "content": said(rng, long=rng.random() < 0.5)})
        else:
            messages.append({"role": "tool", "content": said(rng, long=rng.random() < 0.7)})
        if rng.random() < 0.2:
            i = rng.randrange(len(messages))
            messages[i] = {**messages[i], "content": said(rng, long=True)}
        yield list(messages)
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        reply: Message = {"role": "assistant", "content": said(rng, long=rng.random() < 0.5)}
        if rng.random() < 0.3:
            reply["tool_calls"] = [call]
        if rng.random() < 0.3:
            reply["reasoning_content"] = said(rng, long=False)
        messages.append(reply)


def spans(prompt: Prompt) -> tuple[object, ...]:
    return prompt.spans, prompt.query_span, prompt.query_fallback


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_contents_are_where_they_are_found_without_memory(vocab: Vocab, name: str) -> None:
    n_found = 0
    with ChatTemplate(None, TEMPLATES[name]) as template:
        renderer = ChatRenderer(template, vocab)
        for seed in range(2):
            for messages in conversation(random.Random(seed)):
                request = parse_chat_request({"messages": messages})
                expected = ChatRenderer(template, vocab).render(request)
                found = renderer.render(request)
                assert found.text == expected.text
                assert found.prompt.tokens == expected.prompt.tokens
                whole = vocab.tokenize(found.text, add_special=True)
                assert list(found.prompt.tokens) == whole
                assert spans(found.prompt) == spans(expected.prompt)
                n_found += found.prompt.query_span is not None
    assert n_found > 10


@pytest.mark.parametrize("role", ["user", "tool"])
def test_only_new_messages_are_rendered_again(role: str) -> None:
    with ChatTemplate(None, tiny_vocab.CHATML_TOOLS) as template:
        counting = CountingTemplate(template)
        finder = ContentFinder(counting)  # type: ignore[arg-type]
        messages: list[Message] = [{"role": "user", "content": "What is on the hill?"}]
        sizes = []
        for turn in range(30):
            messages.append({"role": "assistant", "content": f"It is number {turn}."})
            messages.append({"role": role, "content": f"And {turn}? " * 50})
            request = parse_chat_request({"messages": messages})
            fields = {"messages": [message.for_template() for message in request.messages]}
            text: str = template.render(fields)["prompt"]
            counting.rendered.clear()
            contents, query, _ = finder.find(request, fields, text)
            sizes.append(counting.rendered[:])
            assert len(contents) == len(messages) and query is not None
    assert sizes[0] == [3]
    assert all(len(turn) == 1 and turn[0] <= 5 for turn in sizes[1:])
