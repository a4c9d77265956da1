"""Thinking and tool calls over the wire: a scripted engine, a real template, a client's eyes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handset import SCRIPT
from server_fake import FakeBackend, Script, app_of, until
from starlette.testclient import TestClient

from kvmem.chat.render import ChatRenderer
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

CHAT = "/v1/chat/completions"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "name": {"type": "string"}},
        },
    },
}
CALL = "<tool_call>\n<function=look>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def renderer(tiny_llama: Path) -> Iterator[ChatRenderer]:
    with Model(tiny_llama) as model, ChatTemplate(model) as template:
        yield ChatRenderer(template, Vocab(model))


class Client:
    """Asks once, whole or streamed, and joins chunks by `index` alone, as clients do."""

    def __init__(self, renderer: ChatRenderer, pieces: list[bytes]) -> None:
        self._backend = FakeBackend(Script(pieces), n_ctx=4096, renderer=renderer)

    def ask(self, *, stream: bool, **fields: Any) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": "hi"}], "tools": [LOOK], "stream": stream,
            "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        with TestClient(app_of(self._backend)) as client:
            until(lambda: client.get("/health").status_code == 200)
            response = client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        if not stream:
            whole: dict[str, Any] = response.json()
            return whole
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        return joined([json.loads(line.removeprefix("data: ")) for line in lines])


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole reply that chunks make; each rule of the stream is checked on the way."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    reason = None
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            assert not message["content"] and not calls
            message.setdefault("reasoning_content", "")
            message["reasoning_content"] += delta["reasoning_content"]
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert set(piece["function"]) == {"name", "arguments"}
                calls.append({k: v for k, v in piece.items() if k != "index"})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        logprobs += choice.get("logprobs", {}).get("content", ())
        assert reason is None
        reason = choice["finish_reason"]
    assert chunks[-1]["choices"] == []
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    reply = {"index": 0, "message": message, "finish_reason": reason}
    if logprobs:
        reply["logprobs"] = {"content": logprobs}
    return {"choices": [reply], "usage": chunks[-1]["usage"]}


def without_ids(reply: dict[str, Any]) -> Any:
    choice = json.loads(json.dumps(reply["choices"][0]))
    for call in choice["message"].get("tool_calls", ()):
        assert len(call.pop("id")) == 9
    return choice, reply["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_script_over_the_wire(renderer: ChatRenderer, stream: bool) -> None:
    reply = Client(renderer, [text.encode() for text in SCRIPT[1:]]).ask(stream=stream)
    choice, usage = without_ids(reply)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Of course. One moment.\n",
        "reasoning_content": "I should look it up.",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": '{"place":"Oslo"}'}}
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["completion_tokens"] == len(SCRIPT) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_two_calls_and_no_content(renderer: ChatRenderer, stream: bool) -> None:
    """Case R10."""
    text = "</think>\n\n" + CALL.format("place", "a") + "\n" + CALL.format("name", "b")
    reply = Client(renderer, [text[i : i + 4].encode() for i in range(0, len(text), 4)]).ask(
        stream=stream
    )
    message = reply["choices"][0]["message"]
    assert message["content"] is None
    calls = message["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [
        {"place": "a"},
        {"name": "b"},
    ]
    assert calls[0]["id"] != calls[1]["id"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_uses_up_the_tokens(renderer: ChatRenderer, stream: bool) -> None:
    """Case R16: and the next turn works with that history."""
    client = Client(renderer, [b"hm "] * 100)
    reply = client.ask(stream=stream, max_tokens=30, tools=[])
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == ("hm " * 30).rstrip()
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30
    history = [
        {"role": "user", "content": "hi"},
        choice["message"],
        {"role": "user", "content": "?"},
    ]
    assert client.ask(stream=stream, messages=history, max_tokens=3)["choices"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_emoji_in_every_part(renderer: ChatRenderer, size: int) -> None:
    """Case R22: every line is JSON of whole characters; the stream joins to the whole."""
    data = f"🙂🚀</think>😀🌍{CALL.format('place', '🙂🚀😀🌍')}".encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    whole = Client(renderer, pieces).ask(stream=False)
    streamed = Client(renderer, pieces).ask(stream=True)
    assert without_ids(whole) == without_ids(streamed)
    assert "\ufffd" not in json.dumps(whole, ensure_ascii=False)
    assert whole["choices"][0]["message"]["reasoning_content"] == "🙂🚀"


def test_what_does_not_fit_is_text_and_the_report_says_so(renderer: ChatRenderer) -> None:
    text = "</think>Well <tool_call>\n<function=gone>\n</function>\n</tool_call>"
    reply = Client(renderer, [text.encode()]).ask(stream=False, kvmem=True)
    assert reply["choices"][0]["message"]["content"] == text.removeprefix("</think>")
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "passed on as text" in reply["kvmem"]["notes"][0]


def test_a_call_needs_no_markers_in_content(renderer: ChatRenderer) -> None:
    reply = Client(renderer, [b"x</think>", b"done", b""]).ask(stream=False)
    assert reply["choices"][0]["message"] == {
        "role": "assistant", "content": "done", "reasoning_content": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}},
         "tool_choice.function.name"),
        ({"tools": [], "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "strict": True, "schema": {"type": "object", "properties": {
                "a": {"type": "string", "pattern": "^(?=a)$"}}}}}}, "response_format"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_demand_that_cannot_be_met_is_a_400(
    renderer: ChatRenderer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """Case R23."""
    backend = FakeBackend(n_ctx=4096, renderer=renderer)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [LOOK], "stream": stream}
    with TestClient(app_of(backend)) as client:
        until(lambda: client.get("/health").status_code == 200)
        response = client.post(CHAT, json={**body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_prompt_and_how_far_it_is_read(renderer: ChatRenderer) -> None:
    client = Client(renderer, [b"x</think>y"])
    reply = client.ask(stream=False, verbose=True)
    assert reply["__verbose"]["prompt"].endswith("<think>\n")
    assert "__verbose" not in client.ask(stream=False)
    body = {
        "messages": [{"role": "user", "content": "hi"}], "stream": True, "return_progress": True,
    }  # fmt: skip
    backend = FakeBackend(Script([b"x</think>y"]), n_ctx=4096, renderer=renderer)
    with TestClient(app_of(backend)) as http:
        until(lambda: http.get("/health").status_code == 200)
        lines = http.post(CHAT, json=body).text.split("\n\n")
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    [progress] = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress["processed"] == progress["cache"] == progress["total"] // 2
    assert progress["time_ms"] >= 0


def test_thinking_may_stay_in_the_content(renderer: ChatRenderer) -> None:
    reply = Client(renderer, [b"so</think>", b"yes"]).ask(stream=False, reasoning_format="none")
    message = reply["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"].endswith("so</think>yes")
