"""What one chat template can do: where it takes system messages, how it writes calls, whether it
thinks. Found out by rendering, once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from kvmem.chat.fields import FieldError, UnsupportedFieldError
from kvmem.chat.json_schema import (
    NormalSchema,
    Unenforced,
    find_loose_texts,
    find_oversized,
    find_unenforced,
    has_loose_texts,
    hold_texts,
    normal_schema,
    only_properties,
    put_rules,
    require_grammar,
    require_schema,
    text_rules,
)
from kvmem.chat.messages import Message
from kvmem.chat.request import ChatRequest
from kvmem.chat.tools import Tool
from kvmem.errors import RequestError
from kvmem.llama.grammar import check_grammar, schema_grammar
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate

__all__ = ["Demands", "Parameters", "TemplateFormat"]

PROBE = "kvmem probe"
MAX_KEPT = 512


@dataclass(frozen=True, slots=True)
class Parameters:
    """The arguments of a function.

    schema: as llama.cpp is to get it.
    ranges: rules in place of constants and patterns of its grammar (json_schema.ranges).
    rules: what each argument that is written as plain text is held to.
    lost: what calls are not held to. narrowed: where they are held to less than the schema allows.
    """

    schema: Mapping[str, Any]
    ranges: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[str | None, ...] = ()
    lost: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What replies are held to, as llama.cpp is to get it.

    parameters: of each tool. schema: of the reply, and ranges: rules in place of constants of its
    grammar. notes: what is demanded and does not hold, and what holds to less than was asked.
    """

    parameters: tuple[Parameters, ...] = ()
    schema: Mapping[str, Any] | None = None
    ranges: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class TemplateFormat:
    """The abilities of a template. Several threads may ask at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[str, Parameters] = {}

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._template.info()

    @property
    def source(self) -> str:
        source: str = self._info["source"]
        return source

    @property
    def can_think(self) -> bool:
        thinks: bool = self._info["thinking"]
        return thinks

    @property
    def has_tools(self) -> bool:
        """Whether it shows tools to the model."""
        shows: bool = self._info["caps"]["supports_tools"]
        return shows

    def left_out(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """What it does not show of these messages."""
        if self._info["caps"]["supports_tool_calls"] or not any(m.tool_calls for m in messages):
            return ()
        return ("the chat template has no place for calls: those of the messages are left out",)

    def calls_in_parallel(self, request: ChatRequest) -> bool:
        """Whether a reply may hold several calls: as asked, else as the template does."""
        if request.parallel_tool_calls is not None:
            return request.parallel_tool_calls
        can: bool = self._info["caps"]["supports_parallel_tool_calls"]
        return can

    def check(self, request: ChatRequest, model: Model) -> Demands:
        """Whether all that is demanded can be enforced.

        Raises:
            FieldError: a demand that would be lost, by tool, path and keyword.
        """
        if request.grammar is not None:
            require_grammar(model, request.grammar)
        if request.schema is not None:
            normal = require_schema(model, request.schema, "response_format")
            told = tuple(f"response_format: {text}" for text in _narrowed(normal))
            return Demands(schema=normal.schema, ranges=normal.ranges, notes=told)
        if not request.tools or request.tool_choice.mode == "none":
            return Demands()
        # calls are read even where tools are not shown
        found = [self._check_tool(tool, model) for tool in request.tools]
        notes = [
            f"{tool.path}.function.parameters of {tool.name}: {text}"
            for tool, parameters in zip(request.tools, found, strict=True)
            for text in (*parameters.lost, *parameters.narrowed)
        ]
        if not self.has_tools:
            if request.tool_choice.mode == "required":
                raise UnsupportedFieldError(
                    "tool_choice",
                    "demands a call, but this model's chat template has no place for tools; "
                    "start the server with a --chat-template-file that has one",
                )
            notes.insert(
                0, "the chat template has no place for tools: the model is not told of them"
            )
        return Demands(parameters=tuple(found), notes=tuple(notes))

    def _check_tool(self, tool: Tool, model: Model) -> Parameters:
        where = f"{tool.path}.function.parameters"
        for fault in find_oversized(tool.parameters):
            raise FieldError(where, f"of {tool.name} cannot be used: {fault}")
        parameters = self._parameters(tool.parameters, model)
        if parameters.lost and tool.is_strict:
            hint = "leave it out, or strict"
            raise FieldError(where, f"of the strict function {tool.name}: {parameters.lost[0]}; "
                             f"{hint}")  # fmt: skip
        return parameters

    def _parameters(self, schema: Mapping[str, Any], model: Model) -> Parameters:
        """Agents send the same tools each time: it is kept."""
        key = json.dumps(schema, sort_keys=True)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            known = self._known[key] = self._find_parameters(schema, model)
        return known

    def _find_parameters(self, schema: Mapping[str, Any], model: Model) -> Parameters:
        if not schema:
            return Parameters({})
        normal = normal_schema(schema)
        faults = find_unenforced(normal, lambda text: check_grammar(model, text))
        lost = [str(fault) for fault in faults]
        if self._texts != "held":
            loose = "is not enforced in this template's calls"
            listed = only_properties(normal.schema)
            if listed is not None:
                keyword = next(k for k in ("anyOf", "oneOf") if k in normal.schema)
                lost.append(f"{keyword} at # {loose}")
                normal = replace(normal, schema=listed)
            lost += [
                f"{keyword} at #/properties/{name} {loose}"
                for name, keyword in find_loose_texts(normal, can_hold=self._texts == "can be held")
            ]
        schema, broken = _usable(normal.schema, model)
        normal = replace(normal, schema=schema)
        lost += broken
        rules = text_rules(normal)
        return Parameters(schema, normal.ranges, rules, tuple(lost), _narrowed(normal))

    def hold(
        self, grammar: str, demands: Demands, parameters: Sequence[Parameters], model: Model
    ) -> str:
        """The grammar, with what is demanded beyond what llama.cpp enforces.

        parameters: of the tools that it is about. Raises FieldError: it is more than can be taken.
        """
        held = grammar
        if parameters and self._texts == "can be held":
            held = hold_texts(grammar, [one.rules for one in parameters])
        for ranges in (demands.ranges, *(one.ranges for one in parameters)):
            held = put_rules(held, ranges)
        if held != grammar:
            try:
                check_grammar(model, held)
            except RequestError as error:
                where = "tools" if parameters else "response_format"
                raise FieldError(where, f"cannot be enforced: {error}") from None
        return held

    def for_prompt(self, fields: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
        """What the prompt is made of: the tools as the client wrote them, and no grammar, which
        llama.cpp may not survive to make of them. Where it makes one in any case, what it can.
        """
        if "tools" in fields and self._prompt_ignores_choice:
            return {**fields, "tool_choice": "none"}
        return held

    @cached_property
    def _prompt_ignores_choice(self) -> bool:
        tool = {"type": "function", "function": {"name": "probe", "parameters": {}}}
        request = {"messages": [_user("x")], "tools": [tool]}
        prompts = set()
        for choice in ("auto", "none", "required"):
            try:
                prompts.add(self._template.render({**request, "tool_choice": choice})["prompt"])
            except RequestError:
                return False
        return len(prompts) == 1

    @cached_property
    def _texts(self) -> Literal["held", "can be held", "loose"]:
        """How a string argument is held to its schema: some templates write it without quotes, and
        to llama.cpp any text will do.
        """
        parameters = {"type": "object", "properties": {"text": {"enum": [PROBE]}}}
        tool = {"type": "function", "function": {"name": "probe", "parameters": parameters}}
        request = {"messages": [_user("x")], "tools": [tool], "tool_choice": "required"}
        try:
            grammar: str = self._template.render(request)["grammar"]
        except RequestError:
            return "loose"
        if PROBE in grammar:
            return "held"
        return "can be held" if has_loose_texts(grammar) else "loose"

    def place(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with instructions only where the template takes them.

        Where it takes them in front alone, the first ones become one, and later ones are shown as
        the user's; where users may not speak twice in a row, at the head of the user's next words.
        Each text stays where it was said, so that the next turn begins alike.
        """
        n_first = next((i for i, m in enumerate(messages) if not m.is_instruction), len(messages))
        placed = list(messages)
        if any(m.is_instruction for m in messages[n_first:]) and not self._takes_late_system:
            later = [
                replace(m, shown_as="user") if m.is_instruction else m for m in placed[n_first:]
            ]
            placed[n_first:] = later if self._takes_users_in_a_row else _folded(later)
        if n_first > 1 and not self._takes_two_systems:
            joined = "\n\n".join(m.text for m in placed[:n_first] if m.text)
            placed[:n_first] = [replace(placed[0], parts=(joined,), is_list=False)]
        return tuple(placed)

    @cached_property
    def _takes_late_system(self) -> bool:
        return self._shows(
            [_system(1), _user("2"), _assistant("3"), _system(4), _user("5")], (1, 4)
        )

    @cached_property
    def _takes_two_systems(self) -> bool:
        return self._shows([_system(1), _system(2), _user("3")], (1, 2))

    @cached_property
    def _takes_users_in_a_row(self) -> bool:
        return self._shows([_system(0), _user(f"{PROBE} 1"), _user(f"{PROBE} 2")], (1, 2))

    def _shows(self, messages: list[dict[str, str]], numbers: tuple[int, int]) -> bool:
        """Whether the template shows both texts, once and in order."""
        try:
            text: str = self._template.render({"messages": messages})["prompt"]
        except RequestError:
            return False
        first, second = (f"{PROBE} {number}" for number in numbers)
        return text.count(first) == text.count(second) == 1 and text.index(first) < text.index(
            second
        )

    def blame(
        self, request: ChatRequest, fields: dict[str, Any], error: RequestError
    ) -> RequestError:
        """The error with what it is about, where that can be found: a field, or a message."""
        reason = _reason(error)
        is_schemas = "grammar" in reason or reason.startswith("JSON schema error")
        if is_schemas and (request.schema is not None or request.tools):
            where = "tools" if request.schema is None else "response_format"
            return FieldError(where, f"cannot be enforced: {reason}")
        if request.continues:
            return FieldError("messages", f"cannot be continued: {reason}")
        shown: Sequence[dict[str, Any]] = fields["messages"]
        for n in range(1, len(shown) + 1):
            try:
                self._template.render({**fields, "messages": shown[:n]})
            except RequestError as fault:
                if _reason(fault) == reason:
                    message = request.messages[n - 1]
                    return FieldError(
                        message.path, f"({message.role}) is refused by the chat template: {reason}"
                    )
        return FieldError("messages", f"are refused by the chat template: {reason}")


