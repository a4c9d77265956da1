"""What goes over the wire, byte for byte where clients care, against a scripted engine."""

import json
import logging
import re
import socket
import threading
from typing import Any

import httpx2
import pytest
import uvicorn
from server_fake import FakeBackend, Script, app_of, until
from starlette.testclient import TestClient

from kvmem.chat.request import RequestDefaults
from kvmem.config import ServerConfig
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import CapacityError, ConfigError, DecodeError, RequestError
from kvmem.server.app import create_app
from kvmem.server.errors import error_body

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "one two three four"}]}


def client_of(backend: FakeBackend, **config: Any) -> TestClient:
    client = TestClient(app_of(backend, **config), raise_server_exceptions=False)
    client.__enter__()
    until(lambda: client.get("/health").status_code == 200)
    return client


def post(backend: FakeBackend, **fields: Any) -> Any:
    client = client_of(backend)
    try:
        return client.post(CHAT, json={**BODY, **fields})
    finally:
        client.__exit__(None, None, None)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each data line before [DONE], which must be last."""
    lines = [line for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_whole_reply() -> None:
    response = post(FakeBackend())
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert re.fullmatch(r"b\d+-kvmem", body.pop("system_fingerprint"))
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world"},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "prompt_cache_hit_tokens": 2,
            "prompt_cache_miss_tokens": 2,
        },
        "timings": {
            "cache_n": 2,
            "prompt_n": 2,
            "prompt_ms": 500.0,
            "prompt_per_token_ms": 250.0,
            "prompt_per_second": 4.0,
            "predicted_n": 2,
            "predicted_ms": 250.0,
            "predicted_per_token_ms": 250.0,
            "predicted_per_second": 4.0,
        },
    }


def test_the_order_of_a_stream() -> None:
    response = post(FakeBackend(), stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith(":\n\n")
    chunks = chunks_of(response.text)
    role, *said, end, usage = (chunk["choices"] for chunk in chunks)
    assert role == [
        {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
    ]
    # tokens that wait for a slow reader come together
    assert "".join(choice["delta"]["content"] for [choice] in said) == "Hello world"
    assert all(choice["finish_reason"] is None for [choice] in said)
    assert end == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert usage == []
    for name in ("id", "created", "model", "object"):
        assert len({json.dumps(chunk[name]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    whole = post(FakeBackend()).json()
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["timings"] == whole["timings"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_replies_count_their_prompt_once(stream: bool) -> None:
    """As OpenAI has it; what is said counts for each."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = post(FakeBackend(), n=3, **options)
    usage = (chunks_of(response.text)[-1] if stream else response.json())["usage"]
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_cache_hit_tokens": 2,
        "prompt_cache_miss_tokens": 2,
    }


def test_several_prompts_count_once_each() -> None:
    client = client_of(FakeBackend())
    body = {"prompt": ["abc", "defgh"], "n": 2, "max_tokens": 2}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    client.__exit__(None, None, None)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        10,
        8,
        18,
    )


