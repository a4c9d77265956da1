"""Text to token ids and back."""

import numpy as np

from kvmem.errors import ModelError, RequestError
from kvmem.llama cimport c_llama as c
from kvmem.llama.model cimport Model

__all__ = ["Vocab"]


cdef class Vocab:
    """The vocabulary of a model, usable as long as that is open.

    Raises ModelError for a model without a tokenizer.
    """

    def __init__(self, Model model not None):
        self.model = model
        if c.llama_vocab_type(self.get()) == c.LLAMA_VOCAB_TYPE_NONE:
            raise ModelError(  # llama.cpp aborts over the first text
                f"{model.path} has no tokenizer, so it reads and writes no text; try another model")
        self.n_tokens = c.llama_vocab_n_tokens(self.get())

    cdef const c.llama_vocab *get(self) except NULL:
        return c.llama_model_get_vocab(self.model.get())

    def tokenize(self, str text not None, *, bint add_special=False, bint parse_special=True):
        """Token ids of ``text``.

        add_special: also add what the model wants at the start (BOS) or end.
        parse_special: read ``<|im_start|>`` and its kind as single tokens; pass False for
            text that a user may have written.
        """
        cdef bytes data = text.encode("utf-8", "surrogatepass")
        cdef const char *chars = data
        cdef int n_bytes = <int>len(data)
        cdef int n
        cdef const c.llama_vocab *vocab = self.get()
        cdef int[::1] tokens
        if len(data) > 0x3FFFFFFF:
            raise RequestError("a text of more than 1 GiB cannot be tokenised")
        buffer = np.empty(n_bytes + 8, np.int32)
        tokens = buffer
        with nogil:
            n = c.llama_tokenize(
                vocab, chars, n_bytes, &tokens[0], n_bytes + 8, add_special, parse_special)
        if n < 0:
            raise RequestError(f"the text of {n_bytes} bytes could not be tokenised")
        return buffer[:n].tolist()

    def piece(self, int token, *, bint special=True):
        """The bytes of one token; with special=False, nothing for a control token."""
        cdef char buffer[256]
        cdef bytes longer
        cdef int n
        if not 0 <= token < self.n_tokens:
            raise RequestError(f"token {token} is outside the vocabulary of {self.n_tokens}")
        n = c.llama_token_to_piece(self.get(), token, buffer, sizeof(buffer), 0, special)
        if n >= 0:
            return buffer[:n]
        longer = bytes(-n)
        n = c.llama_token_to_piece(self.get(), token, <char *>longer, -n, 0, special)
        return longer[:n]

    def detokenize(self, tokens, *, bint special=True):
        """The text of ``tokens``; bytes that are no UTF-8 become the replacement character."""
        pieces = [self.piece(token, special=special) for token in tokens]
        return b"".join(pieces).decode("utf-8", "replace")

    def is_eog(self, int token):
        """Whether ``token`` ends a turn or a text."""
        return c.llama_vocab_is_eog(self.get(), token)

    def is_control(self, int token):
        return c.llama_vocab_is_control(self.get(), token)

    @property
    def adds_bos(self):
        return c.llama_vocab_get_add_bos(self.get())

    @property
    def bos(self):
        return c.llama_vocab_bos(self.get())

    @property
    def eos(self):
        return c.llama_vocab_eos(self.get())
