"""One line for each reply that was asked for, however that ended. Never a word of it.

`end` is how a reply ended (stop, length), or what ended it before: cancelled (it was given up),
left (so before it began), stopped (the server did), else the HTTP status of the error.
"""

import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmem.engine.stats import RequestStats
from kvmem.server.errors import GONE

__all__ = ["QUEUED", "RequestLog", "log_refused", "log_reply", "log_unserved"]

# of a request's state: what was queued for it has lines of its own
QUEUED = "is_queued"

_log = logging.getLogger("kvmem.server.request")


def log_reply(stats: RequestStats, end: str) -> None:
    """The line of a reply that has begun and come to an end of its own, or was cancelled."""
    memory = stats.memory
    _line(
        {
            "conversation": memory.conversation,
            "use": memory.conversation_use,
            "prompt": stats.prompt_tokens,
            "hit": stats.cached_tokens,
            "selected": len(memory.blocks),
            "staged_in": memory.blocks_in,
            "replayed": memory.replayed_tokens,
            "prefill_s": round(stats.prompt_s, 3),
            "decode_tok_s": round(stats.decode_per_s, 1),
            "reply": stats.completion_tokens,
            "end": end,
            "memory": memory.decision,
        }
    )


def log_refused(status: int) -> None:
    """The line of a request that was answered with this status before anything was queued."""
    log_unserved("left" if status == GONE else str(status))


def log_unserved(end: str, *, prompt_tokens: int = 0, reply_tokens: int = 0) -> None:
    """The line of a request that came to nothing, as far as anything is known of it."""
    _line(
        {
            "conversation": 0,
            "use": "none",
            "prompt": prompt_tokens,
            "hit": 0,
            "selected": 0,
            "staged_in": 0,
            "replayed": 0,
            "prefill_s": 0.0,
            "decode_tok_s": 0.0,
            "reply": reply_tokens,
            "end": end,
            "memory": "none",
        }
    )


def _line(fields: dict[str, Any]) -> None:
    line = " ".join(f"{key}={value}" for key, value in fields.items())
    _log.info("%s", line, extra={"fields": fields})


class RequestLog:
    """Writes the line of each POST that is refused before anything is queued for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status = 500  # of an exception that passes through here

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, send_and_look)
        finally:
            if status >= 400 and not state.get(QUEUED):
                log_refused(status)
