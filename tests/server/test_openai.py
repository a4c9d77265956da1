"""OpenAI's own client against a live server: streams, tools, structured output, errors."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from handset import LINE_BREAK, SCRIPT, write_handset
from live import serving
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from zod import UUID

ARGS = ("--port", "0", "-c", "2048", "-t", "1", "--kvmem-budget", "512",
        "--kvmem-block-tokens", "32", "--kvmem-gen-reserve", "128", "--alias", "tiny")  # fmt: skip
LOOK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = "278"  # the id of <tool_call> in the tiny vocabulary
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def client_of(address: tuple[str, int]) -> OpenAI:
    base = f"http://{address[0]}:{address[1]}/v1"
    return OpenAI(base_url=base, api_key="any", timeout=30, max_retries=0)


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[OpenAI]:
    """Random words."""
    with serving("-m", str(tiny_llama), *ARGS) as server, client_of(server.address()) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Thinks, answers and calls a tool."""
    path = write_handset(
        tmp_path_factory.mktemp("handset") / "chat.gguf", script=SCRIPT[1:], start=LINE_BREAK
    )
    with (
        serving("-m", str(path), *ARGS, "--temp", "0") as server,
        client_of(server.address()) as client,
    ):
        yield client


def test_the_script_as_the_client_sees_it(scripted: OpenAI) -> None:
    reply = scripted.chat.completions.create(model="any", messages=HI, tools=[LOOK])
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Of course. One moment.\n"
    assert choice.message.to_dict()["reasoning_content"] == "I should look it up."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "Oslo"})
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 3
    assert reply.model == "tiny"


def test_the_clients_own_joining_of_a_stream(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(
        model="any", messages=HI, tools=[LOOK], stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    message = whole.choices[0].message
    assert message.content == "Of course. One moment.\n"
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"place":"Oslo"}'
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_usage_of_streams_over_a_long_conversation(
    scripted: OpenAI, max_tokens: int | None
) -> None:
    """Case R13: a reply that ends in a call, and one that is cut; the same counts unstreamed."""
    messages: list[Any] = list(HI)
    fields: dict[str, Any] = {"model": "any", "tools": [LOOK], "max_tokens": max_tokens}
    for turn in range(4):
        asked = {**fields, "messages": messages}
        chunks = list(scripted.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ))  # fmt: skip
        *others, last = chunks
        assert last.choices == [] and all(one.usage is None for one in others)
        usage = last.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None and cached <= usage.prompt_tokens
        assert turn == 0 or cached > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        end = others[-1].choices[0].finish_reason
        assert end == ("tool_calls" if max_tokens is None else "length")
        plain = scripted.chat.completions.create(**asked)
        assert plain.usage is not None
        assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (
            usage.prompt_tokens, usage.completion_tokens
        )  # fmt: skip
        without = list(scripted.chat.completions.create(**asked, stream=True))
        assert all(one.usage is None and one.choices for one in without)
        message = plain.choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"})
        messages.append({"role": "user", "content": f"and number {turn}?"})


def test_a_turn_with_the_tools_answer(scripted: OpenAI) -> None:
    first = scripted.chat.completions.create(model="any", messages=HI, tools=[LOOK])
    message = first.choices[0].message
    assert message.tool_calls is not None
    answer: ChatCompletionMessageParam = {
        "role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."
    }  # fmt: skip
    assistant: Any = message.to_dict()
    second = scripted.chat.completions.create(
        model="any", messages=[*HI, assistant, answer], tools=[LOOK]
    )
    assert first.usage is not None and second.usage is not None
    cached = second.usage.prompt_tokens_details
    assert cached is not None and cached.cached_tokens is not None
    assert cached.cached_tokens > first.usage.prompt_tokens // 2
    calls = second.choices[0].message.tool_calls
    assert calls is not None and calls[0].id != message.tool_calls[0].id


class Weather(BaseModel):
    degrees: int
    sky: Literal["clear", "grey"]
    windy: bool


def test_structured_output_where_several_demands_meet(client: OpenAI) -> None:
    """Patterns that look ahead, beside lengths and a format, on a model that knows none of it."""
    code = {"type": "string", "pattern": "^(?=.*[0-9])[A-Z0-9]+$", "minLength": 4, "maxLength": 8}
    number = {"type": "string", "pattern": UUID, "format": "uuid"}
    schema = {"type": "object", "properties": {"code": code, "id": number},
              "required": ["code", "id"], "additionalProperties": False}  # fmt: skip
    for seed in range(3):
        reply = client.chat.completions.create(
            model="any", messages=HI, max_tokens=200, seed=seed, reasoning_effort="none",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "account", "schema": schema, "strict": True},
            },
        )  # fmt: skip
        account = json.loads(reply.choices[0].message.content or "")
        assert re.fullmatch("[A-Z0-9]{4,8}", account["code"]), account
        assert re.search("[0-9]", account["code"]) and re.search(UUID, account["id"])


def test_structured_output(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="any",
        messages=HI,
        response_format=Weather,
        max_tokens=200,
        seed=1,
        extra_body={"enable_thinking": False},
    )
    assert isinstance(reply.choices[0].message.parsed, Weather)


def test_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="any", messages=HI, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0,
        reasoning_effort="none",
    )  # fmt: skip
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_temperature_zero_and_seeds(client: OpenAI) -> None:
    def say(**fields: Any) -> str | None:
        reply = client.chat.completions.create(
            model="any", messages=HI, max_tokens=12, reasoning_effort="none", **fields
        )
        text: str | None = reply.choices[0].message.content
        return text

    assert say(temperature=0) == say(temperature=0)
    assert say(seed=5) == say(seed=5) != say(seed=6)


def test_a_call_is_forced(client: OpenAI) -> None:
    number: ChatCompletionToolParam = {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {
                "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
            },
        },
    }  # fmt: skip
    reply = client.chat.completions.create(
        model="any", messages=HI, tools=[number, LOOK], max_tokens=300, seed=2,
        tool_choice={"type": "function", "function": {"name": "count"}}, reasoning_effort="none",
        parallel_tool_calls=False, logit_bias={CALL: 100},
    )  # fmt: skip
    calls = reply.choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function"
    assert isinstance(json.loads(calls[0].function.arguments)["n"], int)


def test_the_examples_of_the_clients_page(
    client: OpenAI, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's runs, and the settings can be read."""
    page = (root / "docs" / "clients.md").read_text(encoding="utf-8")
    blocks = {kind: text for kind, text in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)}
    assert json.loads(blocks["json"])["provider"]["kvmem"]["options"]["baseURL"]
    assert tomllib.loads(blocks["toml"])["model_providers"]["kvmem"]["wire_api"] == "chat"
    example = blocks["python"].replace("http://127.0.0.1:8080/v1", str(client.base_url))
    exec(compile(example.replace('"Hello"}]', '"Hello"}], max_tokens=8'), "clients.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def test_errors_have_the_clients_types(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="any",
            messages=HI,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^(?=a)$"}},
            },
        )
    assert caught.value.param == "response_format"
    assert "pattern at #" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "word " * 2000}]
        )
    assert caught.value.type == "exceed_context_size_error"
