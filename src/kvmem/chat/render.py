"""Messages to Prompt: the template's text, its tokens, and which tokens are whose content.

Spans are found by rendering twice: once as asked, once with a mark before and after each content.
What stands between the marks is what the template makes of a content; what stands outside is the
template's own. Both must join to the first text again, or no span is claimed.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from kvmem.chat.binding import bind, find_thinking
from kvmem.chat.format import Demands, TemplateFormat
from kvmem.chat.messages import Message
from kvmem.chat.normal import NormalSchema
from kvmem.chat.reply import Parser, PlainParser, ReplyReader, ThinkingTags
from kvmem.chat.request import ChatRequest
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.errors import RequestError
from kvmem.llama.reply_parser import ReplyParser
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

__all__ = ["ChatRenderer", "RenderedChat"]

# A template may take such a user message for a tool's reply, by its first characters.
TOOL_REPLY_TAG = "<tool_response>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A request as the model sees it, and how its reply is made and read.

    text: the prompt as text. stops: texts that end the reply.
    parser: for this reply alone. sampling: with the defaults of the thinking state, and with what
    the reply is bound to.
    preserved: bytes of control tokens that belong to the reply. call_ids: those of the history.
    """

    text: str
    prompt: Prompt
    stops: tuple[str, ...] = ()
    parser: Parser = field(default_factory=PlainParser)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n_logprobs: int | None = None
    thinking: ThinkingTags = field(default_factory=ThinkingTags)
    preserved: Mapping[int, bytes] = field(default_factory=dict)
    call_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def reader(self) -> ReplyReader:
        """Reads the reply; a parser serves one."""
        reader = ReplyReader(
            self.parser,
            stops=self.stops,
            preserved=self.preserved,
            used_ids=self.call_ids,
            thinking=self.thinking,
        )
        reader.notes += self.notes
        return reader

    def params(self) -> GenerateParams:
        return GenerateParams(
            sampling=self.sampling, max_tokens=self.max_tokens, n_logprobs=self.n_logprobs
        )


@dataclass(frozen=True, slots=True)
class _Content:
    """Where the content of message `index` stands: bytes [start, stop) of the prompt text."""

    index: int
    start: int
    stop: int


