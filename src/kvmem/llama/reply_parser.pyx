"""What a model answers, taken apart by llama.cpp's own parser for its chat template."""

import json

cimport cython

from kvmem.errors import StateError
from kvmem.llama cimport c_bridge as c
from kvmem.llama.bridge cimport as_json, check, take
from kvmem.llama.model cimport Model
from kvmem.llama.template cimport ChatTemplate, rendered_of

__all__ = ["ReplyParser"]


@cython.final
cdef class ReplyParser:
    """Owns the parser of one reply: text in, reasoning, content and tool calls out.

    template, model: used now, not kept.
    request: as ChatTemplate.render takes it.
    rendered: the result of the rendering; kvmem-bridge.h lists its fields.

    `feed` and `finish` return what the text adds: a dict with any of `reasoning`, `content`,
    `calls` (index; id and name with a call's first piece; arguments) and `notes`. What was
    returned is never taken back, and does not depend on how the text was cut.

    Raises:
        RequestError: messages, tools, arguments or a schema that the template refuses.
    """

    def __init__(
        self, ChatTemplate template not None, Model model not None, request not None
    ):
        cdef bytes data = as_json(request, "messages")
        cdef const char *chars = data
        cdef size_t n_chars = len(data)
        cdef char *text = NULL
        cdef size_t n_text = 0
        cdef const c.kvmem_chat *chat = template.get()
        cdef const c.llama_model *handle = model.get()
        cdef int status
        if self._ptr != NULL:
            raise StateError("a ReplyParser is made once")
        with nogil:
            status = c.kvmem_reply_init(
                chat, handle, chars, n_chars, &self._ptr, &text, &n_text)
        self.rendered = rendered_of(status, text, n_text)

    def __dealloc__(self):
        c.kvmem_reply_free(self._ptr)
        self._ptr = NULL

    cdef c.kvmem_reply *get(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the reply parser is closed")
        return self._ptr

    def clone(self):
        """An independent copy, which has read the same so far."""
        cdef ReplyParser copy = ReplyParser.__new__(ReplyParser)
        check(c.kvmem_reply_clone(self.get(), &copy._ptr), "", "the parser cannot be copied: ")
        copy.rendered = self.rendered
        return copy

    def close(self):
        """Free the parser. A second call does nothing."""
        c.kvmem_reply_free(self._ptr)
        self._ptr = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def feed(self, str text not None):
        """Append text of the reply: whole characters, cut anywhere else."""
        cdef bytes data = text.encode("utf-8", "replace")
        cdef const char *chars = data
        cdef size_t n_chars = len(data)
        cdef char *delta = NULL
        cdef size_t n_delta = 0
        cdef c.kvmem_reply *handle = self.get()
        cdef int status
        with nogil:
            status = c.kvmem_reply_feed(handle, chars, n_chars, &delta, &n_delta)
        return _delta(status, delta, n_delta)

    def finish(self, *, bint is_cut=False):
        """The end, with what was held back. is_cut: not the model ended the reply."""
        cdef char *delta = NULL
        cdef size_t n_delta = 0
        cdef c.kvmem_reply *handle = self.get()
        cdef c.kvmem_reply_ending ending = c.KVMEM_REPLY_COMPLETE
        cdef int status
        if is_cut:
            ending = c.KVMEM_REPLY_CUT
        with nogil:
            status = c.kvmem_reply_finish(handle, ending, &delta, &n_delta)
        return _delta(status, delta, n_delta)


cdef dict _delta(int status, char *text, size_t n_text):
    """What the bridge says that the text adds, empty for nothing."""
    data = take(status, text, n_text, "the reply cannot be read: ", "")
    return json.loads(data) if data else {}
