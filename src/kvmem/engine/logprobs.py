"""Log probabilities of a token and of the likeliest ones, before anything was sampled or cut."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.vocab import Vocab

__all__ = ["TokenLogprob", "TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the softmax of the logits, and the token's bytes."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token, and the likeliest ones in descending order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def token_logprobs(
    logits: NDArray[np.float32], token: int, n_top: int, vocab: Vocab
) -> TokenLogprobs:
    """logits: f32 [n_vocab], as the model gave them: temperature and penalties are not in them."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    n_top = min(n_top, len(values))
    top: list[int] = []
    if n_top:
        top = np.argpartition(values, len(values) - n_top)[len(values) - n_top :].tolist()

    def entry(index: int) -> TokenLogprob:
        return TokenLogprob(index, vocab.piece(index, special=True), float(values[index]))

    top.sort(key=lambda index: (-values[index], index))
    return TokenLogprobs(entry(token), tuple(entry(index) for index in top))
