"""Requests that wait for the engine: sessions take turns, and who leaves is gone at once."""

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue in which each key gets its turn, however many items another one has put in.

    An item starts at the later of now and the end of its key's item before; the earliest start is
    next, and of equal ones the one that came first. Now is the start of the item taken last.
    An item that leaves costs nothing: those of its key behind it move up.
    Source: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), each item costing 1.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Hashable, T]] = []  # start, arrival, key, item
        self._ends: dict[Hashable, int] = {}
        self._now = 0
        self._n_arrived = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, key: Hashable) -> None:
        """Add an item to those of this key."""
        with self._changed:
            start = max(self._now, self._ends.get(key, 0))
            self._ends[key] = start + 1
            self._waiting.append((start, self._n_arrived, key, item))
            self._n_arrived += 1
            self._changed.notify()

    def get(self) -> T | None:
        """Wait for the next item; None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            following = min(self._waiting, key=lambda entry: entry[:2])
            self._waiting.remove(following)
            self._now = following[0]
            # an end that lies behind says nothing any more
            self._ends = {key: end for key, end in self._ends.items() if end > self._now}
            return following[3]

    def remove(self, item: T) -> bool:
        """Take an item out; False if it is not waiting."""
        with self._changed:
            left = next((entry for entry in self._waiting if entry[3] is item), None)
            if left is None:
                return False
            self._waiting.remove(left)
            _, arrival, key, _ = left
            self._waiting = [
                (start - 1, n, own, other) if own == key and n > arrival else (start, n, own, other)
                for start, n, own, other in self._waiting
            ]
            self._ends[key] -= 1
            return True

    def close(self) -> list[T]:
        """Let `get` return None from now on; returns what still waited."""
        with self._changed:
            self._is_closed = True
            rest = [entry[3] for entry in self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
            return rest
