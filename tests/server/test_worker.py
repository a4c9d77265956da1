"""Order, cancel and shutdown: what happens while several clients come and go."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter
from engines import log_records
from server_fake import WAIT_S, Call, FakeBackend, Script, acquire, app_of, running, until
from starlette.testclient import TestClient

from kvmem.config import ServerConfig
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import ContextLengthError, EngineError
from kvmem.server.app import create_app
from kvmem.server.fair_queue import FairQueue
from kvmem.server.worker import EngineWorker

ENDLESS = [b"x"] * 10_000


def body(text: str = "one two", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await test

    asyncio.run(limited())


async def ready(app: Any) -> None:
    """The worker has loaded its backend: a request is served."""
    while (call := Call(app, body(max_tokens=0))).status != 200:
        await call.task
        if call.status == 200:
            return


def test_headers_and_comments_come_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.SILENCE_S", 0.01)
    script = Script(hold_at=0)

    async def test() -> None:
        async with running(app_of(FakeBackend(Script(), script))) as app:
            await ready(app)
            call = Call(app, body(stream=True))
            await call.until(lambda: call.body.count(b":\n\n") >= 2 * WAIT_S)
            assert call.status == 200
            assert b"data:" not in call.body
            script.release.set()
            await call.task
            assert call.body.endswith(b"data: [DONE]\n\n")

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_hanging_up_ends_reading_and_decoding(hold_at: int, stream: bool) -> None:
    """The script waits at a token until it is cancelled: without a cancel the test times out."""
    backend = FakeBackend(Script(), Script(ENDLESS, hold_at=hold_at), Script())

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            call = Call(app, body(stream=stream))
            await asyncio.to_thread(acquire, backend.holding)
            call.hang_up()
            await asyncio.to_thread(until, lambda: len(backend.ends) == 2)
            assert backend.ends[1] == "cancelled"
            await call.task
            after = Call(app, body())
            await after.task
            assert b"Hello world" in after.body

    run(test())


def test_a_client_that_stops_reading_does_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmem.server.event_stream.STALLED_S", 0.05)
    monkeypatch.setattr("kvmem.server.event_stream.SILENCE_S", 0.01)
    monkeypatch.setattr(logging.getLogger("kvmem"), "propagate", True)
    backend = FakeBackend(Script(), Script(ENDLESS, hold_at=5), Script())

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            stalled = Call(app, body(stream=True))
            await stalled.until(lambda: bool(stalled.body))
            stalled.reads.clear()
            other = Call(app, body())
            await asyncio.gather(stalled.task, other.task)
            assert backend.ends[-2:] == ["cancelled", "stop"]
            assert other.status == 200
            assert "left unread" in caplog.text

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_while_queued_means_never_running(stream: bool) -> None:
    first = Script(hold_at=0)
    backend = FakeBackend(Script(), first, Script())

    async def test() -> None:
        async with running(app_of(backend)) as app:
            await ready(app)
            running_call = Call(app, body())
            await asyncio.to_thread(acquire, backend.holding)
            queued = Call(app, body("two", stream=stream))
            await asyncio.to_thread(until, lambda: len(backend.requests) == 3)
            queued.hang_up()
            await queued.task
            first.release.set()
            await running_call.task
            last = Call(app, body("three"))
            await last.task
            assert last.status == 200
            assert len(backend.params) == 3  # warm-up, first, last

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_leaves_the_queue_while_another_still_runs(stream: bool) -> None:
    gate = Script(hold_at=0)
    backend = FakeBackend(Script(), gate, Script())

    async def test() -> None:
        app = app_of(backend)
        async with running(app) as served:
            await ready(served)
            first = Call(served, body("one"))
            await asyncio.to_thread(acquire, backend.holding)
            queued = Call(served, body("two words", stream=stream))
            await asyncio.to_thread(until, lambda: len(backend.requests) == 3)
            client = TestClient(app)  # without a start of its own

            def is_waiting(n: int) -> bool:
                return bool(client.get("/slots").json()[0]["kvmem"]["n_waiting"] == n)

            await asyncio.to_thread(until, lambda: is_waiting(1))
            queued.hang_up()
            await queued.task
            await asyncio.to_thread(until, lambda: is_waiting(0))
            assert not first.task.done()
            gate.release.set()
            await first.task

    run(test())


def arrived(backend: FakeBackend, n: int) -> Callable[[], bool]:
    return lambda: len(backend.requests) == n


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