def _narrowed(normal: NormalSchema) -> tuple[str, ...]:
    return tuple(str(Unenforced(*place, how)) for place, how in normal.narrowed.items())


def _usable(schema: dict[str, Any], model: Model) -> tuple[dict[str, Any], list[str]]:
    """The schema with any value in place of the arguments that llama.cpp can do nothing with, and
    what is wrong with them.
    """
    fault = _fault_of(schema, model)
    if fault is None:
        return schema, []
    properties, required = schema.get("properties"), schema.get("required")
    left: dict[str, Any] = {}
    faults = []
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        alone = {**schema, "type": "object", "properties": {name: inner}, "required": []}
        one = _fault_of(alone, model)
        left[name] = inner if one is None else {}
        faults += [f"the schema at #/properties/{name} {one}"] if one else []
    names = [name for name in required if name in left] if isinstance(required, list) else []
    usable: dict[str, Any] = {"type": "object", "properties": left, "required": names}
    usable |= {"$defs": schema["$defs"]} if "$defs" in schema else {}
    if faults and _fault_of(usable, model) is None:
        return usable, faults
    return {"type": "object", "additionalProperties": True}, [f"the schema at # {fault}"]


def _fault_of(schema: Mapping[str, Any], model: Model) -> str | None:
    """Why llama.cpp makes no grammar of it; None where it does."""
    for fault in find_oversized(schema):
        return f"is not enforced: written out, {fault}"
    try:
        check_grammar(model, schema_grammar(dict(schema)))
    except RequestError as error:
        return f"is not enforced: {str(error).splitlines()[-1]}"
    return None


def _folded(messages: list[Message]) -> list[Message]:
    """Instructions that stand before a user message go to its head."""
    folded: list[Message] = []
    for message in messages:
        lead = ""
        while message.role == "user" and folded and folded[-1].is_instruction:
            earlier = folded.pop()
            lead = f"{earlier.text}\n\n{lead}"
        folded.append(replace(message, lead=lead) if lead else message)
    return folded


def _reason(error: RequestError) -> str:
    """The template's own words, without the place in its source."""
    text = str(error).removeprefix("the chat template refuses the messages: ").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = next((line for line in lines if "Jinja Exception: " in line), None)
    return raised.partition("Jinja Exception: ")[2] if raised else text


def _system(number: int) -> dict[str, str]:
    return {"role": "system", "content": f"{PROBE} {number}"}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