def test_without_include_usage_no_chunk_has_usage() -> None:
    chunks = chunks_of(post(FakeBackend(), stream=True).text)
    assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)
    assert "timings" in chunks[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_memory_report_comes_when_asked_for(stream: bool) -> None:
    def last(**fields: Any) -> dict[str, Any]:
        response = post(FakeBackend(), stream=stream, **fields)
        result: dict[str, Any] = chunks_of(response.text)[-1] if stream else response.json()
        return result

    assert last(kvmem=True)["kvmem"]["decision"] == "off"
    assert "times" in last(kvmem=True)["kvmem"]
    assert "kvmem" not in last()


def test_characters_are_never_cut() -> None:
    text = "a🙂日"
    pieces = [bytes([byte]) for byte in text.encode()]
    assert post(FakeBackend(Script(pieces))).json()["choices"][0]["message"]["content"] == text
    chunks = chunks_of(post(FakeBackend(Script(pieces)), stream=True).text)
    parts = [c["choices"][0]["delta"]["content"] for c in chunks[1:-1]]
    assert "".join(parts) == text
    assert all(parts)


def test_a_reply_that_ends_inside_a_character() -> None:
    pieces = [b"a", "é".encode()[:1]]
    whole = post(FakeBackend(Script(pieces))).json()
    chunks = chunks_of(post(FakeBackend(Script(pieces)), stream=True).text)
    assert whole["choices"][0]["message"]["content"] == "a"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [{"content": "a"}, {}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_reply_and_the_work(stream: bool) -> None:
    backend = FakeBackend(Script([b"one ST", b"OP", b" two"] + [b"more"] * 1000))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = post(backend, stop=["STOP"], **options)
    if stream:
        *chunks, last = chunks_of(response.text)
        usage = last["usage"]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        usage = response.json()["usage"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one ", "stop")
    assert usage["completion_tokens"] == 2, "however many were decoded before the cancel"
    assert backend.ends in (["cancelled"], ["stop"])  # the script may be faster than the cancel


def test_an_empty_reply_has_an_empty_content() -> None:
    choice = post(FakeBackend(), max_tokens=0).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "length"
    chunks = chunks_of(post(FakeBackend(), max_tokens=0, stream=True).text)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": None},
        {},
    ]


def test_defaults_and_fields_reach_the_engine() -> None:
    backend = FakeBackend()
    defaults = RequestDefaults(sampling=SamplingParams(temperature=0.5), max_tokens=9)
    with TestClient(app_of(backend, defaults=defaults)) as client:
        until(lambda: client.get("/health").status_code == 200)
        client.post(CHAT, json=BODY)
        client.post(CHAT, json={**BODY, "temperature": 0, "max_tokens": 5, "model": "any"})
    assert [(p.sampling.temperature, p.max_tokens) for p in backend.params] == [(0.5, 9), (0.0, 5)]
    assert backend.closed


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_routes_with_and_without_v1(prefix: str) -> None:
    client = client_of(FakeBackend())
    assert client.get(f"{prefix}/health").json() == {"status": "ok"}
    assert client.post(f"{prefix}/chat/completions", json=BODY).status_code == 200
    models = client.get(f"{prefix}/models").json()
    client.__exit__(None, None, None)
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["object"] == "model"
    assert models["data"][0]["meta"]["n_ctx"] == 64
    assert models["data"][0]["architecture"]["input_modalities"] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_workspace(stream: bool) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 70}], "stream": stream}
    backend = FakeBackend()
    response = post(backend, **long)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (400, 70, 64)
    assert "70 tokens" in error["message"] and "64 tokens" in error["message"]
    assert backend.params == []  # the engine was not troubled


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": []}, "messages", "messages must be a list with at least one message"),
        ({**BODY, "max_tokens": "9"}, "max_tokens", "must be an integer, not a string"),
        ({**BODY, "stream": 1}, "stream", "stream must be true or false"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(body: dict[str, Any], param: str, text: str) -> None:
    client = client_of(FakeBackend())
    response = client.post(CHAT, json=body)
    client.__exit__(None, None, None)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and text in error["message"]


def test_half_a_character_is_replaced() -> None:
    """What JavaScript sends of a text that it cut inside a surrogate pair."""
    backend = FakeBackend()
    half, whole = r"\ud83d", r"\ud83d\ude00"
    hints = f'"stop": "{half}", "kvmem": {{"conversation_id": "{half}"}}'
    body = f'{{"messages": [{{"role": "user", "content": "{half}a{whole}"}}], {hints}}}'
    client = client_of(backend)
    assert client.post(CHAT, content=body).status_code == 200
    refused = client.post(CHAT, content=f'{{"messages": "{half}"}}')
    client.__exit__(None, None, None)
    assert refused.status_code == 400
    (asked,) = backend.requests
    assert asked.messages[0].text == "\ufffda\U0001f600"
    assert asked.stop == (asked.conversation_id,) == ("\ufffd",)


def test_http_faults_are_json() -> None:
    client = client_of(FakeBackend())
    found = []
    for method, path, content in (
        ("GET", "/v1/nothing", None),
        ("GET", CHAT, None),
        ("POST", CHAT, b"{"),
        ("POST", CHAT, b"[" * 100_000),
    ):
        response = client.request(method, path, content=content)
        error = response.json()["error"]
        assert error["code"] == response.status_code
        found.append((response.status_code, error["type"]))
    client.__exit__(None, None, None)
    assert found == [
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (400, "invalid_request_error"),
        (400, "invalid_request_error"),
    ]


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.server.body.MAX_BODY_BYTES", 10)
    assert post(FakeBackend()).status_code == 413


def test_what_was_held_back_is_said_before_the_error() -> None:
    script = Script(pieces=(b"Hello ", b"wor", b"l"), error=DecodeError("it broke"), fail_at=2)
    response = post(FakeBackend(script), stream=True, stop=["world!"])
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last == error_body(DecodeError("it broke"))
    said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(said) == "Hello wor"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("no such token"), 400, "invalid_request_error"),
        (CapacityError("the host limit is reached"), 503, "unavailable_error"),
        (DecodeError("it broke"), 500, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
    ],
)
def test_a_fault_before_the_first_token_is_a_plain_error(
    error: Exception, status: int, kind: str, stream: bool
) -> None:
    response = post(FakeBackend(Script(error=error, fail_at=-1)), stream=stream)
    body = response.json()["error"]
    assert (response.status_code, body["type"]) == (status, kind)
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


def test_a_fault_within_a_stream_is_its_last_line() -> None:
    response = post(FakeBackend(Script(error=DecodeError("it broke"), fail_at=1)), stream=True)
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert json.loads(lines[-1].removeprefix("data: ")) == error_body(DecodeError("it broke"))
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("path", [CHAT, "/completion"])
def test_a_fault_of_our_own_within_a_stream_is_logged(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, piece: bytes) -> str:
        raise ZeroDivisionError("of the reader")

    monkeypatch.setattr("kvmem.chat.stream.ReplyText.feed", broken)
    monkeypatch.setattr(logging.getLogger("kvmem"), "propagate", True)
    client = client_of(FakeBackend())
    text = client.post(path, json={**BODY, "prompt": "x", "stream": True}).text
    client.__exit__(None, None, None)
    assert "internal error; the log has it" in text and "of the reader" not in text
    assert "of the reader" in caplog.text


