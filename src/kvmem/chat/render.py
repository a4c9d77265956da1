"""Messages to Prompt: the template's text, its tokens, and which tokens are whose content.

Spans are found by rendering twice: once as asked, once with a mark before and after each content.
What stands between the marks is what the template makes of a content; what stands outside is the
template's own. Both must join to the first text again, or no span is claimed.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from kvmem.chat.messages import Message
from kvmem.chat.request import ChatRequest
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.errors import RequestError

__all__ = ["ChatRenderer", "RenderedChat"]

# A template may take such a user message for a tool's reply, by its first characters.
TOOL_REPLY_TAG = "<tool_response>"


class Template(Protocol):
    """llama.template.ChatTemplate, as far as it is used here."""

    def render(self, request: dict[str, Any], /) -> dict[str, Any]: ...


class Vocabulary(Protocol):
    """llama.vocab.Vocab, as far as it is used here."""

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]: ...
    def piece(self, token: int, *, special: bool = True) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """text: the prompt as text. stops: texts that end the reply, by the template."""

    text: str
    prompt: Prompt
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Content:
    """Where the content of message `index` stands: bytes [start, stop) of the prompt text."""

    index: int
    start: int
    stop: int


class ChatRenderer:
    """Renders requests for one model. Several threads may use it at a time."""

    def __init__(self, template: Template, vocab: Vocabulary) -> None:
        self._template = template
        self._vocab = vocab
        self._pieces: dict[int, bytes] = {}

    def render(self, request: ChatRequest) -> RenderedChat:
        """Raises RequestError with the template's reason where it refuses the messages."""
        result = self._template.render(_template_fields(request, request.messages))
        text: str = result["prompt"]
        tokens = self._vocab.tokenize(text, add_special=True, parse_special=True)
        prompt = self._locate(request, text, tokens)
        return RenderedChat(text=text, prompt=prompt, stops=tuple(result["stops"]))

    def _locate(self, request: ChatRequest, text: str, tokens: list[int]) -> Prompt:
        contents, query, fallback = self._find_contents(request, text)
        ends = self._piece_ends(text, tokens)
        if ends is None:
            return Prompt(
                tokens=tuple(tokens), query_fallback="the tokens do not join to the prompt's text"
            )
        spans = tuple(
            RoleSpan(request.messages[c.index].role, _tokens_of(c, ends)) for c in contents
        )
        query_span = None
        if query is not None:
            query_span = _tokens_of(query, ends)
            if len(query_span) == 0:
                query_span, fallback = None, "the last user message has no token of its own"
        return Prompt(
            tokens=tuple(tokens), spans=spans, query_span=query_span, query_fallback=fallback
        )

    def _find_contents(
        self, request: ChatRequest, text: str
    ) -> tuple[list[_Content], _Content | None, str]:
        """All contents that can be placed, that of the last user message, and why it is missing."""
        users = [i for i, message in enumerate(request.messages) if message.role == "user"]
        if not users:
            return [], None, "the request has no user message"
        asking = users[-1]
        if not request.messages[asking].text.strip():
            return [], None, "the last user message is empty"
        markable = [i for i, message in enumerate(request.messages) if _can_mark(message)]
        for chosen in (markable, [asking]):
            contents = self._mark(request, text, chosen)
            query = next((c for c in contents if c.index == asking), None)
            if query is not None:
                return contents, query, ""
        return [], None, "the template changes the last user message in a way that hides it"

    def _mark(self, request: ChatRequest, text: str, chosen: Sequence[int]) -> list[_Content]:
        """Contents of the chosen messages, or nothing if the marks changed anything else."""
        nonce = secrets.token_hex(8)
        messages = list(request.messages)
        for i in chosen:
            messages[i] = _marked(messages[i], f"[{nonce}:{i}:", f":{i}:{nonce}]")
        try:
            marked: str = self._template.render(_template_fields(request, messages))["prompt"]
        except RequestError:  # the first rendering passed; a template may well refuse the marks
            return []
        mark = re.compile(rf"\[{nonce}:(\d+):|:(\d+):{nonce}\]")
        order = [int(begin or end) for begin, end in mark.findall(marked)]
        if len(order) != 2 * len(chosen) or order[::2] != order[1::2]:
            return []
        # template's text, content, template's text, ..., content, template's text
        parts = mark.sub(f"[{nonce}]", marked).split(f"[{nonce}]")
        if len(parts) != len(order) + 1:
            return []
        contents: list[_Content] = []
        cursor = 0  # characters of text
        offset = 0  # bytes of text
        for k, i in enumerate(order[::2]):
            before, inside, after = parts[2 * k : 2 * k + 3]
            if not text.startswith(before, cursor):
                return []
            cursor += len(before)
            offset += len(before.encode())
            shown = _as_shown(text, cursor, inside, after)
            if shown is None:
                return []
            stop = offset + len(shown.encode())
            contents.append(_Content(i, offset, stop))
            cursor += len(shown)
            offset = stop
        return contents if text[cursor:] == parts[-1] else []

    def _piece_ends(self, text: str, tokens: list[int]) -> list[int] | None:
        """Byte offset in the text where each token ends; None if the pieces do not join to it.

        What a tokenizer puts in front (BOS, a space) ends at or below 0.
        """
        pieces = self._pieces
        for token in set(tokens).difference(pieces):
            pieces[token] = self._vocab.piece(token, special=True)
        joined = b"".join([pieces[token] for token in tokens])
        data = text.encode()
        if not joined.endswith(data):
            return None
        ahead = len(joined) - len(data)
        return list(accumulate((len(pieces[token]) for token in tokens), initial=-ahead))[1:]


def _template_fields(request: ChatRequest, messages: Sequence[Message]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "messages": [message.for_template() for message in messages],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "kwargs": dict(request.template_kwargs),
    }
    if request.tools:
        fields["tools"] = [dict(tool) for tool in request.tools]
    if request.enable_thinking is not None:
        fields["enable_thinking"] = request.enable_thinking
    return fields


def _can_mark(message: Message) -> bool:
    """Templates look into an assistant's content for thinking, and at how a tool's reply begins."""
    if not message.text.strip():
        return False
    if message.role == "assistant":
        return "</think>" not in message.text
    return not message.text.startswith(TOOL_REPLY_TAG) or message.role == "tool"


def _marked(message: Message, begin: str, end: str) -> Message:
    first, *others = message.parts
    parts = [begin + first, *others]
    parts[-1] += end
    return message.with_parts(tuple(parts))


def _as_shown(text: str, cursor: int, inside: str, after: str) -> str | None:
    """The content as it stands in the unmarked text: templates may trim what marks protect."""
    for shown in (inside, inside.strip(), inside.rstrip(), inside.lstrip()):
        if text.startswith(shown + after, cursor):
            return shown
    return None


def _tokens_of(content: _Content, ends: list[int]) -> Span:
    """Tokens that end inside the content: a space or a line break may be merged with its first."""
    return Span(bisect_right(ends, content.start), bisect_right(ends, content.stop))
