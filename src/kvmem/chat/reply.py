"""Tokens of a reply to what a client sees of it: thinking, content and tool calls, piece by piece.

One reader serves streams and whole replies: a whole reply is its pieces joined. The parser reads a
reply from its beginning each time, so that a long one would take longer to read than to write.
After each reading it rests, so long that it takes no more than a small part of the time. What
a reading takes is counted in the processor's time: others on the machine change no rest.
"""

import math
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import Any, Protocol, Self

from kvmem.chat.stream import ReplyText
from kvmem.engine.events import StopReason, TokenEvent

__all__ = [
    "CallDelta",
    "Delta",
    "NewParser",
    "Parser",
    "PlainParser",
    "ReplyMessage",
    "ReplyReader",
    "ThinkingTags",
]

# Some templates refuse an id of another length; 62 ** 9 are enough.
ID_LENGTH = 9
# times as long as a reading worked: 5 % of the time are for reading
REST = 19

ID_LETTERS = string.ascii_letters + string.digits


class Parser(Protocol):
    """llama.reply_parser.ReplyParser, as far as it is used here."""

    def feed(self, text: str) -> dict[str, Any]: ...
    def finish(self, *, is_cut: bool = False) -> dict[str, Any]: ...


class NewParser(Parser, Protocol):
    """One that may be read with several times, by copies."""

    def clone(self) -> Self: ...


class PlainParser:
    """For a prompt without a template: all is content."""

    def feed(self, text: str) -> dict[str, Any]:
        return {"content": text} if text else {}

    def finish(self, *, is_cut: bool = False) -> dict[str, Any]:
        return {}

    def clone(self) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a tool call. id and name come once, with the first piece of the call."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What some tokens add to a reply. False where that is nothing."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(slots=True)
class ReplyMessage:
    """Deltas joined, as a client joins them."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(call)
            else:
                begun = self.calls[call.index]
                self.calls[call.index] = CallDelta(
                    index=call.index,
                    arguments=begun.arguments + call.arguments,
                    id=begun.id,
                    name=begun.name,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingTags:
    """How the template marks thinking. is_open: it has opened it in the prompt already."""

    start: str = ""
    ends: tuple[str, ...] = ()
    is_open: bool = False


class ReplyReader:
    """Reads one reply.

    stops: texts that end it. ends: those of them that the model's own format ends with, which cut
    nothing off. preserved: bytes of control tokens whose text belongs to the format.
    used_ids: ids of earlier calls, which no new call may have.
    notes: what is to be known of the request, which may hold words of the client's.
    clock: seconds. work: seconds that this thread has worked.

    is_stopped: a stop text has come; the reply is to be ended.
    n_tokens: tokens that were read, the one that completed a stop text included.
    reasoning_tokens: tokens up to the end of thinking.
    own_notes: what is to be known of the reply, without a word of it. notes: of both.
    """

    def __init__(
        self,
        parser: Parser,
        *,
        stops: Sequence[str] = (),
        ends: Collection[str] = (),
        preserved: Mapping[int, bytes] | None = None,
        used_ids: Collection[str] = (),
        thinking: ThinkingTags | None = None,
        notes: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
        work: Callable[[], float] = thread_time,
    ) -> None:
        self._parser = parser
        self._text = ReplyText((*stops, *ends))
        self._ends = frozenset(ends) - frozenset(stops)
        self._preserved = preserved or {}
        self._used_ids = set(used_ids)
        self._thinking = _ThinkingCounter(thinking or ThinkingTags())
        self._clock = clock
        self._work = work
        self._unread = ""  # by the parser
        self._rests_until = -math.inf
        self._n_calls = 0
        self._is_finished = False
        self.n_tokens = 0
        self._given_notes = tuple(notes)
        self.own_notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        return [*self._given_notes, *self.own_notes]

    @property
    def is_stopped(self) -> bool:
        return self._text.is_stopped

    @property
    def reasoning_tokens(self) -> int:
        return self._thinking.n_tokens

    @property
    def waits_s(self) -> float | None:
        """Seconds until `feed` without tokens adds something; None where all is read."""
        return max(0.0, self._rests_until - self._clock()) if self._unread else None

    def feed(self, events: Sequence[TokenEvent], *, shows: bool = True) -> Delta:
        """What these tokens, and those before that were not read yet, add; nothing after a stop
        text.

        shows: someone looks on; if not, all is read at the end.
        """
        for event in events:
            if self.is_stopped:
                break
            self.n_tokens += 1
            piece = self._text.feed(self._preserved.get(event.token, event.piece))
            self._thinking.feed(piece)
            self._unread += piece
        is_due = shows and self._unread and self._clock() >= self._rests_until
        return self._read() if is_due else Delta()

    def _read(self) -> Delta:
        text, self._unread = self._unread, ""
        started = self._work()
        delta = self._delta(self._parser.feed(text))
        self._rests_until = self._clock() + REST * (self._work() - started)
        return delta

    def finish(self, reason: StopReason) -> Delta:
        """The rest, once no token follows. A second call adds nothing."""
        if self._is_finished:
            return Delta()
        self._is_finished = True
        self._unread += self._text.finish()
        before = self._read() if self._unread else Delta()
        after = self._delta(self._parser.finish(is_cut=not self._is_own_end(reason)))
        return Delta(
            reasoning=before.reasoning + after.reasoning,
            content=before.content + after.content,
            calls=before.calls + after.calls,
        )

    def finish_reason(self, reason: StopReason) -> str:
        """OpenAI's word for the end."""
        if self._is_own_end(reason):
            return "tool_calls" if self._n_calls else "stop"
        return "stop" if self.is_stopped else reason

    def _is_own_end(self, reason: StopReason) -> bool:
        """Whether the model came to an end by itself, and not to a text of the client's."""
        if self.is_stopped:
            return self._text.stopped_by in self._ends
        return reason == "stop"

    def _delta(self, parts: dict[str, Any]) -> Delta:
        self.own_notes += parts.get("notes", ())
        calls = tuple(self._call(call) for call in parts.get("calls", ()))
        return Delta(
            reasoning=parts.get("reasoning", ""), content=parts.get("content", ""), calls=calls
        )

    def _call(self, call: dict[str, Any]) -> CallDelta:
        name = call.get("name")
        if name is None:
            return CallDelta(index=call["index"], arguments=call["arguments"])
        self._n_calls += 1
        return CallDelta(
            index=call["index"], arguments=call["arguments"], id=self._new_id(call["id"]), name=name
        )

    def _new_id(self, wanted: str) -> str:
        """The model's own id where it gives one that is new."""
        while not wanted or wanted in self._used_ids:
            wanted = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        self._used_ids.add(wanted)
        return wanted


class _ThinkingCounter:
    """Counts the tokens of the thinking that a reply begins with, its tags included."""

    def __init__(self, tags: ThinkingTags) -> None:
        self._tags = tags
        self._seen = ""
        self._is_over = not tags.ends
        self._is_open = tags.is_open
        self.n_tokens = 0

    def feed(self, text: str) -> None:
        if self._is_over:
            return
        self._seen += text
        if not self._is_open:
            begun = self._seen.lstrip()
            self._is_open = bool(self._tags.start) and begun.startswith(self._tags.start)
            if not self._is_open and not self._tags.start.startswith(begun):
                self._is_over, self.n_tokens = True, 0
                return
        self.n_tokens += 1
        self._is_over = any(end in self._seen for end in self._tags.ends)
