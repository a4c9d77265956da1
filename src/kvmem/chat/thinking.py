"""Whether, how hard and how long a model thinks: what the request says, and what the server does.

docs/server-api.md has the table of what wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmem.chat.fields import FieldError, read_bool, read_integer, read_object, read_text

__all__ = ["EFFORTS", "Thinking", "read_template_kwargs", "read_thinking"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "default")

# what the messages and the tokenizer decide
RESERVED = ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a request, or a server by default, wants the model to think.

    enabled: None leaves it to the template.
    effort: one of EFFORTS; None where nothing is said.
    budget: tokens of thinking, 0 for none at all; None for no limit.
    message: text put before the end of thinking when the budget is used up.
    kwargs: further variables of the template.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    message: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_thinking(body: Mapping[str, Any], defaults: Thinking) -> Thinking:
    """What holds for this request: `effort` is None or a text for the template.

    A request's kwargs beat the server's. An effort beside the kwargs beats the one in them; for
    enable_thinking it is the other way round. Effort "none" turns thinking off, no effort turns it
    on, and "default" takes an effort back.
    """
    asked = read_template_kwargs(read_object(body, "chat_template_kwargs") or {})
    effort = read_effort(body) or asked.effort
    enabled = _first(asked.enabled, _off(effort), read_bool(body, "enable_thinking"))
    given = defaults.kwargs
    own = read_template_kwargs(given)
    own_effort = defaults.effort or own.effort
    enabled = _first(enabled, own.enabled, _off(own_effort), defaults.enabled)
    effort = effort or own_effort
    return Thinking(
        enabled=enabled,
        effort=None if effort in ("none", "default") else effort,
        budget=_read_budget(body, defaults.budget),
        message=_first(read_text(body, "reasoning_budget_message"), defaults.message) or "",
        kwargs={**own.kwargs, **asked.kwargs},
    )


def read_template_kwargs(
    kwargs: Mapping[str, Any], *, name: str = "chat_template_kwargs"
) -> Thinking:
    """Variables of a template, and what they say about thinking.

    Raises FieldError: a variable that is not the client's, or a boolean written as a text.
    """
    path = f"{name}."
    for key, value in kwargs.items():
        if key in RESERVED:
            raise FieldError(path + key, "cannot be set here")
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            raise FieldError(path + key, "must be true or false, not a string")
    rest = {k: v for k, v in kwargs.items() if k not in ("enable_thinking", "reasoning_effort")}
    return Thinking(
        enabled=read_bool(kwargs, "enable_thinking", path=path),
        effort=read_effort(kwargs, path=path),
        kwargs=rest,
    )


def read_effort(body: Mapping[str, Any], *, path: str = "") -> str | None:
    effort = read_text(body, "reasoning_effort", path=path)
    if effort is not None and effort not in EFFORTS:
        raise FieldError(f"{path}reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    return effort


def _read_budget(body: Mapping[str, Any], default: int | None) -> int | None:
    """The first of the two names that is set; -1 for no limit."""
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        budget = read_integer(body, name, least=-1)
        if budget is not None:
            return None if budget == -1 else budget
    return default


def _off(effort: str | None) -> bool | None:
    return False if effort == "none" else None


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
