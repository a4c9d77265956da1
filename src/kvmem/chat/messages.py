"""Messages of a request, in OpenAI's shape."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmem.chat.fields import FieldError, UnsupportedFieldError, read_list, read_object, read_text

__all__ = ["Message", "ToolCall", "read_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
OLD_ROLES = {"function": "tool"}
INSTRUCTIONS = ("system", "developer")

# type of a part -> the field with its text; the last ones are those of other APIs of OpenAI
TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an earlier reply made. arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    parts: its texts, in order; a plain string is one part, no content is none.
    shown_as: the role that the template sees, where that is another one.
    lead: text that is shown before it and is not its own.
    path: where it stands in the request.
    """

    role: str
    parts: tuple[str, ...] = ()
    is_list: bool = False
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    shown_as: str | None = None
    lead: str = ""
    path: str = ""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_instruction(self) -> bool:
        """Whether it speaks for the one who runs the agent."""
        return self.role in INSTRUCTIONS

    def for_template(self) -> dict[str, Any]:
        """As the template reads it."""
        content: object = self.lead + self.text
        if self.is_list:
            parts = (self.lead, *self.parts) if self.lead else self.parts
            content = [{"type": "text", "text": part} for part in parts]
        fields: dict[str, Any] = {"role": self.shown_as or self.role, "content": content}
        if self.reasoning is not None:
            fields["reasoning_content"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            fields["name"] = self.name
        return fields


def read_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a request body. Raises FieldError; UnsupportedFieldError is one."""
    messages = read_list(body, "messages")
    if not messages:
        raise FieldError("messages", "must be a list with at least one message")
    return tuple(_read_message(item, f"messages[{i}]") for i, item in enumerate(messages))


def _read_message(item: object, path: str) -> Message:
    if not isinstance(item, dict):
        raise FieldError(path, "must be an object")
    role = read_text(item, "role", path=f"{path}.") or ""
    role = OLD_ROLES.get(role, role)
    if role not in ROLES:
        raise FieldError(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    content = item.get("content")
    parts: tuple[str, ...] = ()
    if isinstance(content, str):
        parts = (content,)
    elif isinstance(content, list):
        parts = tuple(_read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    elif content is not None:
        raise FieldError(f"{path}.content", "must be a string, a list of parts or null")
    return Message(
        role=role,
        parts=parts,
        is_list=isinstance(content, list),
        reasoning=_read_reasoning(item, path),
        tool_calls=_read_tool_calls(item, path),
        tool_call_id=read_text(item, "tool_call_id", path=f"{path}."),
        name=read_text(item, "name", path=f"{path}."),
        path=path,
    )


def _read_part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise FieldError(path, "must be an object")
    kind = read_text(part, "type", path=f"{path}.")
    if kind is None:
        raise FieldError(f"{path}.type", "must be given")
    name = TEXT_PARTS.get(kind)
    if name is None:
        raise UnsupportedFieldError(path, f"has the type {kind!r}; only text can be read")
    text = read_text(part, name, path=f"{path}.")
    if text is None:
        raise FieldError(f"{path}.{name}", "must be given")
    return text


def _read_reasoning(item: dict[str, Any], path: str) -> str | None:
    """The thinking of an earlier reply, by either of its names; another type is not ours."""
    text = read_text(item, "reasoning_content", path=f"{path}.")
    other = item.get("reasoning")
    return other if text is None and isinstance(other, str) else text


def _read_tool_calls(item: dict[str, Any], path: str) -> tuple[ToolCall, ...]:
    calls = []
    for index, call in enumerate(read_list(item, "tool_calls", path=f"{path}.") or []):
        where = f"{path}.tool_calls[{index}]"
        if not isinstance(call, dict):
            raise FieldError(where, "must be an object")
        # a call of a tool that is no function has its fields under its type
        kind = read_text(call, "type", path=f"{where}.") or "function"
        function = read_object(call, kind, path=f"{where}.") or {}
        name = read_text(function, "name", path=f"{where}.{kind}.")
        if not name:
            raise FieldError(f"{where}.{kind}.name", "must be given")
        arguments = function.get("arguments", function.get("input"))
        calls.append(
            ToolCall(
                id=read_text(call, "id", path=f"{where}.") or "",
                name=name,
                arguments=_read_arguments(arguments, f"{where}.{kind}.arguments"),
            )
        )
    return tuple(calls)


def _read_arguments(value: object, path: str) -> str:
    """JSON text of an object. Clients send the text, the object itself, or nothing.

    A text that is no object is what a reply that was cut short left behind: the model sees it as
    it is, under the name `arguments`, and the conversation goes on.
    """
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        value = parsed if isinstance(parsed, dict) else {"arguments": value}
    if not isinstance(value, dict):
        raise FieldError(path, "must be an object, or a text that holds one")
    return json.dumps(value, ensure_ascii=False)
