"""Exceptions to HTTP: one table, and the body that OpenAI and llama-server clients know."""

from typing import Any

from starlette.responses import JSONResponse

from kvmem.chat.fields import FieldError
from kvmem.errors import (
    Cancelled,
    CapacityError,
    ContextLengthError,
    EngineError,
    KvmemError,
    RequestError,
    UnsupportedContentError,
)

__all__ = [
    "GONE",
    "HTTP_TYPES",
    "ClientGone",
    "SwitchedOff",
    "error_body",
    "error_response",
    "http_error_response",
    "status_of",
]

GONE = 499  # nginx's, for an answer that nobody takes

HTTP_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}

RETRY_AFTER_S = 2


class SwitchedOff(KvmemError):
    """An endpoint that the start has not asked for; the message says how."""


class ClientGone(Cancelled):
    """Nobody is there to be answered."""

    def __init__(self) -> None:
        super().__init__("the client has gone")


# exception -> (status, type); the first that fits, so subclasses stand above their bases.
# What a client cannot mend by trying again has no 5xx: SDKs repeat those.
TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (ContextLengthError, 400, "exceed_context_size_error"),
    (SwitchedOff, 501, "not_supported_error"),
    (UnsupportedContentError, 400, "not_supported_error"),
    (RequestError, 400, "invalid_request_error"),
    (CapacityError, 503, "unavailable_error"),
    (ClientGone, GONE, "unavailable_error"),
    (Cancelled, 503, "unavailable_error"),
    (EngineError, 500, "server_error"),
    (KvmemError, 500, "server_error"),
)


def error_body(error: Exception) -> dict[str, Any]:
    """{"error": {...}} with the status as `code`. Of an unknown exception, nothing is told."""
    status, kind = _status(error)
    message = str(error) if isinstance(error, KvmemError) else "internal error; the log has it"
    fields: dict[str, Any] = {"code": status, "message": message, "type": kind, "param": None}
    if isinstance(error, FieldError):
        fields["param"] = error.field
    if isinstance(error, ContextLengthError):
        fields["n_prompt_tokens"] = error.prompt_tokens
        fields["n_ctx"] = error.limit_tokens
    return {"error": fields}


def error_response(error: Exception) -> JSONResponse:
    """The same as a reply."""
    body = error_body(error)
    status: int = body["error"]["code"]
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(body, status_code=status, headers=headers)


def http_error_response(status: int, message: str) -> JSONResponse:
    """For what HTTP itself refuses: route, method, key, size."""
    kind = HTTP_TYPES.get(status, "invalid_request_error")
    fields = {"code": status, "message": message, "type": kind, "param": None}
    return JSONResponse({"error": fields}, status_code=status)


def status_of(error: Exception) -> int:
    """The HTTP status that it is answered with."""
    return _status(error)[0]


def _status(error: Exception) -> tuple[int, str]:
    for kind, status, name in TABLE:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"
