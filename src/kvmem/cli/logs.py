"""Log lines on stderr."""

import json
import logging
import sys
import time
from typing import Literal

from kvmem.cli.faults import in_flags

__all__ = ["LogFormat", "complain", "say", "set_up", "show_requests"]

LogFormat = Literal["text", "json"]

SAID = "kvmem.start"
OF_SETTINGS = ("kvmem.config", "kvmem.sizes", "kvmem.engine.facts")


class _Text(logging.Formatter):
    """Names settings by their flags, as the person who reads it typed them.

    with_time: as a server's lines have it, which are read days later.
    """

    def __init__(self, *, with_time: bool) -> None:
        super().__init__("%(asctime)s " * with_time + "%(levelname).1s %(name)s: %(message)s")

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


def set_up(*, verbose: bool, kind: LogFormat = "text", server: bool = False) -> None:
    """Warnings, or with `verbose` everything of kvmem down to its info lines.

    What llama.cpp complains of comes back in the exception, so it is shown with `verbose` alone.
    server: each line has its time, as an object always has.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if kind == "json" else _Text(with_time=server))
    root = logging.getLogger("kvmem")
    root.handlers = [handler]
    root.setLevel(logging.INFO if verbose else logging.WARNING)
    root.propagate = False
    logging.getLogger("uvicorn").handlers = [handler]  # faults that no handler of ours has met
    llama = logging.getLogger("kvmem.llama")
    llama.setLevel(logging.NOTSET if verbose else logging.CRITICAL)
    logging.getLogger(SAID).setLevel(logging.INFO)


def show_requests() -> None:
    """The line of each request, too."""
    logging.getLogger("kvmem.server.request").setLevel(logging.INFO)


def complain(line: str) -> None:
    """The one line of a command that fails: as it is, or as an object among the others."""
    line = line.replace("\n", " ")
    handlers = logging.getLogger("kvmem").handlers
    if any(isinstance(handler.formatter, _Json) for handler in handlers):
        logging.getLogger(SAID).error("%s", line.removeprefix("error: "))
    else:
        print(line, file=sys.stderr)


def say(text: str) -> None:
    """What a start tells of itself: as it is, or each line as an object among the others."""
    for line in text.splitlines():
        logging.getLogger(SAID).info("%s", line)
