"""Pieces of tokens to text: whole characters only, and an end at the first stop text."""

import codecs
from collections.abc import Sequence

__all__ = ["ReplyText", "StopMatcher"]


class StopMatcher:
    """Cuts a text at the stop text that is complete first, however it is split into pieces.

    What may be the beginning of a stop text is held back until it is decided. Of two that end at
    the same place the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to show now; nothing more after a match."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """What was held back: the reply ended before it became a stop text."""
        shown, self._held = self._held, ""
        return shown


class ReplyText:
    """The text of one reply. Bytes that are no UTF-8 become the replacement character; those that
    only begin one, at the end, are left out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._finished = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has come: the reply is to be ended."""
        return self._matcher.matched is not None

    @property
    def stopped_by(self) -> str:
        """That stop text, or nothing."""
        return self._matcher.matched or ""

    def feed(self, piece: bytes) -> str:
        """The text that a token's bytes complete; often nothing."""
        return self._matcher.feed(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest, at the end of the reply. A second call gives nothing."""
        if self._finished:
            return ""
        self._finished = True
        return self._matcher.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a true beginning of the stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
