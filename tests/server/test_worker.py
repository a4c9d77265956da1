"""Order, signs of life and shutdown: what happens while several clients wait."""

import asyncio
import json
import threading
from typing import Any

import pytest
from engines import log_records
from server_fake import (
    ENDLESS,
    WAIT_S,
    Call,
    FakeBackend,
    Script,
    acquire,
    app_of,
    arrived,
    body,
    ready,
    run,
    running,
    until,
)
from starlette.testclient import TestClient

from kvmem.config import ServerConfig
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import EngineError
from kvmem.server.app import create_app
from kvmem.server.fair_queue import FairQueue
from kvmem.server.worker import EngineWorker


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_headers_and_comments_come_before_the_first_token(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.SILENCE_S", 0.01)
    script = Script(hold_at=0)

    async def test() -> None:
        async with running(app_of(FakeBackend(Script(), script))) as app:
            await ready(app)
            call = Call(app, body(prompt="x", stream=True), path=path)
            await call.until(lambda: call.body.count(b":\n\n") >= 2 * WAIT_S)
            assert call.status == 200
            assert b"data:" not in call.body
            script.release.set()
            await call.task
            assert call.body.endswith(b"data: [DONE]\n\n")

    run(test())


def test_requests_run_one_at_a_time_in_their_order() -> None:
    order: list[str] = []

    class Recording(FakeBackend):
        busy = threading.Lock()

        def generate(self, prompt: Any, params: Any, cancel: Any) -> Any:
            assert self.busy.acquire(blocking=False)
            try:
                order.append(str(len(prompt.tokens)))
                yield from super().generate(prompt, params, cancel)
            finally:
                self.busy.release()

    async def test() -> None:
        gate = Script(hold_at=0)
        backend = Recording(Script(), gate, Script())
        async with running(app_of(backend)) as app:
            await ready(app)
            order.clear()
            calls = []
            for n in range(3, 8):  # the warm-up had two words: these are other sessions
                calls.append(Call(app, body("w " * n, stream=n % 2 == 0)))
                await asyncio.to_thread(until, arrived(backend, n - 1))
                await asyncio.sleep(0)
            gate.release.set()
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200] * 5

    run(test())
    assert order == ["3", "4", "5", "6", "7"]


