"""A loaded GGUF model."""

import os
from pathlib import Path

from cpython.exc cimport PyErr_CheckSignals

from kvmem.errors import ModelError, StateError
from kvmem.llama cimport c_llama as c
from kvmem.llama import log, runtime

__all__ = ["Model"]


cdef bint _on_progress(float progress, void *user_data) noexcept nogil:
    """Called by the loading thread; an exception of the callback, or a signal, ends the load."""
    with gil:
        model = <Model>user_data
        try:
            PyErr_CheckSignals()
            if model._progress is not None:
                model._progress(progress)
        except BaseException as error:
            model._interrupt = error
            return False
        return True


cdef class Model:
    """Owns one llama_model.

    Args:
        path: the GGUF file (of a split model, the first part).
        n_gpu_layers: layers on the GPU; negative means all.
        use_mmap: map the file instead of reading it.
        use_mlock: keep it in RAM.
        load_mtp: also load the MTP block, where the model has one.
        dry: without its weights, to ask what it would take (context.shares_of).
        progress: called with 0..1 while loading, on the calling thread.

    Raises:
        ModelError: no such file, no GGUF, truncated, or of an unknown architecture.
    """

    def __init__(self, path, *, int n_gpu_layers=-1, bint use_mmap=True, bint use_mlock=False,
                 bint load_mtp=False, bint dry=False, object progress=None):
        cdef c.llama_model_params params
        cdef bytes name
        cdef const char *c_name
        if self._ptr != NULL or self._is_closed:
            raise StateError("a Model is loaded once")
        self.path = Path(path)
        self.is_dry = dry
        _check_is_gguf(self.path)
        runtime.ensure_started()

        params = c.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mtp = load_mtp
        if use_mmap and not dry:
            params.load_mode = c.LLAMA_LOAD_MODE_MMAP_MLOCK if use_mlock else c.LLAMA_LOAD_MODE_MMAP
        else:
            params.load_mode = c.LLAMA_LOAD_MODE_NONE
        params.no_alloc = dry
        params.progress_callback = <c.llama_progress_callback>_on_progress
        params.progress_callback_user_data = <void *>self
        self._progress = progress
        self._interrupt = None
        name = os.fsencode(self.path)
        c_name = name
        with nogil:
            self._ptr = c.llama_model_load_from_file(c_name, params)
        self._progress = None
        errors = log.drain()
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            self.close()
            raise interrupt
        if self._ptr == NULL:
            self._is_closed = True
            reasons = dict.fromkeys(_shorten(line) for line in errors)
            reason = "; ".join(reasons) or "llama.cpp gave no reason"
            raise ModelError(f"cannot load {self.path}: {reason}")

    def __dealloc__(self):
        if self._ptr != NULL:
            c.llama_model_free(self._ptr)
            self._ptr = NULL

    cdef c.llama_model *get(self) except NULL:
        if self._is_closed or self._ptr == NULL:
            raise StateError(f"the model {self.path} is closed")
        return self._ptr

    def close(self):
        """Close the model; its memory is freed when its last open context is closed too.

        A second call does nothing.
        """
        self._is_closed = True
        self._free_if_unused()
        log.drain()

    cdef void acquire(self) noexcept:
        """A context has been made over it."""
        self._n_contexts += 1

    cdef void release(self) noexcept:
        """A context has been freed."""
        self._n_contexts -= 1
        self._free_if_unused()

    cdef void _free_if_unused(self) noexcept:
        cdef c.llama_model *ptr = self._ptr
        if self._is_closed and self._n_contexts == 0 and ptr != NULL:
            self._ptr = NULL
            with nogil:
                c.llama_model_free(ptr)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def is_closed(self):
        return self._is_closed

    def metadata(self, str key):
        """The GGUF value of ``key`` as text, or None."""
        cdef char text[4096]
        cdef int n = c.llama_model_meta_val_str(self.get(), key.encode(), text, sizeof(text))
        return None if n < 0 else (<bytes>text).decode("utf-8", "replace")

    @property
    def architecture(self):
        return self.metadata("general.architecture") or ""

    @property
    def description(self):
        cdef char text[256]
        c.llama_model_desc(self.get(), text, sizeof(text))
        return (<bytes>text).decode("utf-8", "replace")

    @property
    def size_bytes(self):
        """Bytes of all weights."""
        return c.llama_model_size(self.get())

    @property
    def n_params(self):
        return c.llama_model_n_params(self.get())

    @property
    def n_ctx_train(self):
        """Tokens that the model was trained for."""
        return c.llama_model_n_ctx_train(self.get())

    @property
    def n_embd(self):
        return c.llama_model_n_embd(self.get())

    @property
    def n_layer(self):
        return c.llama_model_n_layer(self.get())

    @property
    def n_layer_nextn(self):
        """MTP blocks in the file."""
        return c.llama_model_n_layer_nextn(self.get())

    @property
    def n_head(self):
        return c.llama_model_n_head(self.get())

    @property
    def n_head_kv(self):
        return c.llama_model_n_head_kv(self.get())

    @property
    def is_hybrid(self):
        """Whether recurrent layers stand beside attention layers."""
        return c.llama_model_is_hybrid(self.get())

    @property
    def is_recurrent(self):
        return c.llama_model_is_recurrent(self.get())


def _check_is_gguf(path):
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is no GGUF file (it starts with {magic!r}); give -m a .gguf file")


def _shorten(line):
    """Without the names of the C functions that a message came through."""
    return line.split(": ", 1)[1] if ": " in line and " " not in line.split(": ", 1)[0] else line
