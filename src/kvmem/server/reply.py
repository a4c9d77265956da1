"""Chat replies, from engine events to what a client sees: text, the end, and signs of life."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from kvmem.chat.reply import Delta, ReplyMessage, ReplyReader
from kvmem.engine.events import Done, Event, PromptProgress, TokenEvent
from kvmem.engine.logprobs import TokenLogprobs
from kvmem.errors import Cancelled
from kvmem.server import event_stream, sse
from kvmem.server.event_stream import Begun, EventLines, comments_until, last_words
from kvmem.server.pace import Pace
from kvmem.server.sse import Reply, ReplyShape
from kvmem.server.work import Work
from kvmem.server.worker import Generation

__all__ = ["Choice", "EventStream", "read_whole"]

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the replies to a request, and how it is read."""

    generation: Generation
    reader: ReplyReader
    pace: Pace


class EventStream(EventLines):
    """The replies to a chat request as server-sent events, one after the other."""

    def __init__(self, work: Work, beginning: asyncio.Task[Begun[Choice, ReplyShape]]) -> None:
        super().__init__(work, beginning, _events(beginning))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What some tokens add to a reply. Neither: a sign of life."""

    delta: Delta
    logprobs: Sequence[TokenLogprobs] = ()
    n_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.delta or self.logprobs)


async def _events(beginning: asyncio.Task[Begun[Choice, ReplyShape]]) -> AsyncIterator[bytes]:
    ends: list[tuple[Done, ReplyReader]] = []
    try:
        async for comment in comments_until(beginning):
            yield comment
        begun = beginning.result()
        first, shape = begun.first, begun.shape
        for index, choice in enumerate(begun.replies):
            async for chunk in _chunks(index, choice, first, shape, ends):
                yield sse.COMMENT if chunk is None else sse.encode(chunk)
            first = None
        if shape.include_usage:
            yield sse.encode(shape.usage(ends))
        yield sse.END
    except Exception as error:
        yield last_words(error)


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
            silence_s = max(0.0, told + event_stream.SILENCE_S - monotonic())
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
        if not delta and monotonic() - told >= event_stream.SILENCE_S:
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
