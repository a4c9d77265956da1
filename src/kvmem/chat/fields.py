"""Reading fields of client JSON: the right type or a FieldError that names the field."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from kvmem.errors import RequestError, UnsupportedContentError

__all__ = [
    "FieldError",
    "UnsupportedFieldError",
    "is_finite_number",
    "read_bool",
    "read_integer",
    "read_list",
    "read_number",
    "read_object",
    "read_text",
]

Fields = Mapping[str, Any]
T = TypeVar("T")


class FieldError(RequestError):
    """A field has the wrong type or value. field: its path, as `messages[2].role`."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field} {rule}")
        self.field = field


class UnsupportedFieldError(FieldError, UnsupportedContentError):
    """A field asks for what this model or version cannot do."""


def read_bool(body: Fields, name: str, *, path: str = "") -> bool | None:
    """None where the field is null or absent, as in all of these."""
    return _read(body, name, path, bool, "must be true or false")


def read_text(body: Fields, name: str, *, path: str = "") -> str | None:
    return _read(body, name, path, str, "must be a string")


def read_list(body: Fields, name: str, *, path: str = "") -> list[Any] | None:
    return _read(body, name, path, list, "must be a list")


def read_object(body: Fields, name: str, *, path: str = "") -> dict[str, Any] | None:
    return _read(body, name, path, dict, "must be an object")


def read_number(
    body: Fields, name: str, *, least: float = -math.inf, most: float = math.inf
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not is_finite_number(value):
        is_huge = isinstance(value, int | float) and not isinstance(value, bool)
        shown = "one beyond all range" if is_huge else _shown(value)
        if isinstance(value, float) and math.isnan(value):
            shown = "NaN"
        raise FieldError(name, f"must be a number, not {shown}")
    if not least <= value <= most:
        raise FieldError(name, f"is {value}, but must be {_range(least, most)}")
    return float(value)


def read_integer(
    body: Fields, name: str, *, least: int = -(1 << 31), most: int = (1 << 31) - 1
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"must be an integer, not {_shown(value)}")
    if not least <= value <= most:
        raise FieldError(name, f"is {value}, but must be {_range(least, most)}")
    return value


def is_finite_number(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _read(body: Fields, name: str, path: str, kind: type[T], rule: str) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise FieldError(path + name, f"{rule}, not {_shown(value)}")
    return value


def _range(least: float, most: float) -> str:
    if math.isinf(most):
        return f"at least {_plain(least)}"
    return f"from {_plain(least)} to {_plain(most)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if is_finite_number(bound) and bound == int(bound) else f"{bound:g}"


def _shown(value: object) -> str:
    """The kind of a JSON value, in JSON's words; never the value, which may be long or private."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
