"""Where the contents of messages stand in the text of a prompt.

Found by rendering again with a mark before and after each content. What stands between the marks
is what the template makes of a content; what stands outside is the template's own. Both must join
to the first text again, or no content is claimed.

Long contents are tried without: marks alone, with the content as it was sent between them. And
where a prompt goes on one before, sign by sign, what was found there stands, and only the messages
behind are rendered again: behind the last known content they must join to the end of the text.
"""

import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvmem.chat.messages import Message
from kvmem.chat.request import ChatRequest
from kvmem.errors import RequestError
from kvmem.llama.template import ChatTemplate

__all__ = ["Content", "ContentFinder", "find_last_part"]

# A template may take such a user message for a tool's reply, by its first characters.
TOOL_REPLY_TAG: Final = "<tool_response>"
TAG_AT_END: Final = re.compile(r"</([\w-]{1,64})>\s*\Z")
# A content at least this long is not rendered again to be found.
HIDDEN_CHARS: Final = 256
# Prompts that are remembered, and their characters in all.
MAX_KEPT: Final = 16
MAX_KEPT_CHARS: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """Where the content of message `index` stands: bytes [start, stop) of the prompt text.

    end: its end in characters.
    """

    index: int
    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class _Located:
    """A prompt whose contents were found, in the order of their messages."""

    messages: tuple[Message, ...]
    text: str
    contents: tuple[Content, ...]


class ContentFinder:
    """Finds contents for one template. Several threads may use it at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._kept: list[_Located] = []

    def find(
        self, request: ChatRequest, fields: dict[str, Any], text: str
    ) -> tuple[list[Content], Content | None, str]:
        """All contents that can be placed, that of the last user message, and why it is missing.

        fields: what the template was given. text: what it made of it.
        """
        messages = request.messages
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        if not users:
            return [], None, "the request has no user message"
        asking = users[-1]
        if not messages[asking].text.strip():
            return [], None, "the last user message is empty"
        prompt = _Prompt(messages, fields, text)
        markable = [i for i, message in enumerate(messages) if _can_mark(message)]
        contents = self._go_on(prompt, markable, asking)
        if contents is None and any(_can_hide(messages[i]) for i in markable):
            contents = self._mark(prompt, markable, hides=True)
        if contents is None:
            contents = self._mark(prompt, markable)
        if contents is None:
            contents = self._mark(prompt, [asking]) or []
        else:
            self._remember(_Located(messages, text, tuple(contents)))
        query = next((c for c in contents if c.index == asking), None)
        if query is None:
            return [], None, "the template changes the last user message in a way that hides it"
        return contents, query, ""

    def _go_on(
        self, prompt: "_Prompt", markable: Sequence[int], asking: int
    ) -> list[Content] | None:
        """What a remembered prompt had in the same place, and what stands behind that."""
        known = self._look_up(prompt)
        # the messages that are rendered begin with a user's, as many templates want it
        while known and known[-1].index < asking and not prompt.is_users(known[-1].index):
            known.pop()
        if not known:
            return None
        last = known[-1]
        first = last.index
        while first > asking + 1 and prompt.messages[first].role == "tool":
            first -= 1  # the call that it answers
        shown = [*([asking] if asking < first else []), *range(first, len(prompt.messages))]
        chosen = [i for i in markable if i >= last.index]
        more = self._mark(prompt, chosen, hides=True, shown=shown, behind=last)
        return None if more is None else known + more

    def _look_up(self, prompt: "_Prompt") -> list[Content]:
        """Of the remembered prompt with most in common: what is the same here."""
        with self._lock:
            kept = list(self._kept)
        best: list[Content] = []
        for located in kept:
            n_equal = _n_equal(located.messages, prompt.messages)
            common = [c for c in located.contents if c.index < n_equal]
            if len(common) <= len(best):
                continue
            n = _n_same(common, located.text, prompt.text)
            if n > len(best):
                best = common[:n]
        return best

    def _remember(self, located: _Located) -> None:
        indices = [c.index for c in located.contents]
        if indices != sorted(indices):
            return
        with self._lock:
            kept = [
                one
                for one in self._kept
                if _n_equal(one.messages, located.messages) < len(one.messages)
            ]
            kept.append(located)
            n_chars = 0
            for n, one in enumerate(reversed(kept)):
                n_chars += len(one.text)
                if n == MAX_KEPT or n_chars > MAX_KEPT_CHARS:
                    kept = kept[len(kept) - n :]
                    break
            self._kept = kept

    def _mark(
        self,
        prompt: "_Prompt",
        chosen: Sequence[int],
        *,
        hides: bool = False,
        shown: Sequence[int] | None = None,
        behind: Content | None = None,
    ) -> list[Content] | None:
        """Contents of the chosen messages; None if the marks changed anything else.

        hides: leave long contents out between their marks, so that little is rendered. What the
        template would make of them is not seen then: it has to be the content, as it stands.
        shown: the messages that are rendered; None for all. behind: the content of the first chosen
        one, which is known; what comes behind it is returned.
        """
        nonce = secrets.token_hex(8)
        messages = list(prompt.messages)
        hidden = {i for i in chosen if hides and _can_hide(messages[i])}
        for i in chosen:
            bare = replace(messages[i], parts=("",)) if i in hidden else messages[i]
            messages[i] = _marked(bare, f"[{nonce}:{i}:", f":{i}:{nonce}]")
        if shown is not None:
            messages = [messages[i] for i in shown]
        fields = prompt.fields
        fields = {**fields, "messages": [message.for_template() for message in messages]}
        try:
            marked: str = self._template.render(fields)["prompt"]
        except RequestError:  # the first rendering passed; a template may well refuse the marks
            return None
        mark = re.compile(rf"\[{nonce}:(\d+):|:(\d+):{nonce}\]")
        # template's text, number, content, number, template's text, ...
        parts = [part for part in mark.split(marked) if part is not None]
        order = [int(number) for number in parts[1::2]]
        if order[::2] != order[1::2] or sorted(order[::2]) != list(chosen):
            return None
        text = prompt.text
        contents: list[Content] = []
        cursor = 0  # characters of text
        offset = 0  # bytes of text
        for k, i in enumerate(order[::2]):
            before, inside, after = parts[4 * k : 4 * k + 5 : 2]
            if behind is not None and k == 0:
                if i != behind.index:
                    return None
                cursor, offset = behind.end, behind.stop
                continue
            if i in hidden:
                if inside:
                    return None
                inside = prompt.messages[i].text
            if not text.startswith(before, cursor):
                return None
            cursor += len(before)
            offset += len(before.encode())
            content = _as_shown(text, cursor, inside, after)
            if content is None:
                return None
            cursor += len(content)
            stop = offset + len(content.encode())
            contents.append(Content(i, offset, stop, cursor))
            offset = stop
        return contents if text[cursor:] == parts[-1] else None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is searched. fields: what the template was given; text: what it made of it."""

    messages: tuple[Message, ...]
    fields: dict[str, Any]
    text: str

    def is_users(self, index: int) -> bool:
        return self.messages[index].role == "user"