FIRST = {"role": "user", "content": "one two"}
LATER = [{"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
OTHER = {"role": "user", "content": "another one that is longer"}


@pytest.mark.parametrize(
    ("own", "other", "order"),
    [
        # sessions take turns: the other one is second, though it comes last
        ({"messages": [FIRST, *LATER]}, {"messages": [OTHER]}, [1, 9, 2, 3]),
        ({"kvmem": {"conversation_id": "a"}}, {"kvmem": {"conversation_id": "b"}}, [1, 9, 2, 3]),
        # one session: by arrival, also where its id alone says so, and where one message does
        ({"messages": [FIRST, *LATER]}, {"messages": [FIRST]}, [1, 2, 3, 9]),
        (
            {"kvmem": {"conversation_id": "a"}},
            {"kvmem": {"conversation_id": "a"}, "messages": [OTHER]},
            [1, 2, 3, 9],
        ),
    ],
)
def test_sessions_take_turns(own: dict[str, Any], other: dict[str, Any], order: list[int]) -> None:
    gate = Script(hold_at=0)
    backend = FakeBackend(Script(), gate, Script())

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            del backend.params[:]
            calls = []
            for n, fields in ((1, own), (2, own), (3, own), (9, other)):
                calls.append(Call(app, body(max_tokens=n, **fields)))
                await asyncio.to_thread(until, arrived(backend, len(calls) + 1))
                if n == 1:
                    await asyncio.to_thread(acquire, backend.holding)
                await asyncio.sleep(0.01)
            gate.release.set()
            await asyncio.gather(*(call.task for call in calls))
            assert [params.max_tokens for params in backend.params] == order

    run(test())


def test_a_full_queue_is_a_503_that_says_when() -> None:
    gate = Script(hold_at=0)
    backend = FakeBackend(Script(), gate, Script())

    async def test() -> None:
        async with running(app_of(backend, queue_limit=1)) as app:
            await ready(app)
            held = Call(app, body())
            await asyncio.to_thread(acquire, backend.holding)
            queued = Call(app, body(stream=True))
            await queued.until(lambda: queued.status == 200)
            refused = Call(app, body())
            await refused.task
            assert refused.status == 503
            assert b"1 requests wait already" in refused.body
            gate.release.set()
            await asyncio.gather(held.task, queued.task)

    run(test())


def test_a_halt_answers_who_runs_who_waits_and_who_comes() -> None:
    backend = FakeBackend(Script(), Script(hold_at=1), Script())

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            stream = Call(app, body(stream=True))
            await stream.until(lambda: b"Hello" in stream.body)
            waiting = [Call(app, body(stream=True)), Call(app, body())]
            await waiting[0].until(lambda: waiting[0].status == 200)
            app.state.halt()
            late = Call(app, body())
            await asyncio.gather(*(call.task for call in (stream, *waiting, late)))
            for call in (stream, waiting[0]):
                assert b'"the server is stopping","type":"unavailable_error"' in call.body
            assert [call.status for call in (waiting[1], late)] == [503, 503]
            assert not backend.closed, "what counts tokens goes on until the connections are closed"
        assert backend.closed

    run(test())


PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/apply-template")


@pytest.mark.parametrize("path", PATHS)
def test_a_halt_waits_for_no_body(path: str) -> None:
    async def test() -> None:
        async with running(app_of(FakeBackend())) as app:
            await ready(app)
            with log_records("kvmem") as records:
                call = Call(app, body(), path=path, is_cut=True)
                await asyncio.sleep(0.01)
                assert not call.task.done()
                app.state.halt()
                late = Call(app, body(), path=path, is_cut=True)
                for one in (call, late):
                    await one.task
                    error = json.loads(one.body)["error"]
                    assert (one.status, error["type"]) == (503, "unavailable_error")
                    assert error["message"] == "the server is stopping"
            ends = [record.__dict__["fields"]["end"] for record in records]
            assert ends == ["503", "503"]
        assert not app.state.is_in_use()

    run(test())


def test_who_comes_while_the_engine_fails_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, may_fail, failed = threading.Event(), threading.Event(), threading.Event()

    def announce(backend: object) -> None:
        loaded.set()
        assert may_fail.wait(WAIT_S)
        raise EngineError("it broke")

    put = FairQueue.put

    def put_late(*args: Any) -> None:
        may_fail.set()
        assert failed.wait(WAIT_S)
        put(*args)

    async def test() -> None:
        worker = EngineWorker(
            lambda _: FakeBackend(), on_ready=announce, on_failure=lambda _: failed.set()
        )
        worker.start()
        assert await asyncio.to_thread(loaded.wait, WAIT_S)
        monkeypatch.setattr(FairQueue, "put", put_late)
        with pytest.raises(EngineError, match="it broke"):
            worker.submit([(Prompt(tokens=(1, 2)), GenerateParams())])
        await asyncio.to_thread(worker.stop)

    run(test())


def test_503_while_loading_and_no_wait_for_it() -> None:
    may_load = threading.Event()
    backend = FakeBackend()

    def load(progress: Any) -> FakeBackend:
        progress(0.25)
        assert may_load.wait(WAIT_S)
        return backend

    with TestClient(create_app(load, ServerConfig())) as client:
        until(lambda: "25%" in client.get("/health").text)
        for method, path in (
            ("GET", "/health"),
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
        ):
            response = client.request(method, path, json=body() if method == "POST" else None)
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (503, "unavailable_error")
            assert error["message"] == "the model is loading (25%)"
            assert "retry-after" in response.headers
        may_load.set()
        until(lambda: client.get("/health").status_code == 200)
    assert backend.closed


def test_a_stop_ends_the_loading() -> None:
    entered = threading.Event()

    def load(progress: Any) -> FakeBackend:
        entered.set()
        while True:
            progress(0.5)

    failures: list[BaseException] = []
    with TestClient(create_app(load, ServerConfig(), on_failure=failures.append)):
        assert entered.wait(WAIT_S)
    assert failures == []  # stopping is no failure


def test_a_stop_answers_all_who_wait() -> None:
    backend = FakeBackend(Script(), Script(ENDLESS, hold_at=0))

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            held = Call(app, body(stream=True))
            await asyncio.to_thread(acquire, backend.holding)
            queued = Call(app, body())
            await asyncio.to_thread(until, lambda: len(backend.requests) == 3)
            await asyncio.sleep(0)
        await asyncio.gather(held.task, queued.task)
        assert b"unavailable_error" in held.body
        assert (queued.status, backend.closed) == (503, True)

    run(test())


def test_a_start_that_cannot_be_announced_is_a_failure() -> None:
    """Where nobody serves, nobody may wait."""
    backend = FakeBackend()
    failures: list[BaseException] = []

    def announce(loaded: object) -> None:
        raise BrokenPipeError("nobody reads")

    app = create_app(
        lambda progress: backend, ServerConfig(), on_ready=announce, on_failure=failures.append
    )
    with TestClient(app) as client:
        until(lambda: failures)
        assert client.post("/v1/chat/completions", json=body()).status_code == 500
        assert client.get("/health").status_code == 500
    assert backend.closed