def test_a_fault_of_the_engine_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("kvmem"), "propagate", True)
    for stream in (False, True):
        caplog.clear()
        response = post(
            FakeBackend(Script(error=ZeroDivisionError("own"), fail_at=1)), stream=stream
        )
        assert "internal error; the log has it" in response.text and "own" not in response.text
        assert [record.message for record in caplog.records if record.exc_info] == [
            "a request failed"
        ]


def test_a_fault_of_a_handler_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeBackend):
        def describe(self) -> dict[str, Any]:
            raise ZeroDivisionError("own")

    monkeypatch.setattr(logging.getLogger("kvmem"), "propagate", True)
    server = uvicorn.Server(uvicorn.Config(app_of(Broken()), log_config=None, port=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        until(lambda: server.started)
        until(lambda: httpx2.get(f"{url}/health").status_code == 200)
        response = httpx2.get(f"{url}/v1/models")
        server.should_exit = True
        thread.join()
    assert response.json()["error"]["message"] == "internal error; the log has it"
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None and record.exc_info[1] is not None
    assert record.exc_info[1].__notes__ == ["while answering GET /v1/models"]


def test_one_model_by_its_name() -> None:
    client = client_of(FakeBackend())
    (listed,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/tiny").json() == listed
    missing = client.get("/models/other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    client.__exit__(None, None, None)


def test_keys_open_every_route_but_health() -> None:
    client = client_of(FakeBackend(), api_keys=("k1", "k2", "gr\xfcn", "ключ"))
    assert client.get("/health").status_code == 200
    answers = [
        client.get("/v1/models", headers=headers).status_code
        for headers in (
            {},
            {"Authorization": "Bearer k1"},
            {"Authorization": "bearer k2"},
            {"X-Api-Key": "k2"},
            {b"Authorization": "Bearer gr\xfcn".encode()},
            {b"Authorization": b"Bearer gr\xfcn"},
            {b"Authorization": "Bearer ключ".encode()},
            {b"Authorization": b"Bearer "},
            {"Authorization": "Bearer k3"},
            {"Authorization": "Basic k1"},
            {"X-Api-Key": ""},
        )
    ]
    refused = client.post(CHAT, json=BODY).json()["error"]
    client.__exit__(None, None, None)
    assert answers == [401, 200, 200, 200, 200, 200, 200, 401, 401, 401, 401]
    assert (refused["code"], refused["type"]) == (401, "authentication_error")


def test_any_key_will_do_where_none_is_set() -> None:
    client = client_of(FakeBackend())
    assert client.get("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 200
    client.__exit__(None, None, None)


def test_a_model_that_cannot_be_loaded() -> None:
    failures: list[BaseException] = []

    def load(progress: object) -> FakeBackend:
        raise ConfigError("budget_tokens", 1, "more")

    app = create_app(load, ServerConfig(), on_failure=failures.append)
    with TestClient(app) as client:
        until(lambda: failures)
        response = client.get("/health")
    assert response.status_code == 500
    assert "budget_tokens is 1, but must be more" in response.json()["error"]["message"]


def test_several_replies_to_one_request() -> None:
    scripts = [Script([b"one"]), Script([b"two"])]
    body = post(FakeBackend(*scripts), n=2).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
        (0, "one"), (1, "two")
    ]  # fmt: skip
    assert body["usage"]["completion_tokens"] == 2 and body["usage"]["prompt_tokens"] == 4
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(post(FakeBackend(*scripts), n=2, **wanted).text)
    assert [[c["index"] for c in chunk["choices"]] for chunk in chunks] == [
        [0], [0], [0], [1], [1], [1], []
    ]  # fmt: skip
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_replies_to_one_request_have_seeds_of_their_own() -> None:
    backend = FakeBackend()
    post(backend, n=3, seed=(1 << 32) - 2)
    assert [params.sampling.seed for params in backend.params] == [(1 << 32) - 2, (1 << 32) - 1, 0]


def test_progress_and_timings_on_the_way() -> None:
    wanted = {"stream": True, "return_progress": True, "timings_per_token": True}
    role, first, *others = chunks_of(post(FakeBackend(), **wanted).text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in role and "prompt_progress" not in role
    progress = first["prompt_progress"]
    assert {name: progress[name] for name in ("total", "cache", "processed")} == {
        "total": 4, "cache": 2, "processed": 2
    }  # fmt: skip
    assert first["timings"]["prompt_n"] == 0 and first["timings"]["prompt_ms"] == 0.0
    said = [chunk["timings"]["predicted_n"] for chunk in others if chunk["choices"][0]["delta"]]
    assert said[-1] == 2
    plain = chunks_of(post(FakeBackend(), stream=True).text)
    assert not any("prompt_progress" in chunk or "timings" in chunk for chunk in plain[:-1])


def test_the_prompt_is_shown_to_who_wants_it() -> None:
    assert post(FakeBackend(), verbose=True).json()["__verbose"] == {"prompt": "one two three four"}
    assert "__verbose" not in post(FakeBackend()).json()
