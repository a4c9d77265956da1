"""From engine events to what a client sees: text, the end, and signs of life in between."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvmem.chat.reply import Delta, ReplyMessage, ReplyReader
from kvmem.engine.events import Done, Event, PromptProgress, TokenEvent
from kvmem.engine.logprobs import TokenLogprobs
from kvmem.errors import Cancelled, KvmemError
from kvmem.server import sse
from kvmem.server.errors import error_body
from kvmem.server.pace import Pace
from kvmem.server.sse import Reply, ReplyShape
from kvmem.server.work import Work
from kvmem.server.worker import Generation

__all__ = [
    "FIRST_EVENT_S",
    "SILENCE_S",
    "Begun",
    "Choice",
    "EventLines",
    "EventStream",
    "begin_stream",
    "comments_until",
    "end_on_disconnect",
    "last_words",
    "read_whole",
]

T = TypeVar("T")

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


async def read_whole(generation: Generation, reader: ReplyReader) -> Reply:
    """A whole reply. Raises Cancelled where it was cut short by someone else."""
    message = ReplyMessage()
    logprobs: list[TokenLogprobs] = []
    async for item in _read(generation, reader, None, is_shown=False):
        if isinstance(item, Done):
            return Reply(message, logprobs, item, reader)
        if isinstance(item, _Piece):
            message.add(item.delta)
            logprobs += item.logprobs
    raise Cancelled("the reply was cut short")


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


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the replies to a request, and how it is read."""

    generation: Generation
    reader: ReplyReader
    pace: Pace


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose replies are under way. first: the first event of the first one, if it came
    at once.
    """

    choices: Sequence[Choice]
    shape: ReplyShape
    first: Event | None


class EventStream(EventLines):
    """The replies to a chat request as server-sent events, one after the other."""

    def __init__(self, work: Work, beginning: asyncio.Task[Begun]) -> None:
        super().__init__(work, beginning, _events(beginning))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What some tokens add to a reply. Neither: a sign of life."""

    delta: Delta
    logprobs: Sequence[TokenLogprobs] = ()
    n_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.delta or self.logprobs)


async def _events(beginning: asyncio.Task[Begun]) -> AsyncIterator[bytes]:
    ends: list[tuple[Done, ReplyReader]] = []
    try:
        async for comment in comments_until(beginning):
            yield comment
        begun = beginning.result()
        first, shape = begun.first, begun.shape
        for index, choice in enumerate(begun.choices):
            async for chunk in _chunks(index, choice, first, shape, ends):
                yield sse.COMMENT if chunk is None else sse.encode(chunk)
            first = None
        if shape.include_usage:
            yield sse.encode(shape.usage(ends))
        yield sse.END
    except Exception as error:
        yield last_words(error)


def last_words(error: Exception) -> bytes:
    """The event that ends a stream with an error. Of one that is not ours the log has the rest."""
    if not isinstance(error, KvmemError):
        _log.error("a stream failed", exc_info=error)
    return sse.encode(error_body(error))


async def _chunks(
    index: int,
    choice: Choice,
    first: Event | None,
    shape: ReplyShape,
    ends: list[tuple[Done, ReplyReader]],
) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of one choice, None for a sign of life; its end is added to `ends`."""
    began = False
    async for item in _read(choice.generation, choice.reader, first, is_shown=True):
        told: dict[str, Any] = {}
        if isinstance(item, PromptProgress):
            told = choice.pace.read(item)
            if not told:
                continue
        if not began and (item or told):
            began = True
            yield shape.role(index)
        if isinstance(item, PromptProgress):
            if told:
                yield shape.progress(index, told)
        elif isinstance(item, Done):
            ends.append((item, choice.reader))
            yield shape.finish(index, item, choice.reader)
        elif item:
            told = choice.pace.said(item.n_tokens)
            for chunk in shape.chunks(index, item.delta, item.logprobs):
                yield {**chunk, **told}
        else:
            yield None


async def _read(
    generation: Generation, reader: ReplyReader, first: Event | None, *, is_shown: bool
) -> AsyncIterator[PromptProgress | _Piece | Done]:
    """Progress, pieces, and last the Done. is_shown: as they come, and with an empty piece for a
    second of silence; if not, all is one piece at the end.
    """
    events = [] if first is None else [first]
    told = monotonic()
    waiting: list[TokenLogprobs] = []  # of tokens that have added nothing yet
    n_waiting = 0
    while True:
        if not events:
            silence_s = max(0.0, told + SILENCE_S - monotonic())
            waits_s = reader.waits_s if is_shown else None
            try:
                events = await generation.drain(silence_s if waits_s is None else waits_s)
            except Exception:
                # what was generated before the error is said
                rest = reader.finish("cancelled") if is_shown else Delta()
                if rest:
                    yield _Piece(rest, tuple(waiting), n_waiting)
                raise
        for event in events:
            if isinstance(event, PromptProgress):
                yield event
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        done = next((event for event in events if isinstance(event, Done)), None)
        events = []
        delta = Delta()
        if reader.is_stopped:
            tokens = []
        if tokens or (is_shown and reader.waits_s == 0):
            before = reader.n_tokens
            delta = reader.feed(tokens, shows=is_shown)
            read = tokens[: reader.n_tokens - before]  # without those behind a stop text
            waiting += [token.logprobs for token in read if token.logprobs is not None]
            n_waiting += len(read)
            if reader.is_stopped:
                generation.cancel("stop")
        if delta:
            yield _Piece(delta, tuple(waiting), n_waiting)
            waiting, n_waiting = [], 0
            told = monotonic()
        if done is not None:
            rest = reader.finish(done.reason)
            if rest or waiting:
                yield _Piece(rest, tuple(waiting), n_waiting)
            _log_notes(reader)
            yield _end(done, reader)
            return
        if not delta and monotonic() - told >= SILENCE_S:
            if is_shown:
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
    for note in reader.own_notes:
        _log.info("%s", note)
