"""Gives a command the options that are fields of dataclasses (see cli.options)."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

__all__ = ["takes"]


def takes(*groups: type) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Put the options of these dataclasses in front of a command's own.

    The command gets one filled object a class, in this order, and its own options by name.
    """

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if hints[name] not in groups
        ]
        shared = [_parameter(group, name) for group in groups for name in _names(group)]

        def run(**values: Any) -> object:
            objects = [group(**{n: values.pop(n) for n in _names(group)}) for group in groups]
            return command(*objects, **values)

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*shared, *own)}
        return run

    return decorate


def _names(group: type) -> list[str]:
    return [item.name for item in fields(group)]


def _parameter(group: type, name: str) -> inspect.Parameter:
    hint = get_type_hints(group, include_extras=True)[name]
    default = next(item.default for item in fields(group) if item.name == name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
