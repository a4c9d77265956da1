"""Server-sent events, of any request: how a stream begins, its signs of life, and its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvmem.engine.events import Event
from kvmem.errors import KvmemError
from kvmem.server import sse
from kvmem.server.errors import error_body
from kvmem.server.work import Work

__all__ = [
    "FIRST_EVENT_S",
    "SILENCE_S",
    "Begun",
    "EventLines",
    "begin_stream",
    "comments_until",
    "end_on_disconnect",
    "last_words",
]

T = TypeVar("T")
ReplyT = TypeVar("ReplyT")
ShapeT = TypeVar("ShapeT")

_log = logging.getLogger(__name__)

# Node clients give up after minutes of silence, proxies after one; llama-server sends every second.
SILENCE_S = 1.0

# So long may a client leave what was sent unread: then it has hung, and others wait for the engine.
STALLED_S = 60.0

# Errors of the first moments are plain HTTP errors; after that the stream has begun. The first
# second must not be a silent one, so it begins also while a long prompt is still rendered.
FIRST_EVENT_S = 0.2
HEADERS_S = 0.7
# No text of a language has so many letters for each token on average: it is no prompt that fits.
MOST_LETTERS = 8


@dataclass(frozen=True, slots=True)
class Begun(Generic[ReplyT, ShapeT]):
    """A request whose replies are under way. first: the first event of the first one, if it came
    at once.
    """

    replies: Sequence[ReplyT]
    shape: ShapeT
    first: Event | None


async def begin_stream(
    work: Work, start: Coroutine[Any, Any, T], *, n_letters: int, n_ctx: int
) -> asyncio.Task[T]:
    """What comes before a stream's first word: over, or still going on where it takes too long to
    keep the client waiting for a sign of life. Raises what it raised, as long as that is known.

    n_letters: of the prompt. One that will hardly fit gets its status, however long that takes.
    """
    task = asyncio.create_task(start)
    timeout_s = None if n_letters > MOST_LETTERS * n_ctx else HEADERS_S
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            task.result()
    except BaseException:
        work.end()
        raise
    return task


async def comments_until(task: asyncio.Task[T]) -> AsyncIterator[bytes]:
    """The first line of a stream, with which the headers go out, and one for each second until
    the task is over.
    """
    yield sse.COMMENT
    while not task.done():
        await asyncio.wait({task}, timeout=SILENCE_S)
        if not task.done():
            yield sse.COMMENT


@asynccontextmanager
async def end_on_disconnect(request: Request, work: Work) -> AsyncIterator[None]:
    """Ends the work with the block, or as the client goes. The body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.abandon()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        work.end()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class EventLines(StreamingResponse):
    """Server-sent events. However they end, the work that they tell of ends with them.

    beginning: is waited for, also when the client has gone: what it renders with stays open.
    """

    def __init__(
        self, work: Work, beginning: asyncio.Task[Any], lines: AsyncIterator[bytes]
    ) -> None:
        self._work = work
        self._beginning = beginning
        super().__init__(
            lines,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            _log.warning("a stream was left unread for %g s: the request is ended", STALLED_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.end()
            await asyncio.wait({self._beginning})
            self._work.log_failure(self._beginning.exception())


def last_words(error: Exception) -> bytes:
    """The event that ends a stream with an error. Of one that is not ours the log has the rest."""
    if not isinstance(error, KvmemError):
        _log.error("a stream failed", exc_info=error)
    return sse.encode(error_body(error))
