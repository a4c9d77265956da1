"""One line for each reply that was asked for, however that ended. Never a word of it.

`end` is how a reply ended (stop, length), or what ended it before: cancelled (it was given up),
left (so before it began), stopped (the server did), else the HTTP status of the error.
A refused one has more: the route, the error's type and the field that it names.
"""

import json
import logging
import re
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmem.engine.stats import RequestStats
from kvmem.server.errors import GONE

__all__ = ["QUEUED", "ROUTE", "RequestLog", "log_refused", "log_reply", "log_unserved"]

# of a request's state: what was queued for it has lines of its own
QUEUED = "is_queued"
ROUTE = "route"

# below a field of ours, names may be the client's own
FIELD = re.compile(r"[a-z_]+(\[\d+\])?(?=[.\[]|$)")
UNKNOWN_ERROR = {"code": 500, "type": "server_error", "param": None}

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


def log_refused(error: dict[str, Any], route: str) -> None:
    """The line of a request that was answered with this error before anything was queued."""
    field = FIELD.match(error["param"] or "")
    log_unserved(
        "left" if error["code"] == GONE else str(error["code"]),
        route=route,
        error=error["type"],
        param=field[0] if field else "none",
    )


def log_unserved(end: str, *, prompt_tokens: int = 0, reply_tokens: int = 0, **more: str) -> None:
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
            **more,
        }
    )


def _line(fields: dict[str, Any]) -> None:
    line = " ".join(f"{key}={value}" for key, value in fields.items())
    _log.info("%s", line, extra={"fields": fields})


class RequestLog:
    """Writes the line of each POST that is refused before anything is queued for it."""

    def __init__(self, app: ASGIApp, *, routes: Collection[str]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status = 500  # of an exception that passes through here
        body = b""

        async def send_and_look(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                body += message.get("body", b"")
            await send(message)

        state = scope.setdefault("state", {})
        # another path is a text of the client's
        state[ROUTE] = scope["path"] if scope["path"] in self._routes else "unknown"
        try:
            await self._app(scope, receive, send_and_look)
        finally:
            if status >= 400 and not state.get(QUEUED):
                log_refused(json.loads(body)["error"] if body else UNKNOWN_ERROR, state[ROUTE])
