"""Log lines on stderr."""

import logging

from kvmem.cli.faults import in_flags

__all__ = ["set_up"]


class _InFlags(logging.Formatter):
    """Names settings by their flags, as the person who reads it typed them."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return in_flags(line) if record.name == "kvmem.config" else line


def set_up(*, verbose: bool) -> None:
    """Warnings, or with `verbose` everything of kvmem down to its info lines.

    What llama.cpp complains of comes back in the exception, so it is shown with `verbose` alone.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_InFlags("%(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger("kvmem")
    root.handlers = [handler]
    root.setLevel(logging.INFO if verbose else logging.WARNING)
    root.propagate = False
    llama = logging.getLogger("kvmem.llama")
    llama.setLevel(logging.NOTSET if verbose else logging.CRITICAL)
