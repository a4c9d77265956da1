"""A model's chat template: messages to prompt text, by llama.cpp's own Jinja engine."""

import json

cimport cython

from kvmem.errors import ModelError, StateError
from kvmem.llama cimport c_bridge as c
from kvmem.llama.bridge cimport as_json, check, last_error, take
from kvmem.llama.c_llama cimport llama_model
from kvmem.llama.model cimport Model

__all__ = ["ChatTemplate"]


@cython.final
cdef class ChatTemplate:
    """Owns one parsed template. Any number of threads may render at the same time.

    model: whose template is used, and whose BOS and EOS texts it may name; read now, not kept.
        None needs a source.
    source: Jinja text that replaces the model's template; empty for none.

    Raises:
        ModelError: the template cannot be parsed.
    """

    def __init__(self, Model model=None, str source not None=""):
        cdef bytes data = source.encode("utf-8", "replace")
        cdef const char *chars = data
        cdef size_t n_chars = len(data)
        cdef const llama_model *handle = NULL
        cdef int status
        if self._ptr != NULL:
            raise StateError("a ChatTemplate is made once")
        if model is not None:
            handle = model.get()
        with nogil:
            status = c.kvmem_chat_init(handle, chars, n_chars, &self._ptr)
        if status not in (c.KVMEM_BRIDGE_OK, c.KVMEM_BRIDGE_ERR_MEMORY):
            reason = last_error()
            if reason == "std::exception":  # the lexer's, which says no more
                reason = "it is no Jinja that can be read; try another --chat-template"
            raise ModelError(f"the chat template cannot be used: {reason}")
        check(status, "", "")

    def __dealloc__(self):
        c.kvmem_chat_free(self._ptr)
        self._ptr = NULL

    cdef c.kvmem_chat *get(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the chat template is closed")
        return self._ptr

    def close(self):
        """Free the template. A second call does nothing."""
        c.kvmem_chat_free(self._ptr)
        self._ptr = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def info(self):
        """Source, whether the model or the caller gave it, whether it can think, what it can do."""
        cdef char *text = NULL
        cdef size_t n_text = 0
        cdef c.kvmem_chat *handle = self.get()
        cdef int status
        with nogil:
            status = c.kvmem_chat_info(handle, &text, &n_text)
        return rendered_of(status, text, n_text)

    def render(self, request not None):
        """Render a request; its fields and those of the result are listed in kvmem-bridge.h.

        Raises:
            RequestError: messages, tools or arguments that the template refuses, with its reason.
        """
        cdef bytes data = as_json(request, "messages")
        cdef const char *chars = data
        cdef size_t n_chars = len(data)
        cdef char *text = NULL
        cdef size_t n_text = 0
        cdef c.kvmem_chat *handle = self.get()
        cdef int status
        with nogil:
            status = c.kvmem_chat_render(handle, chars, n_chars, &text, &n_text)
        return rendered_of(status, text, n_text)


cdef dict rendered_of(int status, char *text, size_t n_text):
    """What a template makes of a request. Raises RequestError with its reason."""
    return json.loads(
        take(status, text, n_text, "the chat template refuses the messages: ", ""))
