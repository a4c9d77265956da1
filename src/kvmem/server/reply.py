"""From engine events to what a client sees: text, the end, and signs of life in between."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvmem.chat.reply import Delta, ReplyMessage, ReplyReader
from kvmem.engine.events import Done, Event, PromptProgress, TokenEvent
from kvmem.engine.logprobs import TokenLogprobs
from kvmem.errors import Cancelled
from kvmem.server import sse
from kvmem.server.errors import error_body
from kvmem.server.sse import Reply, ReplyShape
from kvmem.server.worker import Generation

__all__ = [
    "SILENCE_S",
    "EventLines",
    "EventStream",
    "cancel_on_disconnect",
    "first_event",
    "read_whole",
]

_log = logging.getLogger(__name__)

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
async def cancel_on_disconnect(request: Request, *generations: Generation) -> AsyncIterator[None]:
    """Cancels the generations when the client goes. The body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            generation.abandon()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def read_whole(generation: Generation, reader: ReplyReader) -> Reply:
    """A whole reply. Raises Cancelled where it was cut short by someone else."""
    message = ReplyMessage()
    logprobs: list[TokenLogprobs] = []
    async for item in _read(generation, reader, None):
        if isinstance(item, Done):
            return Reply(message, logprobs, item)
        message.add(item.delta)
        logprobs += item.logprobs
    raise Cancelled("the reply was cut short")


class EventLines(StreamingResponse):
    """Server-sent events. However they end, the generations that they tell of end with them."""

    def __init__(self, generations: Sequence[Generation], lines: AsyncIterator[bytes]) -> None:
        self._generations = generations
        super().__init__(
            lines,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                generation.cancel()


class EventStream(EventLines):
    """A chat reply as server-sent events."""

    def __init__(
        self,
        generation: Generation,
        first: Event | None,
        shape: ReplyShape,
        reader: ReplyReader,
    ) -> None:
        super().__init__([generation], _events(generation, first, shape, reader))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What some events add to a reply. Nothing: a sign of life."""

    delta: Delta
    logprobs: Sequence[TokenLogprobs] = ()
    progress: Sequence[PromptProgress] = ()

    def __bool__(self) -> bool:
        return bool(self.delta or self.logprobs or self.progress)


async def _events(
    generation: Generation, first: Event | None, shape: ReplyShape, reader: ReplyReader
) -> AsyncIterator[bytes]:
    yield sse.COMMENT  # headers go out with it
    began = False
    started = monotonic()
    n_cached: int | None = None
    try:
        items = _read(generation, reader, first, ticks=True, progress=shape.show_progress)
        async for item in items:
            if not began and item:
                began = True
                yield sse.encode(shape.role())
            if isinstance(item, Done):
                for chunk in shape.last(item, reader):
                    yield sse.encode(chunk)
                yield sse.END
            else:
                for step in item.progress:
                    n_cached = step.n_done if n_cached is None else n_cached
                    yield sse.encode(shape.progress(step, n_cached, monotonic() - started))
                for chunk in shape.chunks(item.delta, item.logprobs):
                    yield sse.encode(chunk)
                if not item:
                    yield sse.COMMENT
    except Exception as error:
        yield sse.encode(error_body(error))


async def _read(
    generation: Generation,
    reader: ReplyReader,
    first: Event | None,
    *,
    ticks: bool = False,
    progress: bool = False,
) -> AsyncIterator[_Piece | Done]:
    """Pieces, and last the Done; with `ticks` an empty piece for each second of silence, with
    `progress` one for each step of reading the prompt.
    """
    events = [] if first is None else [first]
    told = monotonic()
    waiting: list[TokenLogprobs] = []  # of tokens that have added nothing yet
    while True:
        if not events:
            events = await generation.drain(max(0.0, told + SILENCE_S - monotonic()))
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        done = next((event for event in events if isinstance(event, Done)), None)
        steps = [event for event in events if isinstance(event, PromptProgress)]
        events = []
        if steps and progress:
            yield _Piece(Delta(), progress=steps)
            told = monotonic()
        delta = Delta()
        if tokens and not reader.is_stopped:
            delta = reader.feed(tokens)
            waiting += [token.logprobs for token in tokens if token.logprobs is not None]
            if reader.is_stopped:
                generation.cancel()
        if delta:
            yield _Piece(delta, tuple(waiting))
            waiting = []
            told = monotonic()
        if done is not None:
            rest = reader.finish(done.reason)
            if rest or waiting:
                yield _Piece(rest, tuple(waiting))
            _log_notes(reader)
            yield _end(done, reader)
            return
        if not delta and monotonic() - told >= SILENCE_S:
            if ticks:
                yield _Piece(Delta())
            told = monotonic()


def _end(done: Done, reader: ReplyReader) -> Done:
    """A stop text ends a reply by cancelling it; for the client that is a stop."""
    if reader.is_stopped:
        return replace(done, reason="stop")
    if done.reason == "cancelled":
        raise Cancelled("the reply was cancelled")
    return done


def _log_notes(reader: ReplyReader) -> None:
    for note in reader.notes:
        _log.info("%s", note)
