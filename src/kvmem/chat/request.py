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
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import UnsupportedContentError

__all__ = ["ChatRequest", "RequestDefaults", "parse_chat_request"]

MAX_SEED = (1 << 32) - 1
MAX_LAST_N = 1 << 20  # -1 asks for the whole history; the sampler wants a number

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
    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion as asked for.

    max_tokens: None for the room in the workspace.
    enable_thinking: None leaves it to the template.
    tool_choice: "auto" or "none".
    include_memory: put the memory report into the reply.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = False
    enable_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_memory: bool = False


def parse_chat_request(body: object, defaults: RequestDefaults | None = None) -> ChatRequest:
    """Read the body of a chat completion. Raises FieldError and UnsupportedContentError."""
    defaults = defaults or RequestDefaults()
    if not isinstance(body, dict):
        raise FieldError("the body", "must be a JSON object")
    _refuse_what_comes_later(body)
    options = read_object(body, "stream_options") or {}
    thinking, kwargs = _read_thinking(body, defaults.enable_thinking)
    return ChatRequest(
        messages=read_messages(body),
        tools=_read_tools(body),
        tool_choice=_read_tool_choice(body),
        parallel_tool_calls=read_bool(body, "parallel_tool_calls") or False,
        enable_thinking=thinking,
        template_kwargs=kwargs,
        sampling=_read_sampling(body, defaults.sampling),
        max_tokens=_read_max_tokens(body, defaults.max_tokens),
        stop=_read_stop(body),
        stream=read_bool(body, "stream") or False,
        include_usage=read_bool(options, "include_usage", path="stream_options.") or False,
        include_memory=_read_include_memory(body),
    )


def _refuse_what_comes_later(body: dict[str, Any]) -> None:
    if (read_integer(body, "n", least=1) or 1) > 1:
        raise UnsupportedContentError("n is above 1, but one reply is made per request")
    if read_bool(body, "logprobs") or read_integer(body, "top_logprobs", least=0):
        raise UnsupportedContentError("logprobs are not supported yet")
    form = read_object(body, "response_format") or {}
    kind = read_text(form, "type", path="response_format.")
    if kind not in (None, "text"):
        raise UnsupportedContentError(f"response_format of type {kind!r} is not supported yet")
    for name in ("json_schema", "grammar"):
        if body.get(name):
            raise UnsupportedContentError(f"{name} is not supported yet")


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
    samplers = read_list(body, "samplers")
    if samplers is not None:
        extra["samplers"] = samplers
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


def _read_thinking(
    body: dict[str, Any], default: bool | None
) -> tuple[bool | None, Mapping[str, Any]]:
    """Whether to think, and what the template is told besides.

    The first that is set decides: chat_template_kwargs.enable_thinking, reasoning_effort "none",
    enable_thinking, the server's default. A top-level reasoning_effort beats the one in the kwargs;
    "default" takes it back.
    """
    kwargs = dict(read_object(body, "chat_template_kwargs") or {})
    inner = read_bool(kwargs, "enable_thinking", path="chat_template_kwargs.")
    inner_effort = read_text(kwargs, "reasoning_effort", path="chat_template_kwargs.")
    effort = read_text(body, "reasoning_effort") or inner_effort
    outer = read_bool(body, "enable_thinking")
    kwargs.pop("enable_thinking", None)
    kwargs.pop("reasoning_effort", None)
    if effort is not None and effort not in ("none", "default"):
        kwargs["reasoning_effort"] = effort
    # else old thinking vanishes from the history, and with it the prefix that was read before
    kwargs.setdefault("preserve_reasoning", True)
    for choice in (inner, False if effort == "none" else None, outer):
        if choice is not None:
            return choice, kwargs
    return default, kwargs


def _read_tools(body: dict[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = read_list(body, "tools") or []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise FieldError(path, "must be an object")
        if tool.get("type") != "function":
            raise FieldError(f"{path}.type", 'must be "function"')
        function = read_object(tool, "function", path=f"{path}.")
        if not function or not read_text(function, "name", path=f"{path}.function."):
            raise FieldError(f"{path}.function.name", "must be given")
    return tuple(tools)


def _read_tool_choice(body: dict[str, Any]) -> str:
    choice = body.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if choice == "required" or isinstance(choice, dict):
        raise UnsupportedContentError("a tool_choice that forces a call is not supported yet")
    raise FieldError("tool_choice", 'must be "auto", "none", "required" or a function')
