"""Reading the body of a request as JSON."""

import asyncio
import json
import re
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from kvmem.chat.fields import FieldError
from kvmem.errors import RequestError
from kvmem.server.errors import ClientGone
from kvmem.server.worker import EngineWorker

__all__ = ["read_json", "read_object_body"]

MAX_BODY_BYTES = 64 << 20
HALF_PAIR = re.compile("[\ud800-\udfff]")


async def read_json(request: Request, worker: EngineWorker) -> Any:
    """Raises RequestError if it is no JSON, a 413 if it is too large, and Cancelled if the server
    stops before all of it has come.
    """
    reading = asyncio.ensure_future(_read(request))
    try:
        body = await worker.until_halt(reading)
    finally:
        reading.cancel()
    try:
        return _parse(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None


async def _read(request: Request) -> bytearray:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise ClientGone from None
    return body


async def read_object_body(request: Request, worker: EngineWorker) -> dict[str, Any]:
    """The same; raises FieldError if it is no object."""
    body = await read_json(request, worker)
    if not isinstance(body, dict):
        raise FieldError("the body", "must be a JSON object")
    return body


def _parse(text: str) -> Any:
    """JSON whose texts have an encoding.

    Clients in JavaScript cut texts inside a surrogate pair, and send the half as an escape. It
    becomes the replacement character, as wherever such a text leaves JavaScript otherwise.
    """
    value = json.loads(text)
    if "\\ud" not in text and "\\uD" not in text:
        return value
    shown = json.dumps(value, ensure_ascii=False)
    return json.loads(HALF_PAIR.sub("\ufffd", shown)) if HALF_PAIR.search(shown) else value
