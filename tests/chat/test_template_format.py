"""What a template does with messages: instructions, calls and results, the reply that goes on."""

from typing import Any

import pytest
import tiny_vocab
from rendering import LOOK, message, render, text_of, user

from kvmem.chat.fields import FieldError
from kvmem.errors import RequestError
from kvmem.llama.vocab import Vocab

SYSTEM_FIRST = (
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DROPS_LATE_SYSTEM = (
    "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
    "{{- m.role + ': ' + m.content + '\\n' }}{%- endif %}{%- endfor %}"
)
ALTERNATES = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first %}{{- '[S]' + m.content + '[/S]' }}"
    "{%- elif (m.role == 'user') != (ns.n % 2 == 0) or m.role == 'system' %}"
    "{{- raise_exception('roles must alternate') }}"
    "{%- else %}{%- set ns.n = ns.n + 1 %}{{- '[' + m.role + ']' + m.content + '[/]' }}{%- endif %}"
    "{%- endfor %}"
)
NO_LONG_WORDS = (
    "{%- for m in messages %}{%- if m.content | length > 30 %}"
    "{{- raise_exception('too long for me') }}{%- endif %}{{- m.content }};{%- endfor %}"
)


@pytest.mark.parametrize("source", [SYSTEM_FIRST, DROPS_LATE_SYSTEM, tiny_vocab.CHATML_TOOLS])
@pytest.mark.parametrize("first", ["system", "developer"])
def test_instructions_anywhere(vocab: Vocab, source: str, first: str) -> None:
    """Case R12: each text once, in order, and the next turn begins with the same tokens."""
    for roles in (
        [first, "user"],
        [first, "user", "assistant", first, "user"],
        [first, first, "user"],
        ["user", first],
    ):
        said = [message(role, f"text number {i}") for i, role in enumerate(roles)]
        rendered = render(vocab, *said, source=source)
        places = [rendered.text.index(m["content"]) for m in said]
        assert places == sorted(places)
        assert [rendered.text.count(m["content"]) for m in said] == [1] * len(said)
        last_user = max(i for i, role in enumerate(roles) if role == "user")
        assert text_of(vocab, rendered, rendered.prompt.query_span) == f"text number {last_user}"
        more = (message("assistant", "an answer"), user("next"))
        grown = render(vocab, *said, *more, source=source).text
        plain = render(vocab, *said, source=source, add_generation_prompt=False).text
        assert grown.startswith(plain)


@pytest.mark.parametrize("content", ["who?", [{"type": "text", "text": "who?"}]])
def test_instructions_where_roles_must_alternate(vocab: Vocab, content: Any) -> None:
    said = [
        message("developer", "one"), message("system", "two"), user("hi"),
        message("assistant", "yes"), message("system", "three"), message("system", "four"),
        user(content),
    ]  # fmt: skip
    rendered = render(vocab, *said, source=ALTERNATES)
    assert rendered.text.replace("\n\n\n", "\n\n") == (
        "[S]one\n\ntwo[/S][user]hi[/][assistant]yes[/][user]three\n\nfour\n\nwho?[/]"
    )
    assert text_of(vocab, rendered, rendered.prompt.query_span) == "who?"
    with pytest.raises(FieldError, match="roles must alternate"):
        render(vocab, user("a"), user("b"), source=ALTERNATES)


def test_a_refused_message_is_named(vocab: Vocab) -> None:
    said = [user("short"), message("assistant", "also"), user("x" * 40)]
    with pytest.raises(FieldError) as caught:
        render(vocab, *said, source=NO_LONG_WORDS)
    assert caught.value.field == "messages[2]"
    assert str(caught.value) == (
        "messages[2] (user) is refused by the chat template: too long for me"
    )


def test_the_message_is_named_by_its_place_in_the_request(vocab: Vocab) -> None:
    said = [message("system", "a"), message("system", "b"), user("x" * 40)]
    with pytest.raises(FieldError) as caught:
        render(vocab, *said, source=NO_LONG_WORDS)
    assert caught.value.field == "messages[2]"


@pytest.mark.parametrize(
    "said",
    [
        [message("assistant", None), user("hi")],
        [{"role": "assistant"}, user("hi")],
        [user([{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}])],
        [message("assistant", [{"type": "refusal", "refusal": "no"}]), user("hi")],
        [user(["h", "i"])],
        [
            {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
                {"id": "3", "type": "custom", "custom": {"name": "g", "input": "text"}},
            ]},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "2", "content": None, "cache_control": {}},
            user("hi"),
        ],
    ],
)  # fmt: skip
def test_histories_as_agents_send_them(vocab: Vocab, said: list[Any]) -> None:
    rendered = render(vocab, *said, tools=[LOOK])
    shown = text_of(vocab, rendered, rendered.prompt.query_span)
    assert shown.replace("\n", "") == "hi"


def test_calls_that_a_template_does_not_show_are_told(vocab: Vocab) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [user("hi"), said, {"role": "tool", "tool_call_id": "1", "content": "so"}]
    rendered = render(vocab, *messages, source=tiny_vocab.CHATML)
    assert "look" not in rendered.text
    (note,) = rendered.notes
    assert note == "the chat template has no place for calls: those of the messages are left out"
    assert render(vocab, *messages, source=tiny_vocab.CHATML_TOOLS).notes == ()
    assert render(vocab, *messages[::2], source=tiny_vocab.CHATML).notes == ()


def test_a_reply_that_is_continued(vocab: Vocab) -> None:
    said = [user("hi"), message("assistant", "Once upon")]
    rendered = render(vocab, *said, continue_final_message=True, enable_thinking=False)
    assert rendered.text.endswith("Once upon")
    assert render(vocab, *said, enable_thinking=False).text == rendered.text
    assert render(vocab, *said, continue_final_message=False).text.count("assistant\n") == 2
    assert render(vocab, *said, add_generation_prompt=True).text.count("assistant\n") == 2


def test_messages_that_no_template_can_read_are_a_request_error(vocab: Vocab) -> None:
    with pytest.raises(RequestError):
        render(vocab, user("\ud800"))
