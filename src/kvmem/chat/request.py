"""Client JSON to ChatRequest: the only place that reads what a client sent.

Unknown fields are ignored; null means absent; a wrong type is a FieldError that names the field.
What is known but not built yet is an UnsupportedContentError, of a single field an
UnsupportedFieldError: nothing that was asked for is dropped in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmem.chat.fields import (
    FieldError,
    read_bool,
    read_integer,
    read_object,
    read_text,
)
from kvmem.chat.messages import Message, read_messages
from kvmem.chat.sampling import (
    read_max_tokens,
    read_n_replies,
    read_sampling,
    read_stop,
    read_time_limit,
)
from kvmem.chat.thinking import Thinking, read_thinking
from kvmem.chat.tools import Tool, ToolChoice, read_tool_choice, read_tools
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import UnsupportedContentError

__all__ = ["ChatRequest", "RequestDefaults", "parse_chat_request"]

MAX_TOP_LOGPROBS = 20
MAX_ID_LETTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What holds where a request says nothing.

    max_tokens: None for the room in the workspace. show_prompt: put it into every reply.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    thinking: Thinking = field(default_factory=Thinking)
    show_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion as asked for.

    parallel_tool_calls: None where nothing is said.
    schema: JSON schema that the content must follow; grammar: GBNF for the whole reply.
    sampling: what the request or the server's flags set, and no more.
    max_tokens: None for the room in the workspace. time_limit_s: as GenerateParams has it.
    n_logprobs: likeliest tokens to report beside each chosen one; None for no report.
    continues: go on with the last message, an assistant's: True for whichever of its parts is
        last, or "content" or "reasoning_content".
    include_memory: put the memory report into the reply.
    show_progress, show_timings: tell a stream how far the prompt is read, and how fast all goes.
    show_prompt: put it into the reply.
    keeps_thinking: leave thinking in the content, as the model writes it.
    n: replies that are wanted.
    conversation_id: what the client calls the conversation; a hint.
    uses_cache: what is known of the prompt need not be read again.
    notes: what was asked for and is not done.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool | None = None
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None
    thinking: Thinking = field(default_factory=Thinking)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    time_limit_s: float | None = None
    n_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    include_memory: bool = False
    show_timings: bool = False
    conversation_id: str | None = None
    uses_cache: bool = True
    add_generation_prompt: bool = True
    continues: bool | str = False
    show_progress: bool = False
    show_prompt: bool = False
    keeps_thinking: bool = False
    notes: tuple[str, ...] = ()


def parse_chat_request(body: object, defaults: RequestDefaults | None = None) -> ChatRequest:
    """Read the body of a chat completion. Raises FieldError and UnsupportedContentError."""
    defaults = defaults or RequestDefaults()
    if not isinstance(body, dict):
        raise FieldError("the body", "must be a JSON object")
    options = read_object(body, "stream_options") or {}
    messages = read_messages(body)
    tools, notes = read_tools(body)
    choice = read_tool_choice(body, tools)
    schema, grammar = _read_constraint(body)
    if tools and choice.mode != "none" and (schema is not None or grammar is not None):
        name = "grammar" if schema is None else "a schema for the reply"
        raise UnsupportedContentError(
            f"{name} and tools exclude each other: leave one out, or set tool_choice to none"
        )
    add_prompt = read_bool(body, "add_generation_prompt")
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=read_bool(body, "parallel_tool_calls"),
        schema=schema,
        grammar=grammar,
        thinking=read_thinking(body, defaults.thinking),
        sampling=read_sampling(body, defaults.sampling),
        max_tokens=read_max_tokens(body, defaults.max_tokens),
        time_limit_s=read_time_limit(body),
        n_logprobs=_read_logprobs(body),
        stop=read_stop(body),
        n=read_n_replies(body),
        stream=read_bool(body, "stream") or False,
        include_usage=read_bool(options, "include_usage", path="stream_options.") or False,
        include_memory=_read_include_memory(body),
        show_timings=read_bool(body, "timings_per_token") or False,
        conversation_id=_read_conversation_id(body),
        uses_cache=body.get("cache_prompt") is not False,
        add_generation_prompt=add_prompt is not False,
        continues=_read_continues(body, messages),
        show_progress=read_bool(body, "return_progress") or False,
        show_prompt=read_bool(body, "verbose") or defaults.show_prompt,
        keeps_thinking=_read_keeps_thinking(body),
        notes=notes,
    )


def _read_constraint(body: dict[str, Any]) -> tuple[Mapping[str, Any] | None, str | None]:
    """Schema and grammar that the reply must follow, at most one of them."""
    form = read_object(body, "response_format") or {}
    kind = read_text(form, "type", path="response_format.") or "text"
    given: dict[str, Mapping[str, Any] | None] = {}
    if kind == "json_schema":
        # OpenAI has the schema one level down, llama-server beside the type too
        inner = read_object(form, "json_schema", path="response_format.") or form
        schema = read_object(inner, "schema", path="response_format.json_schema.")
        if schema is None:
            raise FieldError("response_format.json_schema.schema", "must be given")
        given["response_format"] = schema
    elif kind == "json_object":
        schema = read_object(form, "schema", path="response_format.")
        given["response_format"] = schema or {"type": "object"}
    elif kind != "text":
        raise FieldError("response_format.type", "must be text, json_object or json_schema")
    if (schema := read_object(body, "json_schema")) is not None:
        given["json_schema"] = schema
    grammar = read_text(body, "grammar") or None
    if len(given) + (grammar is not None) > 1:
        names = ", ".join([*given, *(["grammar"] if grammar else [])])
        raise FieldError(names, "exclude each other: give one")
    return next(iter(given.values()), None), grammar


def _read_logprobs(body: dict[str, Any]) -> int | None:
    n_top = read_integer(body, "top_logprobs", least=0, most=MAX_TOP_LOGPROBS)
    if read_bool(body, "logprobs"):
        return n_top or 0
    if n_top:
        raise FieldError("top_logprobs", "needs logprobs to be true")
    return None


def _read_continues(body: dict[str, Any], messages: tuple[Message, ...]) -> bool | str:
    """As llama-server: a message of the assistant at the end is one to go on with."""
    name = "continue_final_message"
    value = body.get(name)
    begins_anew = read_bool(body, "add_generation_prompt")
    if value is None and begins_anew is None:
        return _ends_with_prefill(messages)
    if value is None or value is False:
        return False
    if begins_anew:
        raise FieldError(name, "and add_generation_prompt exclude each other: set one")
    if value is not True and value not in ("content", "reasoning_content"):
        raise FieldError(name, 'must be true, false, "content" or "reasoning_content"')
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise FieldError(name, "needs an assistant message without tool calls at the end")
    return bool(value) if value is True else str(value)


def _read_keeps_thinking(body: dict[str, Any]) -> bool:
    form = read_text(body, "reasoning_format")
    if form not in (None, "none", "auto", "deepseek", "deepseek-legacy"):
        raise FieldError("reasoning_format", "must be none, auto, deepseek or deepseek-legacy")
    return form == "none"


def _ends_with_prefill(messages: tuple[Message, ...]) -> bool:
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return False
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise FieldError("messages", "end with two of the assistant: join them")
    return True


def _read_include_memory(body: dict[str, Any]) -> bool:
    """`kvmem: true` asks for the report; an object holds hints, which never fail a request."""
    value = body.get("kvmem")
    return value is True or (isinstance(value, dict) and value.get("report") is True)


def _read_conversation_id(body: dict[str, Any]) -> str | None:
    """`kvmem.conversation_id`: what is no text is no hint."""
    hints = body.get("kvmem")
    value = hints.get("conversation_id") if isinstance(hints, dict) else None
    return value[:MAX_ID_LETTERS] if isinstance(value, str) and value else None
