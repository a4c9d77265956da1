"""Plain completions as they come: pieces of text with their tokens, progress, silence, the end."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from kvmem.chat.stream import ReplyText
from kvmem.engine.events import Done, Event, PromptProgress
from kvmem.engine.logprobs import TokenChances, TokenLogprobs
from kvmem.errors import Cancelled
from kvmem.server import event_stream
from kvmem.server.worker import Generation

__all__ = ["Piece", "Tick", "WholeReply", "read_completion", "read_whole_completion"]


@dataclass(slots=True)
class Piece:
    """What some tokens add to a completion's text."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | TokenChances] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tick:
    """A second of silence."""


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A completion that is done.

    stopped_by: the stop text that ended it, or nothing; stopped_after: so many tokens, or None.
    has_new_line: somewhere in its text.
    """

    piece: Piece
    done: Done
    stopped_by: str
    stopped_after: int | None
    has_new_line: bool


async def read_whole_completion(generation: Generation, stops: tuple[str, ...]) -> WholeReply:
    """All of it. Raises what the engine raised, and Cancelled where someone else cut it short."""
    whole = Piece()
    async for item in read_completion(generation, stops):
        if isinstance(item, Piece):
            whole.text += item.text
            whole.tokens += item.tokens
            whole.logprobs += item.logprobs
        elif isinstance(item, WholeReply):
            whole.tokens += item.piece.tokens
            whole.logprobs += item.piece.logprobs
            return replace(item, piece=whole)
    raise Cancelled("the reply was cut short")


async def read_completion(
    generation: Generation, stops: tuple[str, ...], *, first: Event | None = None
) -> AsyncIterator[PromptProgress | Piece | Tick | WholeReply]:
    """Token by token, save where a character or a possible stop text is not complete yet.

    The end is a WholeReply whose piece is what has not been shown before.
    """
    text = ReplyText(stops)
    waiting = Piece()
    has_new_line = False
    n_tokens = 0
    events = [] if first is None else [first]
    while True:
        if not events:
            events = await generation.drain(event_stream.SILENCE_S)
            if not events:
                yield Tick()
        for event in events:
            if isinstance(event, PromptProgress):
                yield event
            elif isinstance(event, Done):
                if event.reason == "cancelled" and not text.is_stopped:
                    raise Cancelled("the reply was cancelled")
                waiting.text += text.finish()
                has_new_line |= "\n" in waiting.text
                if waiting.text:
                    yield waiting
                    waiting = Piece()
                stopped_after = n_tokens if text.is_stopped else None
                yield WholeReply(waiting, event, text.stopped_by, stopped_after, has_new_line)
                return
            elif not text.is_stopped:
                n_tokens += 1
                waiting.text += text.feed(event.piece)
                waiting.tokens.append(event.token)
                likely = event.logprobs or event.chances
                if likely is not None:
                    waiting.logprobs.append(likely)
                has_new_line |= "\n" in waiting.text
                if text.is_stopped:
                    generation.cancel("stop")
                if waiting.text:
                    yield waiting
                    waiting = Piece()
        events = []
