"""Work that is counted in calls, so that a test of its bound says the same on every machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooMuchWork(BaseException):
    """No handler of the code under test takes it for its own."""


@contextmanager
def at_most(n_calls: int) -> Iterator[None]:
    """Raises TooMuchWork behind so many calls, of Python's functions and of its built-in ones."""
    n_left = n_calls

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_left
        if event in ("call", "c_call"):
            n_left -= 1
            if n_left < 0:
                sys.setprofile(None)
                raise TooMuchWork

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
