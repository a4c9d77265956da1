"""Messages to Prompt: the template's text, its tokens, and which tokens are whose content."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvmem.chat.binding import bind, find_thinking
from kvmem.chat.contents import ContentFinder, find_last_part
from kvmem.chat.fields import FieldError
from kvmem.chat.reply import NewParser, Parser, PlainParser, ReplyReader, ThinkingTags
from kvmem.chat.request import ChatRequest
from kvmem.chat.segments import SegmentTokenizer, TokenizedText
from kvmem.chat.template_format import Demands, Parameters, TemplateFormat
from kvmem.chat.token_bound import TokenBound
from kvmem.engine.prompt import Prompt, RoleSpan, Span, Tokens
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.errors import RequestError
from kvmem.llama.reply_parser import ReplyParser
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab

__all__ = ["ChatRenderer", "RenderedChat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A request as the model sees it, and how its reply is made and read.

    text: the prompt as text. stops: texts that end the reply. ends: further ones, of the template.
    parser: for this reply alone. sampling: with the defaults of the thinking state, and with what
    the reply is bound to.
    preserved: bytes of control tokens that belong to the reply. call_ids: those of the history.
    """

    text: str
    prompt: Prompt
    stops: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    parser: NewParser = field(default_factory=PlainParser)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    time_limit_s: float | None = None
    n_logprobs: int | None = None
    thinking: ThinkingTags = field(default_factory=ThinkingTags)
    preserved: Mapping[int, bytes] = field(default_factory=dict)
    call_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def reader(self) -> ReplyReader:
        """Reads the reply; a parser serves one."""
        return self._reader(self.parser)

    def readers(self, n: int) -> list[ReplyReader]:
        """One for each of so many replies."""
        parsers = [self.parser, *(self.parser.clone() for _ in range(n - 1))]
        return [self._reader(parser) for parser in parsers]

    def _reader(self, parser: Parser) -> ReplyReader:
        return ReplyReader(
            parser,
            stops=self.stops,
            ends=self.ends,
            preserved=self.preserved,
            used_ids=self.call_ids,
            thinking=self.thinking,
            notes=self.notes,
        )

    def params(self) -> GenerateParams:
        return GenerateParams(
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            time_limit_s=self.time_limit_s,
            n_logprobs=self.n_logprobs,
        )


class ChatRenderer:
    """Renders requests for one model. Several threads may use it at a time."""

    def __init__(self, template: ChatTemplate, vocab: Vocab) -> None:
        self._template = template
        self._vocab = vocab
        self._format = TemplateFormat(template)
        self._tokenizer = SegmentTokenizer(vocab, self._format.source)
        self._contents = ContentFinder(template)
        self._bound = TokenBound(vocab)

    def render(self, request: ChatRequest, *, limit_tokens: int | None = None) -> RenderedChat:
        """Raises RequestError with the template's reason where it refuses the messages.

        limit_tokens: raise ContextLengthError where it is certain, before the prompt is tokenised,
            that it has as many.
        """
        demands = self._format.check(request, self._vocab.model)
        request = replace(
            request, messages=self._format.place(request.messages), schema=demands.schema
        )
        fields = _template_fields(request, self._format.calls_in_parallel(request))
        held, parameters = _held_fields(request, fields, demands)
        shown = self._format.for_prompt(fields, held)
        if held is fields or shown is held:
            parser = self._open(request, held)
            text = parser.rendered["prompt"]
        else:
            # it shows all tools, so that its beginning stays what it was
            prompt = self._render(request, shown)
            text = prompt["prompt"]
            parser = self._open_held(request, held, prompt["generation_prompt"])
        if not text:
            raise FieldError(
                "messages", "come to nothing in the chat template: give one with content"
            )
        if limit_tokens is not None:
            self._bound.check(text, limit_tokens)
        result = parser.rendered
        if result["grammar"]:
            grammar = self._format.hold(result["grammar"], demands, parameters, self._vocab.model)
            result = {**result, "grammar": grammar}
        return RenderedChat(
            text=text,
            prompt=self._locate(request, shown, text, self._tokenizer.tokenize(text)),
            stops=tuple(request.stop),
            ends=tuple(result["stops"]),
            parser=parser,
            sampling=bind(
                request, fields, result, vocab=self._vocab, thinks=self._format.can_think
            ),
            max_tokens=request.max_tokens,
            time_limit_s=request.time_limit_s,
            n_logprobs=request.n_logprobs,
            thinking=find_thinking(result),
            preserved={token: self._vocab.piece(token) for token in result["preserved"]},
            call_ids=tuple(call.id for m in request.messages for call in m.tool_calls),
            notes=(
                *request.notes,
                *demands.notes,
                *self._format.left_out(request.messages),
            ),
        )

    def _open(self, request: ChatRequest, fields: dict[str, Any]) -> ReplyParser:
        try:
            return ReplyParser(self._template, self._vocab.model, fields)
        except RequestError as error:
            raise self._format.blame(request, fields, error) from None

    def _open_held(
        self, request: ChatRequest, held: dict[str, Any], generation_prompt: str
    ) -> ReplyParser:
        """The parser for a prompt that is rendered already, and ends like this.

        Of the messages it sees no more than the end; so the last turn will do, where the prompt
        ends alike for it.
        """
        messages = request.messages
        asking = max((i for i, one in enumerate(messages) if one.role == "user"), default=0)
        if asking and not request.continues:
            with suppress(RequestError):
                last = {**held, "messages": held["messages"][asking:]}
                parser = ReplyParser(self._template, self._vocab.model, last)
                if parser.rendered["generation_prompt"] == generation_prompt:
                    return parser
        return self._open(request, held)

    def _render(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            rendered: dict[str, Any] = self._template.render(fields)
        except RequestError as error:
            raise self._format.blame(request, fields, error) from None
        return rendered

    def _locate(
        self, request: ChatRequest, fields: dict[str, Any], text: str, tokenized: TokenizedText
    ) -> Prompt:
        tokens = Tokens(tokenized.tokens)
        if tokenized.ends is None:
            return Prompt(
                tokens=tokens,
                query_fallback="the tokens do not join to the prompt's text",
                conversation_id=request.conversation_id,
                is_read_anew=not request.uses_cache,
            )
        contents, query, fallback = self._contents.find(request, fields, text)
        # tokens that end inside: a space or a line break may be merged with the first of a content
        bounds = np.array([(c.start, c.stop) for c in contents], np.int32).reshape(-1, 2)
        found = np.searchsorted(tokenized.ends, bounds, side="right").tolist()
        spans = [Span(start, stop) for start, stop in found]
        query_span = None if query is None else spans[contents.index(query)]
        if query_span is not None and len(query_span) == 0:
            query_span, fallback = None, "the last user message has no token of its own"
        last = find_last_part(request.messages, contents, text)
        return Prompt(
            tokens=tokens,
            spans=tuple(
                RoleSpan(request.messages[c.index].role, span)
                for c, span in zip(contents, spans, strict=True)
            ),
            query_span=query_span,
            last_part=None if last is None else int(np.searchsorted(tokenized.ends, last, "right")),
            query_fallback=fallback,
            conversation_id=request.conversation_id,
            is_read_anew=not request.uses_cache,
        )


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
) -> tuple[dict[str, Any], list[Parameters]]:
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
