"""Log lines on stderr."""

import json
import logging
import time
from typing import Literal

from kvmem.cli.faults import in_flags

__all__ = ["LogFormat", "say", "set_up"]

LogFormat = Literal["text", "json"]

SAID = "kvmem.start"
OF_SETTINGS = ("kvmem.config", "kvmem.engine.placement")


class _Text(logging.Formatter):
    """Names settings by their flags, as the person who reads it typed them."""

    def __init__(self) -> None:
        super().__init__("%(levelname).1s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if record.name == SAID:
            return record.getMessage()
        line = super().format(record)
        return in_flags(line) if record.name in OF_SETTINGS else line


class _Json(logging.Formatter):
    """One object a line. What a record calls `fields` is in it."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up(*, verbose: bool, kind: LogFormat = "text", requests: bool = False) -> None:
    """Warnings, or with `verbose` everything of kvmem down to its info lines.

    What llama.cpp complains of comes back in the exception, so it is shown with `verbose` alone.
    requests: show the line of each request too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if kind == "json" else _Text())
    root = logging.getLogger("kvmem")
    root.handlers = [handler]
    root.setLevel(logging.INFO if verbose else logging.WARNING)
    root.propagate = False
    logging.getLogger("uvicorn").handlers = [handler]  # faults that no handler of ours has met
    llama = logging.getLogger("kvmem.llama")
    llama.setLevel(logging.NOTSET if verbose else logging.CRITICAL)
    logging.getLogger(SAID).setLevel(logging.INFO)
    each = logging.getLogger("kvmem.server.request")
    each.setLevel(logging.INFO if requests else logging.NOTSET)


def say(text: str) -> None:
    """What a start tells of itself: as it is, or each line as an object among the others."""
    for line in text.splitlines():
        logging.getLogger(SAID).info("%s", line)
