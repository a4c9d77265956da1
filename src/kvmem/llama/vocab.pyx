"""Text to token ids and back."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcmp

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
        return self.token_array(text, add_special=add_special, parse_special=parse_special).tolist()

    def token_array(self, str text not None, *, bint add_special=False, bint parse_special=True):
        """The same as int32 [n]."""
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
        return buffer[:n].copy()

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

    def piece_ends(self, const int[::1] tokens not None, bytes data not None):
        """Where in ``data`` the piece of each token ends, specials included: int32 [n].

        None if the pieces do not join to it. What a tokenizer puts in front (BOS, a space) ends at
        or below 0.
        """
        cdef const c.llama_vocab *vocab = self.get()
        cdef Py_ssize_t n_tokens = tokens.shape[0], i
        cdef int n_data = <int>len(data), n_joined = 0, n
        cdef char nothing
        cdef char *joined
        cdef bytes pieces
        cdef int[::1] ends
        found = np.empty(n_tokens, np.int32)
        ends = found
        for i in range(n_tokens):
            if not 0 <= tokens[i] < self.n_tokens:
                raise RequestError(
                    f"token {tokens[i]} is outside the vocabulary of {self.n_tokens}")
            n = c.llama_token_to_piece(vocab, tokens[i], &nothing, 0, 0, True)
            n_joined += abs(n)
            ends[i] = n_joined
        if n_joined < n_data:
            return None
        pieces = PyBytes_FromStringAndSize(NULL, n_joined)
        joined = PyBytes_AS_STRING(pieces)
        for i in range(n_tokens):
            n = ends[i - 1] if i else 0
            c.llama_token_to_piece(vocab, tokens[i], joined + n, n_joined - n, 0, True)
        if memcmp(joined + (n_joined - n_data), PyBytes_AS_STRING(data), n_data) != 0:
            return None
        found -= n_joined - n_data
        return found

    def detokenize(self, tokens, *, bint special=True):
        """The text of ``tokens``; bytes that are no UTF-8 become the replacement character."""
        pieces = [self.piece(token, special=special) for token in tokens]
        return b"".join(pieces).decode("utf-8", "replace")

    def is_eog(self, int token):
        """Whether ``token`` ends a turn or a text."""
        return c.llama_vocab_is_eog(self.get(), token)

    def is_control(self, int token):
        return c.llama_vocab_is_control(self.get(), token)

    def specials(self):
        """What a text is searched for before anything else is done with it.

        A dict of token ids to (the text in bytes, whether spaces beside it vanish).
        """
        cdef const c.llama_vocab *vocab = self.get()
        cdef int kinds = (c.LLAMA_TOKEN_ATTR_CONTROL | c.LLAMA_TOKEN_ATTR_USER_DEFINED
                          | c.LLAMA_TOKEN_ATTR_UNKNOWN)
        cdef int attributes, token
        cdef dict found = {}
        for token in range(self.n_tokens):
            attributes = c.llama_vocab_get_attr(vocab, token)
            if attributes & kinds:
                strips = attributes & (c.LLAMA_TOKEN_ATTR_LSTRIP | c.LLAMA_TOKEN_ATTR_RSTRIP)
                found[token] = (self.piece(token), strips != 0)
        return found

    @property
    def kind(self):
        """Which tokenizer it has, by the name in its file: "gpt2" for BPE, "llama" for SPM."""
        return self.model.metadata("tokenizer.ggml.model") or ""

    @property
    def type(self):
        """llama.cpp's number for the kind of tokenizer, as llama-server tells it."""
        return c.llama_vocab_type(self.get())

    @property
    def adds_eos(self):
        return c.llama_vocab_get_add_eos(self.get())

    @property
    def bos(self):
        return c.llama_vocab_bos(self.get())

    @property
    def eos(self):
        return c.llama_vocab_eos(self.get())
