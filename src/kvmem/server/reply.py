"""From engine events to what a client sees: text, the end, and signs of life in between."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvmem.chat.stream import ReplyText
from kvmem.engine.events import Done, Event, TokenEvent
from kvmem.errors import Cancelled
from kvmem.server import sse
from kvmem.server.errors import error_body
from kvmem.server.sse import ReplyShape
from kvmem.server.worker import Generation

__all__ = ["EventStream", "cancel_on_disconnect", "first_event", "read_whole"]

# Node clients give up after minutes of silence, proxies after one; llama-server sends every second.
SILENCE_S = 1.0

# Errors of the first moments are plain HTTP errors; after that the stream has begun.
FIRST_EVENT_S = 0.2


async def first_event(generation: Generation) -> Event | None:
    """The first event, or None if it takes longer. Raises what the engine raised."""
    try:
        return await generation.next(FIRST_EVENT_S)
    except BaseException:
        generation.cancel()
        raise


@asynccontextmanager
async def cancel_on_disconnect(request: Request, generation: Generation) -> AsyncIterator[None]:
    """Cancels the generation when the client goes. The body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def read_whole(generation: Generation, stops: Sequence[str]) -> tuple[str, Done]:
    """Text and end of a reply. Raises Cancelled where it was cut short by someone else."""
    parts: list[str] = []
    async for item in _read(generation, stops, None):
        if isinstance(item, Done):
            return "".join(parts), item
        parts.append(item)
    raise Cancelled("the reply was cut short")


class EventStream(StreamingResponse):
    """A reply as server-sent events. However it ends, the generation ends with it."""

    def __init__(
        self,
        generation: Generation,
        first: Event | None,
        shape: ReplyShape,
        stops: Sequence[str],
    ) -> None:
        self._generation = generation
        super().__init__(
            _events(generation, first, shape, stops),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _events(
    generation: Generation, first: Event | None, shape: ReplyShape, stops: Sequence[str]
) -> AsyncIterator[bytes]:
    yield sse.COMMENT  # headers go out with it
    began = False
    try:
        async for item in _read(generation, stops, first, ticks=True):
            if not began and item != "":
                began = True
                yield sse.encode(shape.role())
            if isinstance(item, Done):
                for chunk in shape.last(item):
                    yield sse.encode(chunk)
                yield sse.END
            else:
                yield sse.encode(shape.content(item)) if item else sse.COMMENT
    except Exception as error:
        yield sse.encode(error_body(error))


async def _read(
    generation: Generation, stops: Sequence[str], first: Event | None, *, ticks: bool = False
) -> AsyncIterator[str | Done]:
    """Texts, and last the Done; with `ticks` an empty text for each second of silence."""
    reply = ReplyText(stops)
    event = first
    told = monotonic()
    while True:
        if event is None:
            event = await generation.next(max(0.0, told + SILENCE_S - monotonic()))
        text = ""
        if isinstance(event, TokenEvent) and not reply.is_stopped:
            text = reply.feed(event.piece)
            if reply.is_stopped:
                generation.cancel()
        elif isinstance(event, Done):
            rest = "" if reply.is_stopped else reply.finish()
            if rest:
                yield rest
            yield _end(event, reply)
            return
        event = None
        if text:
            yield text
            told = monotonic()
        elif monotonic() - told >= SILENCE_S:
            if ticks:
                yield ""
            told = monotonic()


def _end(done: Done, reply: ReplyText) -> Done:
    """A stop text ends a reply by cancelling it; for the client that is a stop."""
    if reply.is_stopped:
        return replace(done, reason="stop")
    if done.reason == "cancelled":
        raise Cancelled("the reply was cancelled")
    return done
