"""JSON schemas to grammars, and whether a grammar parses."""

import json

from kvmem.errors import CapacityError, RequestError
from kvmem.llama cimport c_bridge as c
from kvmem.llama.c_llama cimport llama_model
from kvmem.llama.model cimport Model

__all__ = ["check_grammar", "schema_grammar"]


def schema_grammar(schema):
    """The GBNF text of a JSON schema.

    llama.cpp leaves out what it has no grammar for, without a word: chat.schema finds that.

    Raises:
        RequestError: the schema is malformed.
    """
    cdef bytes data
    cdef const char *chars
    cdef size_t n_chars
    cdef char *text = NULL
    cdef size_t n_text = 0
    cdef int status
    try:
        data = json.dumps(schema, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema cannot be written as JSON: {error}") from None
    chars = data
    n_chars = len(data)
    with nogil:
        status = c.kvmem_schema_grammar(chars, n_chars, &text, &n_text)
    _check(status)
    try:
        return text[:n_text].decode("utf-8", "replace")
    finally:
        c.kvmem_bridge_text_free(text)


def check_grammar(Model model not None, str grammar not None):
    """Raises RequestError where ``grammar`` (GBNF) does not parse."""
    cdef bytes data = grammar.encode("utf-8", "replace")
    cdef const char *chars = data
    cdef size_t n_chars = len(data)
    cdef const llama_model *handle = model.get()
    cdef int status
    with nogil:
        status = c.kvmem_grammar_check(handle, chars, n_chars)
    _check(status)


cdef int _check(int status) except -1:
    if status == c.KVMEM_BRIDGE_OK:
        return 0
    reason = c.kvmem_bridge_last_error().decode("utf-8", "replace")
    if status == c.KVMEM_BRIDGE_ERR_MEMORY:
        raise CapacityError(reason)
    raise RequestError(reason)
