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

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it, by a generation that it has not finished."""
        # an interrupt may leave the owner's name behind, but never the lock
        return self._owner == threading.get_ident() and self._lock.locked()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn.

        Raises StateError if this thread holds it.
        """
        if self.is_mine:
            raise StateError(
                "a generation of this engine is still open in this thread: "
                "read it to its end or close it"
            )
        with self._lock:
            try:
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = None
