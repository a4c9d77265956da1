"""What all calls of the bridge have in common: JSON goes in, and out come a text and a status."""

import json

from kvmem.errors import CapacityError, EngineError, RequestError
from kvmem.llama cimport c_bridge as c

__all__ = []


cdef bytes as_json(value, str what):
    """UTF-8 of a value that json can write. Raises RequestError: `what` cannot be written so."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the {what} cannot be written as JSON: {error}") from None


cdef int check(int status, str refused, str failed) except -1:
    """Raise what a status stands for.

    refused: what is said before the reason where the caller's data is at fault. failed: the same
    where it is llama-common; empty if that cannot be.
    """
    if status == c.KVMEM_BRIDGE_OK:
        return 0
    reason = last_error()
    if status == c.KVMEM_BRIDGE_ERR_MEMORY:
        raise CapacityError(reason)
    if status == c.KVMEM_BRIDGE_ERR_FAILED and failed:
        raise EngineError(failed + reason)
    raise RequestError(refused + reason)


cdef bytes take(int status, char *text, size_t n_text, str refused, str failed):
    """The text that the bridge handed out, empty for none, or what `check` raises."""
    check(status, refused, failed)
    if text == NULL:
        return b""
    try:
        return text[:n_text]
    finally:
        c.kvmem_bridge_text_free(text)


cdef str last_error():
    """Why the last call of this thread failed."""
    return c.kvmem_bridge_last_error().decode("utf-8", "replace")
