"""One line in the log for each request for a reply, however it ended."""

import asyncio
import threading
from typing import Any

import pytest
from engines import log_records
from server_fake import (
    WAIT_S,
    Call,
    FakeBackend,
    Script,
    acquire,
    app_of,
    ready,
    run,
    running,
    until,
)
from starlette.testclient import TestClient

from kvmem.config import ServerConfig
from kvmem.errors import CapacityError, DecodeError, EngineError, RequestError
from kvmem.server.app import create_app

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "one two three four"}]}
KEYS = ["conversation", "use", "prompt", "hit", "selected", "staged_in", "replayed", "prefill_s",
        "decode_tok_s", "reply", "end", "memory"]  # fmt: skip
REFUSED = ["route", "error", "param"]

Line = dict[str, Any]


def lines_of(records: list[Any]) -> list[Line]:
    """The fields of each line; the keys are the same in all."""
    lines = [record for record in records if record.name == "kvmem.server.request"]
    for record in lines:
        assert list(record.fields) in (KEYS, [*KEYS, *REFUSED])
        assert record.getMessage() == " ".join(f"{k}={v}" for k, v in record.fields.items())
    return [record.fields for record in lines]


def lines_after(backend: FakeBackend, **request: Any) -> list[Line]:
    """Those of one request: path, headers, content or fields of the body."""
    config = request.pop("config", {})
    path, headers = request.pop("path", CHAT), request.pop("headers", {})
    content = request.pop("content", None)
    sent = {"json": {**BODY, **request}} if content is None else {"content": content}
    with (
        TestClient(app_of(backend, **config), raise_server_exceptions=False) as client,
        log_records("kvmem") as records,
    ):
        until(lambda: client.get("/health").status_code == 200)
        client.post(path, headers=headers, **sent)
    return lines_of(records)


@pytest.mark.parametrize("stream", [False, True])
def test_replies_that_end_by_themselves(stream: bool) -> None:
    (line,) = lines_after(FakeBackend(), stream=stream)
    assert (line["end"], line["prompt"], line["hit"], line["reply"]) == ("stop", 4, 2, 2)
    (line,) = lines_after(FakeBackend(), stream=stream, max_tokens=1)
    assert (line["end"], line["reply"]) == ("length", 1)
    (line,) = lines_after(FakeBackend(Script([b"x"] * 100_000)), stream=stream, stop=["xx"])
    assert line["end"] == "stop", "the engine is told to end by the stop text"
    lines = lines_after(FakeBackend(), stream=stream, n=3)
    assert [line["end"] for line in lines] == ["stop"] * 3


@pytest.mark.parametrize("path", [CHAT, "/completion"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [-1, 1])
@pytest.mark.parametrize(
    ("error", "end"),
    [
        (DecodeError("it broke"), "500"),
        (ZeroDivisionError("own"), "500"),
        (CapacityError("the host limit is reached"), "503"),
        (RequestError("no such token"), "400"),
    ],
)
def test_replies_that_end_with_an_error(
    error: Exception, end: str, fail_at: int, stream: bool, path: str
) -> None:
    backend = FakeBackend(Script(error=error, fail_at=fail_at))
    (line,) = lines_after(backend, path=path, prompt="abc", stream=stream)
    # the prompt: four words, or three bytes behind a start token
    assert (line["end"], line["prompt"], line["reply"]) == (end, 4, max(0, fail_at))
    assert (line["use"], line["memory"]) == ("none", "none")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("request_of", "end"),
    [
        ({"max_tokens": "9"}, "400"),
        ({"content": b"{"}, "400"),
        ({"messages": [{"role": "user", "content": "word " * 70}]}, "400"),
        ({"path": "/completion", "prompt": "a" * 70}, "400"),
        ({"path": "/v1/completions"}, "400"),
        ({"path": "/tokenize", "content": b'{"content": true}'}, "400"),
        ({"path": "/v1/messages"}, "404"),
        ({"path": "/health"}, "405"),
        ({"headers": {"Origin": "https://evil.example"}}, "403"),
        ({"headers": {"Host": "evil.example"}}, "403"),
        ({"config": {"api_keys": ("k",)}}, "401"),
    ],
)
def test_requests_that_are_refused(request_of: dict[str, Any], end: str, stream: bool) -> None:
    backend = FakeBackend()
    (line,) = lines_after(backend, stream=stream, **request_of)
    assert (line["end"], line["prompt"], line["use"], line["memory"]) == (end, 0, "none", "none")
    assert backend.params == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("request_of", "told"),
    [
        ({"max_tokens": "9"}, (CHAT, "invalid_request_error", "max_tokens")),
        ({"messages": [{"role": "fiend"}]}, (CHAT, "invalid_request_error", "messages[0]")),
        (
            {"chat_template_kwargs": {"enable_thinking": "x"}},
            (CHAT, "invalid_request_error", "chat_template_kwargs"),
        ),
        ({"content": b"[]"}, (CHAT, "invalid_request_error", "none")),
        (
            {"messages": [{"role": "user", "content": "word " * 70}]},
            (CHAT, "exceed_context_size_error", "none"),
        ),
        ({"path": "/secret"}, ("unknown", "not_found_error", "none")),
        ({"config": {"api_keys": ("k",)}}, (CHAT, "authentication_error", "none")),
    ],
)
def test_a_refusal_tells_where_and_of_what(
    request_of: dict[str, Any], told: tuple[str, ...], stream: bool
) -> None:
    (line,) = lines_after(FakeBackend(), stream=stream, **request_of)
    assert tuple(line[key] for key in REFUSED) == told


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.server.body.MAX_BODY_BYTES", 10)
    (line,) = lines_after(FakeBackend())
    assert line["end"] == "413"


