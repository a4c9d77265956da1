"""What clients send, and what they may not."""

import math
from typing import Any

import pytest

from kvmem.chat.fields import FieldError
from kvmem.chat.request import ChatRequest, RequestDefaults, parse_chat_request
from kvmem.chat.thinking import Thinking
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import UnsupportedContentError

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def parse(defaults: RequestDefaults | None = None, **fields: Any) -> ChatRequest:
    return parse_chat_request({"messages": [USER], **fields}, defaults)


def test_a_minimal_request_takes_the_defaults() -> None:
    defaults = RequestDefaults(
        sampling=SamplingParams(temperature=0.5, top_k=3),
        max_tokens=9,
        thinking=Thinking(enabled=False),
    )
    request = parse(defaults)
    assert request.sampling == defaults.sampling
    assert (request.max_tokens, request.thinking.enabled) == (9, False)
    assert (request.stream, request.include_usage, request.include_memory) == (False,) * 3
    assert parse(defaults, temperature=0).sampling == SamplingParams(temperature=0.0, top_k=3)


@pytest.mark.parametrize(
    "content",
    ["hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]],
)
def test_content_as_text_and_as_parts(content: object) -> None:
    message = parse(messages=[{"role": "user", "content": content}]).messages[0]
    assert message.text == "hi"
    assert message.for_template() == {"role": "user", "content": content}


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_content_null_or_absent_is_empty(message: dict[str, Any]) -> None:
    assert parse(messages=[USER, message]).messages[1].for_template()["content"] == ""


def test_a_tool_call_and_its_result_in_the_history() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    messages = parse(messages=[USER, assistant, result]).messages
    assert messages[1].for_template() == {**assistant, "content": ""}
    assert messages[2].for_template() == result


@pytest.mark.parametrize(
    ("arguments", "text"), [({"a": 1}, '{"a": 1}'), (None, "{}"), ("", "{}"), ("{}", "{}")]
)
def test_arguments_of_calls_in_each_form(arguments: object, text: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = parse(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    assert message.tool_calls[0].arguments == text


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7.0}, 7),
        ({"n_predict": 5}, 5),
        ({"max_completion_tokens": 3, "max_tokens": 7, "n_predict": 5}, 3),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
    ],
)
def test_names_and_values_of_the_reply_limit(fields: dict[str, Any], limit: int | None) -> None:
    assert parse(**fields).max_tokens == limit


def test_minus_one_lifts_the_servers_own_limit() -> None:
    assert parse(RequestDefaults(max_tokens=9), max_tokens=-1).max_tokens is None


def test_sampling_fields_reach_the_sampler_by_its_names() -> None:
    request = parse(
        temperature=0.3, top_p=0.5, seed=4, ignore_eos=True, typical_p=0.9, repeat_last_n=-1,
        logit_bias={"5": -100, "6": 2.5},
    )  # fmt: skip
    assert request.sampling.as_dict() == {
        "temperature": 0.3,
        "top_p": 0.5,
        "seed": 4,
        "ignore_eos": True,
        "typical_p": 0.9,
        "repeat_last_n": 1 << 20,
        "logit_bias": [[5, -100.0], [6, 2.5]],
    }
    pairs = parse(logit_bias=[[5, False], ["6", 1]]).sampling.extra["logit_bias"]
    assert pairs == [[5, None], [6, 1.0]]


@pytest.mark.parametrize(
    ("value", "stops"), [(None, ()), ("a", ("a",)), (["a", "", "b"], ("a", "b")), ([], ())]
)
def test_stop_texts(value: object, stops: tuple[str, ...]) -> None:
    assert parse(stop=value).stop == stops


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(True, True), (False, False), ({"report": True}, True), ({"conversation_id": 4}, False)],
)
def test_the_memory_report_is_asked_for_by_kvmem(value: object, wanted: bool) -> None:
    assert parse(kvmem=value).include_memory is wanted


def test_unknown_fields_and_hints_are_ignored() -> None:
    extra: dict[str, Any] = {
        "store": True,
        "think": 3,
        "cache_prompt": "no",
        "id_slot": 2,
        "model": "any",
    }
    assert parse(**extra) == parse()
    assert not parse(cache_prompt=False).uses_cache


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"messages": "hi"}, "messages", "messages must be a list, not a string"),
        ({"messages": []}, "messages", "messages must be a list with at least one message"),
        ({"messages": [3]}, "messages[0]", "messages[0] must be an object"),
        (
            {"messages": [USER, {"role": "robot"}]},
            "messages[1].role",
            "messages[1].role must be one of system, developer, user, assistant, tool",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content must be a string, a list of parts or null",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "messages[0].content[0].text must be given",
        ),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be an integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be an integer, not a boolean"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer, not a number"),
        ({"max_tokens": -2}, "max_tokens", "max_tokens is -2, but must be from -1 to 2147483647"),
        ({"temperature": "0"}, "temperature", "temperature must be a number, not a string"),
        ({"temperature": math.nan}, "temperature", "temperature must be a number, not NaN"),
        ({"temperature": 10**400}, "temperature",
         "temperature must be a number, not one beyond all range"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias",
         "logit_bias must hold numbers (or false, which forbids a token)"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias",
         "logit_bias must hold numbers (or false, which forbids a token)"),
        ({"logit_bias": [[(1 << 32) + 5, 1]]}, "logit_bias",
         "logit_bias must name tokens from 0 to 2147483647"),
        ({"temperature": -1}, "temperature", "temperature is -1, but must be from 0 to 1000000"),
        ({"top_p": 2}, "top_p", "top_p is 2, but must be from 0 to 1"),
        ({"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty is 0, but must be above 0 "
         "(1 turns it off)"),
        ({"stream": "yes"}, "stream", "stream must be true or false, not a string"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "stream_options.include_usage must be true or false, not a number",
        ),
        ({"stop": [1]}, "stop", "stop must be a string or a list of strings"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias", "logit_bias must name tokens by their ids or "
         "texts"),
        ({"logit_bias": {"1": "a"}}, "logit_bias", "logit_bias must hold numbers (or false, which "
         "forbids a token)"),
        (
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
            "chat_template_kwargs.enable_thinking must be true or false, not a string",
        ),
        ({"tools": [{"type": 3}]}, "tools[0].type", "tools[0].type must be a string, not a number"),
        ({"tools": [{}]}, "tools[0].type", "tools[0].type must be given"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "tools[0].function.name must be given",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type must be given",
        ),
        ({"tool_choice": "perhaps"}, "tool_choice", 'tool_choice must be "auto", "none", '
         '"required" or a function'),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse(**fields)
    assert (caught.value.field, str(caught.value)) == (field, message)


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(FieldError, match="the body must be a JSON object"):
        parse_chat_request([1])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "grammar": 'root ::= "a"'},
    ],
)
def test_what_is_not_built_yet_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedContentError):
        parse(**fields)


def test_a_part_of_an_unknown_type_is_named_by_one_path() -> None:
    message = {"role": "user", "content": ["x", {"type": "image_url", "image_url": {}}]}
    with pytest.raises(UnsupportedContentError) as caught:
        parse(messages=[message])
    assert str(caught.value) == (
        "messages[0].content[1] has the type 'image_url'; only text can be read"
    )
