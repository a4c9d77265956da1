"""OpenAI's own client against a live server: streams, tools, structured output, errors."""

import json
import re
import tomllib
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from typing import Any, Literal
from urllib.request import urlopen

import openai
import pytest
from handset import LINE_BREAK, SCRIPT, write_handset
from live import WAIT_S, Server, serving
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from server_fake import until
from tiny_vocab import CONTROL, MERGES, USER_DEFINED
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
FIRST = 256 + len(MERGES) + len(CONTROL)  # ids of the tiny vocabulary
CALL, THOUGHT = (str(FIRST + USER_DEFINED.index(text)) for text in ("<tool_call>", "</think>"))
# A token decides the next one, so each comes once: the second call is one token.
TWO_CALLS = (
    *SCRIPT[1:], "\n<tool_call>\n<function=look>\n<parameter=place>\nRome\n</parameter>\n"
    "</function>\n</tool_call>",
)  # fmt: skip
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def client_of(address: tuple[str, int], api_key: str = "any") -> OpenAI:
    base = f"http://{address[0]}:{address[1]}/v1"
    return OpenAI(base_url=base, api_key=api_key, timeout=30, max_retries=0)


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    """Random words."""
    with serving("-m", str(tiny_llama), *ARGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server.address()) as client:
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


def demanding(name: str, **properties: Any) -> ChatCompletionToolParam:
    parameters: dict[str, object] = {
        "type": "object", "properties": properties, "required": list(properties),
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("name", ["count", "paint", "count|paint"])
def test_a_call_is_forced(client: OpenAI, name: str) -> None:
    """A named one, or any."""
    tools = [
        demanding("count", n={"type": "integer"}),
        demanding("paint", colour={"enum": ["red", "blue"]}),
    ]
    named: Any = {"type": "function", "function": {"name": name}}
    reply = client.chat.completions.create(
        model="any", messages=HI, tools=tools, max_tokens=300, seed=2,
        tool_choice="required" if "|" in name else named, reasoning_effort="none",
        parallel_tool_calls=False, logit_bias={CALL: 100},
    )  # fmt: skip
    calls = reply.choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function"
    assert re.fullmatch(name, calls[0].function.name)
    [(key, value)] = json.loads(calls[0].function.arguments).items()
    assert (key == "n" and isinstance(value, int)) or (key == "colour" and value in ("red", "blue"))


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


def test_the_model_is_listed_and_found(client: OpenAI) -> None:
    [listed] = client.models.list().data
    found = client.models.retrieve("tiny")
    assert found == listed
    assert (found.id, found.object) == ("tiny", "model")
    about: Any = found.to_dict()
    assert about["meta"]["n_ctx"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_plain_completions(client: OpenAI) -> None:
    """Of a text and of tokens, whole and streamed, several at once."""
    fields: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="once upon a time", **fields)
    assert (whole.object, whole.model) == ("text_completion", "tiny")
    assert whole.usage is not None and whole.usage.completion_tokens <= 8
    [choice] = whole.choices
    streamed = list(client.completions.create(prompt="once upon a time", **fields, stream=True))
    assert "".join(part.choices[0].text for part in streamed) == choice.text != ""
    assert streamed[-1].choices[0].finish_reason == choice.finish_reason
    prompts = ["once upon a time", "the sea"]
    several = client.completions.create(prompt=prompts, **fields, n=2)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert [one.text == choice.text for one in several.choices] == [True, True, False, False]
    tokens = client.completions.create(prompt=[ord("a"), ord("b")], **fields)
    assert tokens.usage is not None and tokens.usage.prompt_tokens == 2


def test_a_wrong_key_is_an_authentication_error(tiny_llama: Path) -> None:
    with serving("-m", str(tiny_llama), *ARGS, "--api-key", "right") as server:
        address = server.address()
        with client_of(address, "wrong") as client:
            for ask in (
                client.models.list,
                lambda: client.chat.completions.create(model="any", messages=HI),
                lambda: client.chat.completions.create(model="any", messages=HI, stream=True),
                lambda: client.completions.create(model="any", prompt="hi"),
            ):
                with pytest.raises(openai.AuthenticationError) as caught:
                    ask()
                assert caught.value.type == "authentication_error"
        with client_of(address, "right") as client:
            reply = client.chat.completions.create(model="any", messages=HI, max_tokens=3)
            assert reply.usage is not None and reply.usage.completion_tokens <= 3


@pytest.mark.alone
def test_closing_a_stream_ends_the_work(server: Server, client: OpenAI) -> None:
    greedy: dict[str, Any] = {"model": "any", "messages": HI, "max_tokens": 6, "temperature": 0}
    before = client.chat.completions.create(**greedy).choices
    stream = client.chat.completions.create(
        model="any", messages=HI, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(stream).choices and next(stream).choices
    stream.close()
    closed = monotonic()
    assert server.until("end=(?!stop|length)")[0] == "end="
    assert monotonic() - closed < 1
    assert "end=cancelled" in server.seen[-1]
    assert client.chat.completions.create(**greedy).choices == before


def test_a_full_queue_is_a_503_that_says_when_to_come_again(tiny_llama: Path) -> None:
    """The client waits as told, and is served when the others have left."""
    body = json.dumps({"messages": HI, "ignore_eos": True})  # for minutes
    answers: list[Any] = []

    def look(response: Any) -> None:
        answers.append(response)
        if len(answers) > 1:
            for one in others:
                one.close()

    with (
        serving("-m", str(tiny_llama), *ARGS, "-c", "65536") as server,
        openai.DefaultHttpxClient(event_hooks={"response": [look]}) as http,
    ):
        address = server.address()
        patient = client_of(address).with_options(http_client=http)
        others = [HTTPConnection(*address, timeout=WAIT_S) for _ in range(65)]
        for one in others:
            one.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        until(lambda: n_waiting(address) == 64)
        with pytest.raises(openai.InternalServerError) as caught:
            patient.chat.completions.create(model="any", messages=HI)
        assert caught.value.status_code == 503 and caught.value.type == "unavailable_error"
        assert int(caught.value.response.headers["retry-after"]) > 0
        told = monotonic()
        reply = patient.with_options(max_retries=2).chat.completions.create(
            model="any", messages=HI, max_tokens=3
        )
        assert monotonic() - told >= int(answers[1].headers["retry-after"])
        assert [one.status_code for one in answers] == [503, 503, 200]
        assert reply.usage is not None and reply.usage.completion_tokens <= 3


def n_waiting(address: tuple[str, int]) -> int:
    with urlopen(f"http://{address[0]}:{address[1]}/slots", timeout=WAIT_S) as response:
        [slot] = json.load(response)
    return int(slot["kvmem"]["n_waiting"])


def test_a_conversation_by_its_id(client: OpenAI) -> None:
    """Two that begin with the same words take turns; each goes on where it was itself."""
    begin = "tell me of the long voyage " * 8
    talks: dict[str, list[Any]] = {"a": [], "b": []}
    numbers: dict[str, set[Any]] = {"a": set(), "b": set()}
    for turn in range(3):
        for name, talk in talks.items():
            text = f"what became of {name} " * 8 if turn else begin
            talk.append({"role": "user", "content": text})
            reply = client.chat.completions.create(
                model="any", messages=talk, max_tokens=6, temperature=0, reasoning_effort="none",
                extra_body={"kvmem": {"conversation_id": name, "report": True}},
            )  # fmt: skip
            talk.append(reply.choices[0].message.to_dict())
            report, usage = reply.to_dict()["kvmem"], reply.usage
            assert isinstance(report, dict)
            assert usage is not None and usage.prompt_tokens_details is not None
            numbers[name].add(report["conversation"])
            if turn:
                assert report["conversation_use"] == "switched"
                cached = usage.prompt_tokens_details.cached_tokens
                assert cached is not None
                assert cached > usage.prompt_tokens * turn / (turn + 1) - 32
    assert talks["a"][:2] == talks["b"][:2]
    assert len(numbers["a"]) == len(numbers["b"]) == 1 and numbers["a"] != numbers["b"]


def test_a_budget_ends_thinking(client: OpenAI) -> None:
    """The model would think on and on: what ends a thought is forbidden to it."""
    fields: dict[str, Any] = {
        "model": "any", "messages": HI, "max_tokens": 40, "seed": 3,
        "logit_bias": {THOUGHT: -100, CALL: -100},
    }  # fmt: skip
    free = client.chat.completions.create(**fields, extra_body={"ignore_eos": True})
    assert free.choices[0].finish_reason == "length" and free.choices[0].message.content == ""
    bound = client.chat.completions.create(
        **fields,
        extra_body={
            "reasoning_budget_tokens": 5,
            "reasoning_budget_message": " Enough.",
            "ignore_eos": True,
        },
    )
    message = bound.choices[0].message
    assert message.content
    thought = message.to_dict()["reasoning_content"]
    assert isinstance(thought, str) and thought.endswith(" Enough.")
    assert bound.usage is not None and bound.usage.completion_tokens_details is not None
    n_thought = bound.usage.completion_tokens_details.reasoning_tokens
    assert n_thought is not None and 5 < n_thought < 40


def test_a_message_is_gone_on_with(scripted: OpenAI) -> None:
    begun: ChatCompletionMessageParam = {"role": "assistant", "content": "\n\nOf course. "}
    for fields in ({}, {"continue_final_message": True}):
        reply = scripted.chat.completions.create(
            model="any", messages=[*HI, begun], tools=[LOOK], extra_body=fields
        )
        message = reply.choices[0].message
        assert message.content == "One moment.\n"
        assert message.tool_calls is not None and len(message.tool_calls) == 1


@pytest.mark.parametrize("stop", ["moment", ["nothing of it", "moment"]])
def test_a_stop_text(scripted: OpenAI, stop: Any) -> None:
    fields: dict[str, Any] = {"model": "any", "messages": HI, "tools": [LOOK], "stop": stop}
    [choice] = scripted.chat.completions.create(**fields).choices
    assert (choice.message.content, choice.finish_reason) == ("Of course. One ", "stop")
    assert choice.message.tool_calls is None
    chunks = [one.choices[0] for one in scripted.chat.completions.create(**fields, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == "Of course. One "
    assert chunks[-1].finish_reason == "stop"


def test_several_replies(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "any", "messages": HI, "n": 3, "seed": 5, "max_tokens": 8,
        "reasoning_effort": "none", "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content or "" for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_two_calls_in_one_reply(tmp_path: Path) -> None:
    """As pieces they are told apart by their index alone."""
    path = write_handset(tmp_path / "calls.gguf", script=TWO_CALLS, start=LINE_BREAK)
    fields: dict[str, Any] = {"model": "any", "messages": HI, "tools": [LOOK]}
    with (
        serving("-m", str(path), *ARGS, "--temp", "0") as server,
        client_of(server.address()) as client,
    ):
        [whole] = client.chat.completions.create(**fields).choices
        with client.chat.completions.stream(**fields) as chunks:
            [joined] = chunks.get_final_completion().choices
    choices: list[Any] = [whole, joined]
    ids = set()
    for choice in choices:
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments)["place"] for call in calls] == ["Oslo", "Rome"]
        assert [(call.type, call.function.name) for call in calls] == [("function", "look")] * 2
        assert choice.finish_reason == "tool_calls"
        ids |= {call.id for call in calls}
    assert len(ids) == 4


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
