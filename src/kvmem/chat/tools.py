"""Tools of a request, and which of them must be called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmem.chat.fields import FieldError, read_bool, read_list, read_object, read_text

__all__ = ["Tool", "ToolChoice", "read_tool_choice", "read_tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. path: where it stands in the request.

    definition: the client's object, as the template sees it.
    is_strict: arguments that break the schema are not acceptable.
    """

    name: str
    definition: Mapping[str, Any]
    path: str
    is_strict: bool = False

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of the arguments; empty for a function without any."""
        return self.definition["function"].get("parameters") or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """mode: "auto", "none" or "required". name: the one function that must be called, if named."""

    mode: str = "auto"
    name: str | None = None


def read_tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The functions, and notes about tools of other types, which only their makers can run."""
    tools: list[Tool] = []
    notes: list[str] = []
    for index, item in enumerate(read_list(body, "tools") or []):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise FieldError(path, "must be an object")
        kind = read_text(item, "type", path=f"{path}.")
        if kind is None:
            raise FieldError(f"{path}.type", "must be given")
        if kind != "function":
            notes.append(f"{path} has the type {kind!r} and is left out: only functions are known")
            continue
        function = read_object(item, "function", path=f"{path}.")
        inner = f"{path}.function."
        if not function or not (name := read_text(function, "name", path=inner)):
            raise FieldError(f"{inner}name", "must be given")
        read_object(function, "parameters", path=inner)
        read_text(function, "description", path=inner)
        strict = read_bool(function, "strict", path=inner) or False
        tools.append(Tool(name=name, definition=item, path=path, is_strict=strict))
    return tuple(tools), tuple(notes)


def read_tool_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """Raises FieldError: an unknown mode, or a call is demanded that cannot be made."""
    choice = body.get("tool_choice")
    if choice is None:
        return ToolChoice()
    if isinstance(choice, dict):
        name = _named(choice)
        if name not in {tool.name for tool in tools}:
            raise FieldError("tool_choice.function.name", "must be the name of one of the tools")
        return ToolChoice(mode="required", name=name)
    if choice not in ("auto", "none", "required"):
        raise FieldError("tool_choice", 'must be "auto", "none", "required" or a function')
    if choice == "required" and not tools:
        raise FieldError("tool_choice", 'is "required", but there is no function in tools')
    return ToolChoice(mode=choice)


def _named(choice: dict[str, Any]) -> str:
    """The function's name: {"type": "function", "function": {"name": ...}}."""
    if choice.get("type") != "function":
        raise FieldError("tool_choice.type", 'must be "function"')
    function = read_object(choice, "function", path="tool_choice.")
    name = read_text(function or {}, "name", path="tool_choice.function.")
    if not name:
        raise FieldError("tool_choice.function.name", "must be given")
    return name
