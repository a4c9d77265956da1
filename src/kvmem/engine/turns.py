"""Who may use the model now: one caller at a time, in whatever thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvmem.errors import StateError

__all__ = ["Turns"]


class Turns:
    """A lock that tells a thread that waits for itself, instead of freezing it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn.

        Raises StateError if this thread holds it, by a generation that it has not finished.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise StateError(
                "a generation of this engine is still open in this thread: "
                "read it to its end or close it"
            )
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None
