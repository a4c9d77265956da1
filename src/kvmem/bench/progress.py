"""How a measurement says how far it is."""

from collections.abc import Callable

__all__ = ["Report", "silent"]

Report = Callable[[str, int, int], None]
"""Called with what is being done, units done, and units in all."""


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""
