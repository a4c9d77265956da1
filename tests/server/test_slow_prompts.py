"""Prompts that take long to render: what clients see meanwhile, and a stop."""

import asyncio
import json
import threading
from time import monotonic
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter
from engines import log_records
from server_fake import WAIT_S, Call, FakeBackend, Script, app_of, body, ready, run, running, until
from starlette.testclient import TestClient

from kvmem.errors import ContextLengthError


class SlowBackend(FakeBackend):
    """Renders when it is told to."""

    def __init__(self, *scripts: Script, error: Exception | None = None) -> None:
        super().__init__(*scripts)
        self.is_slow = False
        self.may_render = threading.Event()
        self.error = error

    def _wait(self) -> None:
        if self.is_slow:
            assert self.may_render.wait(WAIT_S)
            if self.error is not None:
                raise self.error

    def render(self, request: Any, *, limit_tokens: int | None = None) -> Any:
        rendered = super().render(request, limit_tokens=limit_tokens)
        self._wait()
        return rendered

    def render_completion(self, request: Any) -> Any:
        self._wait()
        return super().render_completion(request)


PATHS = ("/v1/chat/completions", "/completion")


@pytest.mark.alone
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_begins_while_its_prompt_is_rendered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.SILENCE_S", 0.01)
    backend = SlowBackend()

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            backend.is_slow = True
            began = monotonic()
            call = Call(app, body(prompt="x", stream=True), path=path)
            await call.until(lambda: call.body.count(b":\n\n") >= 3)
            assert monotonic() - began < 1.5, "0.7 s, and what the machine adds"
            assert (call.status, len(backend.params)) == (200, 1)
            assert b"data:" not in call.body
            backend.may_render.set()
            await call.task
            assert b"Hello" in call.body and b"error" not in call.body

    run(test())


@pytest.mark.parametrize("path", PATHS)
def test_what_is_wrong_with_a_prompt_that_takes_long_ends_its_stream(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.HEADERS_S", 0.01)
    backend = SlowBackend(error=ContextLengthError(70, 64))

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            backend.is_slow = True
            with log_records("kvmem.server.request") as records:
                call = Call(app, body(prompt="x", stream=True), path=path)
                await call.until(lambda: bool(call.body))
                backend.may_render.set()
                await call.task
            *_, last = call.body.decode().split("\n\n")[:-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (70, 64)
            assert [record.__dict__["fields"]["end"] for record in records] == ["400"]

    run(test())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_while_the_prompt_is_rendered_is_never_queued(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.HEADERS_S", 0.01)
    backend = SlowBackend()

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            backend.is_slow = True
            with log_records("kvmem.server.request") as records:
                call = Call(app, body(prompt="x", stream=stream), path=path)
                if stream:
                    await call.until(lambda: bool(call.body))
                call.hang_up()
                await asyncio.sleep(0.05)
                assert not call.task.done(), "what it renders with must stay open"
                backend.may_render.set()
                await call.task
            assert len(backend.params) == 1
            assert [record.__dict__["fields"]["end"] for record in records] == ["left"]

    run(test())


def test_a_stop_waits_for_no_thread_that_renders_or_is_waited_for() -> None:
    backend = SlowBackend()

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            threads = current_default_thread_limiter()
            threads.total_tokens = 1
            backend.is_slow = True
            calls = [Call(app, body(prompt="x")) for _ in range(2)]
            while len(backend.requests) < 2:  # one was made to be ready
                await asyncio.sleep(0.01)
            app.state.halt()
            for call in calls:
                await call.task
                assert call.status == 503
        assert app.state.is_in_use()
        backend.may_render.set()
        while threads.borrowed_tokens or threads.statistics().tasks_waiting:
            await asyncio.sleep(0.01)

    run(test())
    assert len(backend.requests) == 2, "the second call is not rendered any more"
    assert not backend.closed, "the process ends with it"


def test_several_replies_are_rendered_once() -> None:
    backend = FakeBackend()
    with TestClient(app_of(backend)) as client:
        until(lambda: client.get("/health").status_code == 200)
        for stream in (False, True):
            assert client.post(PATHS[0], json=body(n=5, stream=stream)).status_code == 200
    assert (len(backend.requests), len(backend.params)) == (2, 10)