def _n_equal(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Messages that both begin with."""
    n = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        n += 1
    return n


def _n_same(contents: Sequence[Content], first: str, second: str) -> int:
    """Of contents in ascending places of one text: how many the other has, and all before them."""
    n, limit = 0, len(contents)
    while n < limit:
        middle = (n + limit + 1) // 2
        if second.startswith(first[: contents[middle - 1].end]):
            n = middle
        else:
            limit = middle - 1
    return n


def _can_mark(message: Message) -> bool:
    """Templates look into an assistant's content for thinking, and at how a tool's reply begins."""
    if not message.text.strip():
        return False
    if message.role == "assistant":
        return "</think>" not in message.text
    return not message.text.startswith(TOOL_REPLY_TAG) or message.role == "tool"


def _can_hide(message: Message) -> bool:
    """Where it saves something, and what stands between the marks would be one text."""
    return len(message.parts) == 1 and len(message.text) >= HIDDEN_CHARS


def _marked(message: Message, begin: str, end: str) -> Message:
    first, *others = message.parts
    parts = [begin + first, *others]
    parts[-1] += end
    return replace(message, parts=tuple(parts))


def _as_shown(text: str, cursor: int, inside: str, after: str) -> str | None:
    """The content as it stands in the unmarked text: templates may trim what marks protect."""
    for shown in (inside, inside.strip(), inside.rstrip(), inside.lstrip()):
        if text.startswith(shown + after, cursor):
            return shown
    return None


def find_last_part(
    messages: Sequence[Message], contents: Sequence[Content], text: str
) -> int | None:
    """Bytes in front of the last part of the last message, if it has several, or in front of what
    stands in tags at its end: clients put there what is another text at the next turn.
    """
    if not contents or contents[-1].index != len(messages) - 1:
        return None
    last = contents[-1]
    message = messages[last.index]
    part = _end_of_its_own(message)
    shown = text[max(0, last.end - len(message.text)) : last.end]
    if not part or not shown.rstrip().endswith(part):
        return None
    # without the part, the line break in front of it may be another one
    before = shown.rstrip()[: -len(part)].rstrip()
    found = last.stop - len(shown[len(before) :].encode())
    return found if found > last.start else None


def _end_of_its_own(message: Message) -> str:
    """The last part, or what stands in tags at the end of the only one; empty if that is all."""
    *others, part = message.parts or ("",)
    if others:
        return part.strip()
    closing = TAG_AT_END.search(part)
    start = part.rfind(f"<{closing[1]}>") if closing else 0
    return part[start:].strip() if start > 0 else ""
