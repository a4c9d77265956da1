"""Who decides whether, how hard and how long a model thinks. docs/server-api.md has the table."""

from itertools import product
from typing import Any

import pytest

from kvmem.chat.binding import ANSWERING_DEFAULTS, THINKING_DEFAULTS
from kvmem.chat.fields import FieldError
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import ChatRequest, RequestDefaults, parse_chat_request
from kvmem.chat.thinking import EFFORTS, Thinking
from kvmem.engine.sampling import SamplingParams
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

USER = {"role": "user", "content": "hi"}
EFFORT_SHOWN = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ style }}"

SWITCH = (None, True, False)


def parse(server: Thinking | None = None, **fields: Any) -> ChatRequest:
    given = {name: value for name, value in fields.items() if value is not None}
    return parse_chat_request(
        {"messages": [USER], **given}, RequestDefaults(thinking=server or Thinking())
    )


def kwargs_of(enabled: bool | None, effort: str | None = None) -> dict[str, Any]:
    given = {"enable_thinking": enabled, "reasoning_effort": effort}
    return {name: value for name, value in given.items() if value is not None}


def first(*votes: bool | None) -> bool | None:
    return next((vote for vote in votes if vote is not None), None)


def test_every_combination_of_the_switches() -> None:
    """The table, row by row: the first voice that says something decides."""
    n_tried = 0
    efforts = (None, "none", "high", "default")
    for inner, effort, inner_effort, top in product(SWITCH, efforts, efforts, SWITCH):
        for own_inner, own_effort, own_kwarg, flag in product(SWITCH, efforts, efforts, SWITCH):
            kwargs = kwargs_of(own_inner, own_kwarg)
            server = Thinking(enabled=flag, effort=own_effort, kwargs=kwargs)
            request = parse(
                server,
                chat_template_kwargs=kwargs_of(inner, inner_effort),
                reasoning_effort=effort,
                enable_thinking=top,
            )
            asked = effort or inner_effort
            expected = first(
                inner,
                False if asked == "none" else None,
                top,
                own_inner,
                False if (own_effort or own_kwarg) == "none" else None,
                flag,
            )
            assert request.thinking.enabled is expected
            wanted = asked or own_effort or own_kwarg
            shown = None if wanted in (None, "none", "default") else wanted
            assert request.thinking.effort == shown
            n_tried += 1
    assert n_tried == 3 * 4 * 4 * 3 * 3 * 4 * 4 * 3


@pytest.mark.parametrize(
    ("top", "inner", "own", "own_inner", "shown"),
    [
        (None, None, None, None, None),
        ("low", "high", "medium", "xhigh", "low"),
        (None, "high", "medium", "xhigh", "high"),
        (None, None, "medium", "xhigh", "medium"),
        (None, None, None, "xhigh", "xhigh"),
        ("default", "high", "medium", "xhigh", None),
        (None, "default", "medium", None, None),
        ("high", None, "none", None, "high"),
    ],
)
def test_which_effort_the_template_sees(
    top: str | None, inner: str | None, own: str | None, own_inner: str | None, shown: str | None
) -> None:
    server = Thinking(effort=own, kwargs=kwargs_of(None, own_inner))
    request = parse(server, reasoning_effort=top, chat_template_kwargs=kwargs_of(None, inner))
    assert request.thinking.effort == shown


@pytest.mark.parametrize(
    ("fields", "server", "budget"),
    [
        ({}, None, None),
        ({}, 9, 9),
        ({"reasoning_budget_tokens": 5}, 9, 5),
        ({"thinking_budget_tokens": 4}, 9, 4),
        ({"reasoning_budget_tokens": 5, "thinking_budget_tokens": 4}, 9, 5),
        ({"reasoning_budget_tokens": 0}, None, 0),
        ({"reasoning_budget_tokens": -1}, 9, None),
    ],
)
def test_the_budget(fields: dict[str, Any], server: int | None, budget: int | None) -> None:
    assert parse(Thinking(budget=server), **fields).thinking.budget == budget


def test_the_message_of_the_budget() -> None:
    server = Thinking(message="Enough.")
    assert parse(server).thinking.message == "Enough."
    assert parse(server, reasoning_budget_message="").thinking.message == ""
    assert parse(server, reasoning_budget_message="Now.").thinking.message == "Now."