class ChatRenderer:
    """Renders requests for one model. Several threads may use it at a time."""

    def __init__(self, template: ChatTemplate, vocab: Vocab) -> None:
        self._template = template
        self._vocab = vocab
        self._pieces: dict[int, bytes] = {}
        self._format = TemplateFormat(template)

    def render(self, request: ChatRequest) -> RenderedChat:
        """Raises RequestError with the template's reason where it refuses the messages."""
        demands = self._format.check(request, self._vocab.model)
        request = replace(
            request, messages=self._format.place(request.messages), schema=demands.schema
        )
        fields = _template_fields(request, self._format.calls_in_parallel(request))
        held, parameters = _held_fields(request, fields, demands)
        parser = self._open(request, held)
        # the prompt shows the tools as the client wrote them, and all of them, so that its
        # beginning stays what it was
        text = parser.rendered["prompt"] if held is fields else self._prompt_of(request, fields)
        tokens = self._vocab.tokenize(text, add_special=True, parse_special=True)
        result = parser.rendered
        if parameters and result["grammar"]:
            grammar = self._format.hold(result["grammar"], parameters, self._vocab.model)
            result = {**result, "grammar": grammar}
        return RenderedChat(
            text=text,
            prompt=self._locate(request, fields, text, tokens),
            stops=(*request.stop, *result["stops"]),
            parser=parser,
            sampling=bind(
                request, fields, result, vocab=self._vocab, thinks=self._format.can_think
            ),
            max_tokens=request.max_tokens,
            n_logprobs=request.n_logprobs,
            thinking=find_thinking(result),
            preserved={token: self._vocab.piece(token) for token in result["preserved"]},
            call_ids=tuple(call.id for m in request.messages for call in m.tool_calls),
            notes=(*request.notes, *demands.notes),
        )

    def _open(self, request: ChatRequest, fields: dict[str, Any]) -> ReplyParser:
        try:
            return ReplyParser(self._template, self._vocab.model, fields)
        except RequestError as error:
            raise self._format.blame(request, fields, error, self._vocab.model) from None

    def _prompt_of(self, request: ChatRequest, fields: dict[str, Any]) -> str:
        try:
            text: str = self._template.render(self._format.without_grammar(fields))["prompt"]
        except RequestError as error:
            raise self._format.blame(request, fields, error, self._vocab.model) from None
        return text

    def _locate(
        self, request: ChatRequest, fields: dict[str, Any], text: str, tokens: list[int]
    ) -> Prompt:
        contents, query, fallback = self._find_contents(request, fields, text)
        ends = self._piece_ends(text, tokens)
        if ends is None:
            return Prompt(
                tokens=tuple(tokens),
                query_fallback="the tokens do not join to the prompt's text",
                conversation_id=request.conversation_id,
                is_read_anew=not request.uses_cache,
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
            tokens=tuple(tokens),
            spans=spans,
            query_span=query_span,
            query_fallback=fallback,
            conversation_id=request.conversation_id,
            is_read_anew=not request.uses_cache,
        )

    def _find_contents(
        self, request: ChatRequest, fields: dict[str, Any], text: str
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
            contents = self._mark(request, fields, text, chosen)
            query = next((c for c in contents if c.index == asking), None)
            if query is not None:
                return contents, query, ""
        return [], None, "the template changes the last user message in a way that hides it"

    def _mark(
        self, request: ChatRequest, fields: dict[str, Any], text: str, chosen: Sequence[int]
    ) -> list[_Content]:
        """Contents of the chosen messages, or nothing if the marks changed anything else."""
        nonce = secrets.token_hex(8)
        messages = list(request.messages)
        for i in chosen:
            messages[i] = _marked(messages[i], f"[{nonce}:{i}:", f":{i}:{nonce}]")
        try:
            templated = [message.for_template() for message in messages]
            plain = self._format.without_grammar(fields)
            marked: str = self._template.render({**plain, "messages": templated})["prompt"]
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


def _template_fields(request: ChatRequest, parallel: bool) -> dict[str, Any]:
    thinking = request.thinking
    # else old thinking vanishes from the history, and with it the prefix that was read before
    kwargs = {"preserve_reasoning": True, **thinking.kwargs}
    if thinking.effort is not None:
        kwargs["reasoning_effort"] = thinking.effort
    fields: dict[str, Any] = {
        "messages": [message.for_template() for message in request.messages],
        "tool_choice": request.tool_choice.mode,
        "parallel_tool_calls": parallel,
        "kwargs": kwargs,
        "add_generation_prompt": request.add_generation_prompt,
    }
    if request.tools:
        fields["tools"] = [dict(tool.definition) for tool in request.tools]
    if request.schema is not None:
        fields["json_schema"] = dict(request.schema)
    if request.continues:
        fields["continue"] = request.continues
    if request.keeps_thinking:
        fields["keeps_thinking"] = True
    if request.grammar is not None and thinking.enabled is None:
        fields["enable_thinking"] = False
    elif thinking.enabled is not None:
        fields["enable_thinking"] = thinking.enabled
    return fields


def _held_fields(
    request: ChatRequest, fields: dict[str, Any], demands: Demands
) -> tuple[dict[str, Any], list[NormalSchema]]:
    """What the grammar is made of, and the parameters of its tools: the one that must be called,
    or all, with schemas as llama.cpp is to get them.
    """
    if not demands.parameters:
        return fields, []
    pairs = [
        (tool, parameters)
        for tool, parameters in zip(request.tools, demands.parameters, strict=True)
        if request.tool_choice.name in (None, tool.name)
    ]
    tools = []
    for tool, parameters in pairs:
        function = dict(tool.definition["function"])
        if tool.parameters:
            function["parameters"] = parameters.schema
        tools.append({**tool.definition, "function": function})
    held = fields if tools == fields["tools"] else {**fields, "tools": tools}
    return held, [parameters for _, parameters in pairs]


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
    return replace(message, parts=tuple(parts))


def _as_shown(text: str, cursor: int, inside: str, after: str) -> str | None:
    """The content as it stands in the unmarked text: templates may trim what marks protect."""
    for shown in (inside, inside.strip(), inside.rstrip(), inside.lstrip()):
        if text.startswith(shown + after, cursor):
            return shown
    return None


def _tokens_of(content: _Content, ends: list[int]) -> Span:
    """Tokens that end inside the content: a space or a line break may be merged with its first."""
    return Span(bisect_right(ends, content.start), bisect_right(ends, content.stop))