def test_a_fault_of_our_own_before_it_is_queued() -> None:
    class Broken(FakeBackend):
        def render(self, *args: Any, **options: Any) -> Any:
            raise ZeroDivisionError("own")

    (line,) = lines_after(Broken())
    assert line["end"] == "500"


def test_what_asks_for_no_reply_has_no_line() -> None:
    with TestClient(app_of(FakeBackend())) as client, log_records("kvmem") as records:
        until(lambda: client.get("/health").status_code == 200)
        assert client.get("/nothing").status_code == 404
        assert client.post("/tokenize", json={"content": "abc"}).status_code == 200
    assert lines_of(records) == []


def test_while_the_model_loads_and_once_it_cannot_be() -> None:
    may_fail = threading.Event()

    def load(progress: Any) -> FakeBackend:
        assert may_fail.wait(WAIT_S)
        raise EngineError("no memory")

    with (
        TestClient(create_app(load, ServerConfig())) as client,
        log_records("kvmem") as records,
    ):
        client.post(CHAT, json=BODY)
        may_fail.set()
        until(lambda: client.get("/health").status_code == 500)
        client.post(CHAT, json=BODY)
    assert [line["end"] for line in lines_of(records)] == ["503", "500"]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_and_a_queue_that_is_full(stream: bool) -> None:
    backend = FakeBackend(Script(), Script(hold_at=1), Script())
    body = {**BODY, "stream": stream}

    async def test() -> None:
        async with running(app_of(backend, queue_limit=1)) as app:
            await ready(app)
            with log_records("kvmem") as records:
                first = Call(app, body)
                await asyncio.to_thread(acquire, backend.holding)
                queued = Call(app, body)
                await asyncio.to_thread(until, lambda: len(backend.requests) == 3)
                refused = Call(app, body)
                await refused.task
                queued.hang_up()
                await queued.task
                first.hang_up()
                await first.task
                await asyncio.to_thread(until, lambda: len(lines_of(records)) == 3)
            refusal, left, cancelled = lines_of(records)
            assert (refusal["end"], refusal["prompt"]) == ("503", 0)
            assert (left["end"], left["prompt"], left["reply"]) == ("left", 4, 0)
            assert (cancelled["end"], cancelled["prompt"], cancelled["reply"]) == (
                "cancelled",
                4,
                1,
            )

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_replies_that_do_not_all_find_a_place(stream: bool) -> None:
    """None is queued, so the one line is that of the 503."""
    backend = FakeBackend(Script(), Script(hold_at=1), Script())

    async def test() -> None:
        async with running(app_of(backend, queue_limit=3)) as app:
            await ready(app)
            first = Call(app, BODY)
            await asyncio.to_thread(acquire, backend.holding)
            queued = Call(app, {**BODY, "stream": True})
            await queued.until(lambda: queued.status == 200)
            with log_records("kvmem") as records:
                refused = Call(app, {**BODY, "n": 3, "stream": stream})
                await refused.task
                assert b"1 requests wait already" in refused.body
                (line,) = lines_of(records)
                assert (line["end"], line["prompt"]) == ("503", 0)
            first.hang_up()
            queued.hang_up()
            await asyncio.gather(first.task, queued.task)

    run(test())
    (line,) = lines_after(FakeBackend(), config={"queue_limit": 2}, n=3, stream=stream)
    assert line["end"] == "400", "they would never find places"


def test_a_client_that_leaves_while_it_sends() -> None:
    async def test() -> None:
        async with running(app_of(FakeBackend())) as app:
            await ready(app)
            with log_records("kvmem") as records:
                call = Call(app, BODY, is_cut=True)
                call.hang_up()
                await call.task
            (line,) = lines_of(records)
            assert (line["end"], line["prompt"]) == ("left", 0)
            assert not any(record.exc_info for record in records), "that is no fault"

    run(test())


def test_a_server_that_stops() -> None:
    backend = FakeBackend(Script(), Script(hold_at=1), Script())

    async def test() -> None:
        with log_records("kvmem") as records:
            async with running(app_of(backend)) as app:
                await ready(app)
                records.clear()
                first = Call(app, {**BODY, "stream": True})
                await asyncio.to_thread(acquire, backend.holding)
                queued = Call(app, {**BODY, "stream": True})
                await queued.until(lambda: queued.status == 200)
                app.state.halt()
                late = Call(app, BODY)
                await asyncio.gather(first.task, queued.task, late.task)
            ends = [(line["end"], line["reply"]) for line in lines_of(records)]
        assert sorted(ends) == [("503", 0), ("stopped", 0), ("stopped", 1)]

    run(test())
