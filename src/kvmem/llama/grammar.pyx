"""JSON schemas to grammars, and whether a grammar parses."""

from kvmem.llama cimport c_bridge as c
from kvmem.llama.bridge cimport as_json, check, take
from kvmem.llama.c_llama cimport llama_model
from kvmem.llama.model cimport Model

__all__ = ["check_grammar", "schema_grammar"]


def schema_grammar(schema):
    """The GBNF text of a JSON schema.

    llama.cpp leaves out what it has no grammar for, without a word: chat.json_schema finds that.

    Raises:
        RequestError: the schema is malformed.
    """
    cdef bytes data = as_json(schema, "schema")
    cdef const char *chars = data
    cdef size_t n_chars = len(data)
    cdef char *text = NULL
    cdef size_t n_text = 0
    cdef int status
    with nogil:
        status = c.kvmem_schema_grammar(chars, n_chars, &text, &n_text)
    return take(status, text, n_text, "", "").decode("utf-8", "replace")


def check_grammar(Model model not None, str grammar not None):
    """Raises RequestError where ``grammar`` (GBNF) does not parse."""
    cdef bytes data = grammar.encode("utf-8", "replace")
    cdef const char *chars = data
    cdef size_t n_chars = len(data)
    cdef const llama_model *handle = model.get()
    cdef int status
    with nogil:
        status = c.kvmem_grammar_check(handle, chars, n_chars)
    check(status, "", "")
