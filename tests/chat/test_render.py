"""Prompt and spans, against llama.cpp's templates and a real byte-level tokenizer."""

from typing import Any

import pytest
import tiny_vocab

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.prompt import Prompt, Span
from kvmem.errors import RequestError
from kvmem.llama.model import Model
from kvmem.llama.reply_parser import ReplyParser
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

TRIMMING = (
    "{%- for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/{{ m.role }}]\n{%- endfor %}"
)
DROPS_ALL_BUT_THE_LAST = "<{{ messages[-1].content }}>"
UPPER = "{%- for m in messages %}{{ m.content | upper }};{%- endfor %}"
STRICT = (
    "{%- for m in messages %}{%- if m.content | length > 30 %}{{ raise_exception('long') }}"
    "{%- endif %}{{ m.content }};{%- endfor %}"
)


def render(vocab: Vocab, source: str, messages: list[dict[str, Any]], **fields: Any) -> Prompt:
    with ChatTemplate(None, source) as template:
        request = parse_chat_request({"messages": messages, **fields})
        rendered = ChatRenderer(template, vocab).render(request)
    assert vocab.detokenize(rendered.prompt.tokens) == rendered.text
    return rendered.prompt


def text_of(vocab: Vocab, prompt: Prompt, span: Span | None) -> str:
    assert span is not None, prompt.query_fallback
    return vocab.detokenize(prompt.tokens[span.start : span.stop])


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_every_content_has_its_span_and_role(vocab: Vocab) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        user("what is on the hill?"),
        {"role": "assistant", "content": "a tower"},
        user("who built it?"),
    ]
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, messages)
    shown = [(s.role, text_of(vocab, prompt, s.span)) for s in prompt.spans]
    assert shown == [(m["role"], m["content"]) for m in messages]
    assert text_of(vocab, prompt, prompt.query_span) == "who built it?"
    assert prompt.query_fallback == ""


@pytest.mark.parametrize(
    "question",
    ["user", "assistant", "\n", "a", "<|im_end|>", "  spaces around  ", "🙂 日本", "the the the"],
)
def test_questions_that_look_like_the_template(vocab: Vocab, question: str) -> None:
    messages = [user(question), {"role": "assistant", "content": question}, user(question + "?")]
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, messages)
    assert text_of(vocab, prompt, prompt.query_span) == question + "?"


def test_a_trimming_template(vocab: Vocab) -> None:
    prompt = render(vocab, TRIMMING, [user("  who?\n"), user(" why? ")])
    # the space before a content belongs to its first token where the tokenizer merges them
    assert text_of(vocab, prompt, prompt.query_span).strip() == "why?"
    assert [text_of(vocab, prompt, s.span).strip() for s in prompt.spans] == ["who?", "why?"]


def test_parts_of_a_list_are_one_content(vocab: Vocab) -> None:
    parts = [{"type": "text", "text": text} for text in ("what", " is", " it?")]
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, [user(parts)])
    shown = text_of(vocab, prompt, prompt.query_span)
    assert shown.replace("\n", "") == "what is it?"


def test_the_question_stays_the_users_when_tools_answer(vocab: Vocab) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        user("how warm is it?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees, says the user"},
    ]
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, messages)
    assert text_of(vocab, prompt, prompt.query_span) == "how warm is it?"
    assert [s.role for s in prompt.spans] == ["user", "tool"]


def test_thinking_in_the_history_does_not_move_spans(vocab: Vocab) -> None:
    messages = [
        user("one"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nuno"},
        {"role": "assistant", "content": "dos", "reasoning_content": "hm"},
        user("two"),
    ]
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, messages)
    assert [text_of(vocab, prompt, s.span) for s in prompt.spans] == ["one", "dos", "two"]


def test_a_template_that_drops_messages_still_shows_the_question(vocab: Vocab) -> None:
    prompt = render(vocab, DROPS_ALL_BUT_THE_LAST, [user("one"), user("two")])
    assert text_of(vocab, prompt, prompt.query_span) == "two"
    assert len(prompt.spans) == 1


