"""Token choice by llama.cpp's common_sampler."""

import json

cimport cython
import numpy as np
from libc.stdint cimport int32_t

from kvmem.errors import StateError
from kvmem.llama cimport c_bridge as c
from kvmem.llama.bridge cimport as_json, check, take
from kvmem.llama.c_llama cimport llama_context, llama_model
from kvmem.llama.context cimport Context
from kvmem.llama.model cimport Model

__all__ = ["Sampler", "describe_sampling"]

cdef str WHAT = "sampling parameters"
cdef str FAILED = "sampling failed: "


@cython.final
cdef class Sampler:
    """Owns one sampler chain with its penalty history. Make a new one for each request.

    params: any of seed, temperature, top_k, top_p, min_p, typical_p, top_n_sigma, min_keep,
        dynatemp_range, dynatemp_exponent, xtc_probability, xtc_threshold, repeat_penalty,
        repeat_last_n, presence_penalty, frequency_penalty, dry_multiplier, dry_base,
        dry_allowed_length, dry_penalty_last_n, mirostat, mirostat_tau, mirostat_eta, n_probs,
        samplers (names, in order), logit_bias ([[token, bias], ...], None for minus infinity),
        ignore_eos (a bias on all tokens that end a turn), dry_sequence_breakers, adaptive_target,
        adaptive_decay, grammar (GBNF); and constraint, generation_prompt and reasoning, which
        kvmem-bridge.h describes.
        What is left out has llama.cpp's default. Temperature 0 is greedy.

    Raises:
        RequestError: an unknown field, a wrong type or value, a grammar that does not parse.
    """

    def __init__(self, Model model not None, params=None):
        cdef bytes data = as_json(dict(params or {}), WHAT)
        cdef const char *chars = data
        cdef size_t n_chars = len(data)
        cdef const llama_model *handle = model.get()
        cdef int status
        if self._ptr != NULL:
            raise StateError("a Sampler is made once")
        self.model = model
        with nogil:
            status = c.kvmem_sampler_init(handle, chars, n_chars, &self._ptr)
        check(status, "", FAILED)

    def __dealloc__(self):
        c.kvmem_sampler_free(self._ptr)
        self._ptr = NULL

    cdef c.kvmem_sampler *get(self) except NULL:
        if self._ptr == NULL:
            raise StateError("the sampler is closed")
        self.model.get()  # its vocabulary is read by grammars
        return self._ptr

    def close(self):
        """Free the chain. A second call does nothing."""
        c.kvmem_sampler_free(self._ptr)
        self._ptr = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def sample(self, Context context not None, int row=-1):
        """The token chosen from the logits of ``row`` of the last batch; -1 for its last output.

        The token is not accepted.

        Raises:
            RequestError: the row has no logits.
        """
        cdef c.kvmem_sampler *handle = self.get()
        cdef llama_context *ctx = context.get()
        cdef int32_t token = -1
        cdef int status
        with nogil:
            status = c.kvmem_sampler_sample(handle, ctx, row, &token)
        check(status, "", FAILED)
        return token

    def candidates(self, int n_most):
        """Between which tokens the last sample chose: (token, chance), the likeliest first.

        At most ``n_most``, and none whose chance is 0. Penalties, temperature and all cuts count.
        """
        cdef c.kvmem_sampler *handle = self.get()
        cdef size_t n = max(n_most, 0)
        tokens = np.empty(n + 1, np.int32)
        chances = np.empty(n + 1, np.float32)
        cdef int32_t[::1] token_view = tokens
        cdef float[::1] chance_view = chances
        check(c.kvmem_sampler_candidates(handle, &token_view[0], &chance_view[0], &n), "", FAILED)
        return list(zip(tokens[:n].tolist(), chances[:n].tolist(), strict=True))

    def accept(self, int token, *, bint is_generated=True):
        """Put ``token`` into the penalty history; a generated one also advances the grammar."""
        check(c.kvmem_sampler_accept(self.get(), token, is_generated), "", FAILED)

    def accept_prompt(self, const int32_t[::1] tokens not None):
        """Put a prompt's tokens (int32) into the penalty history."""
        cdef c.kvmem_sampler *handle = self.get()
        cdef size_t n_tokens = tokens.shape[0]
        cdef int status
        if n_tokens == 0:
            return
        with nogil:
            status = c.kvmem_sampler_accept_prompt(handle, &tokens[0], n_tokens)
        check(status, "", FAILED)

    def clone(self):
        """An independent copy, random state included: both choose alike from here on."""
        cdef Sampler copy = Sampler.__new__(Sampler)
        copy.model = self.model
        check(c.kvmem_sampler_clone(self.get(), &copy._ptr), "", FAILED)
        return copy

    @property
    def seed(self):
        """The seed in use, also where a random one was drawn."""
        return c.kvmem_sampler_seed(self.get())


def describe_sampling(Model model not None, params=None):
    """What ``params`` come to, llama.cpp's defaults included, under llama-server's names.

    logit_bias is a list of {"token", "bias"}, where None is minus infinity.

    Raises:
        RequestError: as Sampler.
    """
    cdef bytes data = as_json(dict(params or {}), WHAT)
    cdef const char *chars = data
    cdef size_t n_chars = len(data)
    cdef const llama_model *handle = model.get()
    cdef char *text = NULL
    cdef size_t n_text = 0
    cdef int status
    with nogil:
        status = c.kvmem_sampler_describe(handle, chars, n_chars, &text, &n_text)
    return json.loads(take(status, text, n_text, "", FAILED))
