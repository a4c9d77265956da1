"""Reading the body of a request as JSON."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmem.chat.fields import FieldError
from kvmem.errors import RequestError

__all__ = ["read_json", "read_object_body"]

MAX_BODY_BYTES = 64 << 20


async def read_json(request: Request) -> Any:
    """Raises RequestError if it is no JSON, and a 413 if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None


async def read_object_body(request: Request) -> dict[str, Any]:
    """The same; raises FieldError if it is no object."""
    body = await read_json(request)
    if not isinstance(body, dict):
        raise FieldError("the body", "must be a JSON object")
    return body