def test_variables_of_the_request_win_over_those_of_the_server() -> None:
    server = Thinking(kwargs={"style": "plain", "other": 1})
    request = parse(server, chat_template_kwargs={"style": "rich", "third": [2]})
    assert request.thinking.kwargs == {"style": "rich", "other": 1, "third": [2]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"enable_thinking": 0}, "enable_thinking"),
        (
            {"chat_template_kwargs": {"enable_thinking": "true"}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"chat_template_kwargs": {"preserve_thinking": "False"}},
            "chat_template_kwargs.preserve_thinking",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"chat_template_kwargs": {"reasoning_effort": 3}},
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"reasoning_effort": "maximal"}, "reasoning_effort"),
        ({"reasoning_budget_tokens": "5"}, "reasoning_budget_tokens"),
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens"),
        ({"reasoning_budget_message": 1}, "reasoning_budget_message"),
    ],
)
def test_what_is_no_switch_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse(**fields)
    assert caught.value.field == field


def test_the_efforts_that_there_are() -> None:
    for effort in EFFORTS:
        parse(reasoning_effort=effort)


THINKS, ANSWERS = "<think>\n", "<think>\n\n</think>\n\n"


def test_all_27_prompts(renderer: ChatRenderer) -> None:
    """Case R15: start flag, kwargs and effort, each absent, on or off, in the rendered prompt."""
    for flag, inner, effort in product(SWITCH, SWITCH, (None, "high", "none")):
        request = parse(
            Thinking(enabled=flag), chat_template_kwargs=kwargs_of(inner), reasoning_effort=effort
        )
        thinks = first(inner, False if effort == "none" else None, flag, True)
        text = renderer.render(request).text
        assert text.endswith("assistant\n" + (THINKS if thinks else ANSWERS)), (flag, inner, effort)


def sampling_of(renderer: ChatRenderer, **fields: Any) -> dict[str, Any]:
    sampling = renderer.render(parse(**fields)).sampling
    return {name: getattr(sampling, name) for name in THINKING_DEFAULTS}


def test_defaults_follow_the_thinking_state(renderer: ChatRenderer) -> None:
    assert sampling_of(renderer) == dict(THINKING_DEFAULTS)
    assert sampling_of(renderer, reasoning_effort="none") == dict(ANSWERING_DEFAULTS)
    assert dict(ANSWERING_DEFAULTS)["presence_penalty"] == 1.5
    changed = sampling_of(renderer, enable_thinking=False, top_p=0.5, presence_penalty=0)
    assert changed == {**ANSWERING_DEFAULTS, "top_p": 0.5, "presence_penalty": 0.0}


def test_a_flag_wins_over_the_models_card(renderer: ChatRenderer) -> None:
    defaults = RequestDefaults(sampling=SamplingParams(temperature=0.3, top_k=5))
    sampling = renderer.render(parse_chat_request({"messages": [USER]}, defaults)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 5, 0.95)


def test_temperature_zero_stays_greedy(renderer: ChatRenderer) -> None:
    sampling = renderer.render(parse(temperature=0, enable_thinking=False)).sampling
    assert (sampling.temperature, sampling.presence_penalty, sampling.top_k) == (0.0, None, None)


def test_a_template_that_does_not_think_keeps_llamacpps_defaults(vocab: Vocab) -> None:
    with ChatTemplate(None, "{%- for m in messages %}{{ m.content }}{%- endfor %}") as template:
        rendered = ChatRenderer(template, vocab).render(parse())
    assert (rendered.sampling.temperature, rendered.sampling.top_k) == (None, None)
    assert "reasoning" not in rendered.sampling.extra


def render_with(vocab: Vocab, source: str, **fields: Any) -> RenderedChat:
    with ChatTemplate(None, source) as template:
        return ChatRenderer(template, vocab).render(parse(**fields))


def test_the_template_gets_effort_switch_and_variables(vocab: Vocab) -> None:
    kwargs = {"style": "rich"}
    text = render_with(
        vocab, EFFORT_SHOWN, reasoning_effort="low", chat_template_kwargs=kwargs
    ).text
    assert text == "low|True|rich"
    assert render_with(vocab, EFFORT_SHOWN, reasoning_effort="none").text == "|False|"
    assert render_with(vocab, EFFORT_SHOWN, reasoning_effort="default").text == "|True|"


def test_a_thought_that_the_template_has_opened_is_known(renderer: ChatRenderer) -> None:
    assert renderer.render(parse()).thinking.is_open
    assert not renderer.render(parse(enable_thinking=False)).thinking.is_open
    reasoning: Any = renderer.render(parse(reasoning_budget_tokens=7)).sampling.extra["reasoning"]
    # and the line break after its tag, which the sampler counts
    assert (reasoning["start"], reasoning["budget"]) == ("<think>", 7 + 1)
