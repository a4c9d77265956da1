"""Ctrl-C at a chosen place of the engine's Python, and once more in the repair that it sets off."""

import sys
from inspect import CO_GENERATOR
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupts"]

WATCHED = ("/kvmem/engine/", "/kvmem/kv/")
# `with` over a lock of the interpreter ends in one step for signals, and not for a tracer
SPARED = "/turns.py"


class Interrupts:
    """Raises KeyboardInterrupt at the `first` line of the engine that runs inside, and again at
    the `second` call of or return from one of its functions behind that; 0 for never.

    armed: whether to count from the start. n_lines: lines that ran.
    """

    def __init__(self, first: int, second: int = 0, *, armed: bool = True) -> None:
        self.n_lines = 0
        self.n_raised = 0
        self._first = first
        self._second = second
        self._armed = armed

    def arm(self) -> None:
        """Count from here on."""
        self._armed = True

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _enter_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._run_line if _is_watched(frame) else None

    def _run_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._armed and event == "line":
            self.n_lines += 1
            if self.n_lines == self._first:
                self.n_raised += 1
                if self._second:
                    sys.setprofile(self._cross)
                raise KeyboardInterrupt  # which ends the tracing
        return self._run_line

    def _cross(self, frame: FrameType, event: str, arg: object) -> None:
        # a generator is not stopped at its border: a signal comes up inside it, or in its caller
        if (
            event in ("call", "return")
            and _is_watched(frame)
            and not frame.f_code.co_flags & CO_GENERATOR
        ):
            self._second -= 1
            if self._second == 0:
                self.n_raised += 1
                raise KeyboardInterrupt  # which ends the profiling


def _is_watched(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.endswith("/contextlib.py") and frame.f_back is not None:
        name = frame.f_back.f_code.co_filename  # a `with` of the engine, and of nobody else
    return any(part in name for part in WATCHED) and not name.endswith(SPARED)
