"""Client JSON to ChatRequest: the only place that reads what a client sent.

Unknown fields are ignored; null means absent; a wrong type is a FieldError that names the field.
What is known but not built yet is an UnsupportedContentError: nothing that was asked for is dropped
in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvmem.chat.fields import (
    FieldError,
    read_bool,
    read_integer,
    read_list,
    read_number,
    read_object,
    read_text,
)
from kvmem.chat.messages import Message, read_messages
from kvmem.chat.thinking import Thinking, read_thinking
from kvmem.chat.tools import Tool, ToolChoice, read_tool_choice, read_tools
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import UnsupportedContentError

__all__ = ["ChatRequest", "RequestDefaults", "parse_chat_request"]

MAX_SEED = (1 << 32) - 1
MAX_LAST_N = 1 << 20  # -1 asks for the whole history; the sampler wants a number
MAX_TOP_LOGPROBS = 20

# field of the request -> (name for the sampler, least, most); those that SamplingParams lacks
EXTRA_NUMBERS: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "typical_p": ("typical_p", 0, 1),
        "top_n_sigma": ("top_n_sigma", -1, 1e6),
        "xtc_probability": ("xtc_probability", 0, 1),
        "xtc_threshold": ("xtc_threshold", 0, 1),
        "dynatemp_range": ("dynatemp_range", 0, 1e6),
        "dynatemp_exponent": ("dynatemp_exponent", -1e6, 1e6),
        "dry_multiplier": ("dry_multiplier", 0, 1e6),
        "dry_base": ("dry_base", 0, 1e6),
        "mirostat_tau": ("mirostat_tau", 0, 1e6),
        "mirostat_eta": ("mirostat_eta", 0, 1e6),
        "adaptive_target": ("adaptive_target", -1, 1),
        "adaptive_decay": ("adaptive_decay", 0, 0.99),
    }
)
EXTRA_INTEGERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "repeat_last_n": (-1, MAX_LAST_N),
        "dry_allowed_length": (0, MAX_LAST_N),
        "dry_penalty_last_n": (-1, MAX_LAST_N),
        "min_keep": (0, MAX_LAST_N),
        "mirostat": (0, 2),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What holds where a request says nothing. max_tokens: None for the room in the workspace."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    thinking: Thinking = field(default_factory=Thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion as asked for.

    parallel_tool_calls: None where nothing is said.
    schema: JSON schema that the content must follow; grammar: GBNF for the whole reply.
    sampling: what the request or the server's flags set, and no more.
    max_tokens: None for the room in the workspace.
    n_logprobs: likeliest tokens to report beside each chosen one; None for no report.
    continues: go on with the last message, an assistant's: True for whichever of its parts is
        last, or "content" or "reasoning_content".
    include_memory: put the memory report into the reply.
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
    n_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_memory: bool = False
    add_generation_prompt: bool = True
    continues: bool | str = False
    notes: tuple[str, ...] = ()


def parse_chat_request(body: object, defaults: RequestDefaults | None = None) -> ChatRequest:
    """Read the body of a chat completion. Raises FieldError and UnsupportedContentError."""
    defaults = defaults or RequestDefaults()
    if not isinstance(body, dict):
        raise FieldError("the body", "must be a JSON object")
    if (read_integer(body, "n", least=1) or 1) > 1:
        raise UnsupportedContentError("n is above 1, but one reply is made per request")
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
        sampling=_read_sampling(body, defaults.sampling),
        max_tokens=_read_max_tokens(body, defaults.max_tokens),
        n_logprobs=_read_logprobs(body),
        stop=_read_stop(body),
        stream=read_bool(body, "stream") or False,
        include_usage=read_bool(options, "include_usage", path="stream_options.") or False,
        include_memory=_read_include_memory(body),
        add_generation_prompt=add_prompt is not False,
        continues=_read_continues(body, messages),
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


def _ends_with_prefill(messages: tuple[Message, ...]) -> bool:
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return False
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise FieldError("messages", "end with two of the assistant: join them")
    return True


def _read_max_tokens(body: dict[str, Any], default: int | None) -> int | None:
    """The first of the three names that is set; -1 asks for all there is room for."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = read_integer(body, name, least=-1)
        if value is not None:
            return None if value == -1 else value
    return default


def _read_stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FieldError("stop", "must be a string or a list of strings")
    return tuple(text for text in texts if text)


def _read_include_memory(body: dict[str, Any]) -> bool:
    """`kvmem: true` asks for the report; an object holds hints, which never fail a request."""
    value = body.get("kvmem")
    return value is True or (isinstance(value, dict) and value.get("report") is True)


def _read_sampling(body: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    extra: dict[str, object] = {}
    for name, (target, least, most) in EXTRA_NUMBERS.items():
        number = read_number(body, name, least=least, most=most)
        if number is not None:
            extra[target] = number
    for name, (lowest, highest) in EXTRA_INTEGERS.items():
        integer = read_integer(body, name, least=lowest, most=highest)
        if integer is not None:
            extra[name] = MAX_LAST_N if integer == -1 else integer
    bias = _read_logit_bias(body)
    if bias:
        extra["logit_bias"] = bias
    for name in ("samplers", "dry_sequence_breakers"):
        texts = read_list(body, name)
        if texts is not None:
            if not all(isinstance(text, str) and text for text in texts):
                raise FieldError(name, "must be a list of strings")
            extra[name] = texts
    repeat = read_number(body, "repeat_penalty", least=0, most=1e6)
    if repeat == 0:
        raise FieldError("repeat_penalty", "is 0, but must be above 0 (1 turns it off)")
    given = {
        "temperature": read_number(body, "temperature", least=0, most=1e6),
        "top_k": read_integer(body, "top_k"),
        "top_p": read_number(body, "top_p", least=0, most=1),
        "min_p": read_number(body, "min_p", least=0, most=1),
        "repeat_penalty": repeat,
        "presence_penalty": read_number(body, "presence_penalty", least=-1e6, most=1e6),
        "frequency_penalty": read_number(body, "frequency_penalty", least=-1e6, most=1e6),
        "seed": read_integer(body, "seed", least=-1, most=MAX_SEED),
        "ignore_eos": read_bool(body, "ignore_eos"),
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, extra={**defaults.extra, **extra}, **changes)


def _read_logit_bias(body: dict[str, Any]) -> list[list[float | None]]:
    """{"id": bias} as OpenAI has it, or llama-server's [[id, bias], ...]; false forbids a token."""
    value = body.get("logit_bias")
    if value is None:
        return []
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise FieldError("logit_bias", "must be an object from token ids to numbers")
    biases: list[list[float | None]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FieldError("logit_bias", "must hold pairs of a token id and a number")
        token, bias = pair
        try:
            token_id = int(token)
        except (TypeError, ValueError):
            raise FieldError("logit_bias", "must name tokens by their ids") from None
        if bias is False:
            biases.append([token_id, None])
        elif isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FieldError("logit_bias", "must hold numbers (or false, which forbids a token)")
        else:
            biases.append([token_id, float(bias)])
    return biases
