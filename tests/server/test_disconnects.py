"""Clients that hang up, or stop reading: what they asked for ends, and others go on."""

import asyncio
import logging

import pytest
from server_fake import (
    ENDLESS,
    Call,
    FakeBackend,
    Script,
    acquire,
    app_of,
    body,
    ready,
    run,
    running,
    until,
)
from starlette.testclient import TestClient


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
            await asyncio.to_thread(until, lambda: len(backend.ends) == 3)  # ready()'s with them
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