def test_a_template_with_another_order(vocab: Vocab) -> None:
    source = "{%- for m in messages[::-1] %}({{ m.role }}: {{ m.content }}){%- endfor %}"
    messages = [{"role": "system", "content": "brief"}, user("one"), user("two")]
    prompt = render(vocab, source, messages)
    assert text_of(vocab, prompt, prompt.query_span) == "two"
    shown = [(s.role, text_of(vocab, prompt, s.span)) for s in prompt.spans]
    assert shown == [("user", "two"), ("user", "one"), ("system", "brief")]


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (tiny_vocab.CHATML, [{"role": "system", "content": "x"}], "no user message"),
        (tiny_vocab.CHATML, [user("x"), user("  ")], "the last user message is empty"),
        (DROPS_ALL_BUT_THE_LAST, [user("x"), {"role": "system", "content": "y"}], "hides it"),
        (UPPER, [user("who?")], "hides it"),
        (STRICT, [user("who?")], "hides it"),
    ],
)
def test_no_span_is_claimed_without_proof(
    vocab: Vocab, source: str, messages: list[dict[str, Any]], reason: str
) -> None:
    prompt = render(vocab, source, messages)
    assert prompt.query_span is None
    assert reason in prompt.query_fallback


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "before"),
    [
        ([part("first "), part("second")], "first"),
        ("some text\n\n<note>now</note>\n", "some text"),
        ("<a>kept</a> and <note>now</note>", "<a>kept</a> and"),
        ("<note>all of it</note>", None),
        ("plain </note>", None),
        ("plain", None),
        ([part("one")], None),
        ([part("one"), part("  ")], None),
    ],
)
def test_where_the_end_of_the_last_message_begins(
    content: Any, before: str | None, vocab: Vocab
) -> None:
    prompt = render(vocab, tiny_vocab.CHATML_TOOLS, [{"role": "user", "content": content}])
    if before is None:
        assert prompt.last_part is None
    else:
        text = vocab.detokenize(prompt.tokens[: prompt.last_part])
        assert text.endswith(f"user\n{before}")


def test_thinking_and_tools_reach_the_template(vocab: Vocab) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    with ChatTemplate(None, tiny_vocab.CHATML_TOOLS) as template:
        renderer = ChatRenderer(template, vocab)
        body = {"messages": [user("x")], "tools": [tool], "reasoning_effort": "none"}
        text = renderer.render(parse_chat_request(body)).text
    assert "look_up" in text
    assert text.endswith("<think>\n\n</think>\n\n")


def test_a_template_that_refuses_says_why(vocab: Vocab) -> None:
    with pytest.raises(RequestError, match="long"):
        render(vocab, STRICT, [user("x" * 40)])


COUNTS = tiny_vocab.CHATML_TOOLS.replace(
    "'<|im_start|>assistant\\n'", "'<|im_start|>assistant ' ~ messages | length ~ '\\n'"
)


@pytest.mark.parametrize("source", ["", COUNTS])
def test_a_parser_made_from_the_last_turn_is_that_of_all(
    vocab: Vocab, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made so where a schema is rewritten, and where the prompt ends alike for it."""
    made: list[dict[str, Any]] = []

    def make(template: ChatTemplate, model: Model, fields: dict[str, Any]) -> ReplyParser:
        made.append(fields)
        return ReplyParser(template, model, fields)

    monkeypatch.setattr("kvmem.chat.render.ReplyParser", make)
    parameters = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    said = [{"role": "user", "content": f"text {i}"} for i in range(3)]
    said[1]["role"] = "assistant"
    with ChatTemplate(vocab.model, source) as template:
        request = parse_chat_request({"messages": said, "tools": tools, "tool_choice": "required"})
        rendered = ChatRenderer(template, vocab).render(request)
        assert [len(fields["messages"]) for fields in made] == ([1, 3] if source else [1])
        messages = [message.for_template() for message in request.messages]
        whole = ReplyParser(template, vocab.model, {**made[0], "messages": messages})
    parser = rendered.parser
    assert isinstance(parser, ReplyParser)
    assert {**parser.rendered, "prompt": ""} == {**whole.rendered, "prompt": ""}
    assert rendered.text.endswith(whole.rendered["generation_prompt"])
