"""How likely a token was: by the model alone, or with all that sampling does."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.sampler import Sampler
from kvmem.llama.vocab import Vocab

__all__ = [
    "TokenChance",
    "TokenChances",
    "TokenLogprob",
    "TokenLogprobs",
    "token_chances",
    "token_logprobs",
]


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


@dataclass(frozen=True, slots=True)
class TokenChance:
    """The chance of a token among those that were left to choose from, and its bytes."""

    token: int
    piece: bytes
    chance: float


@dataclass(frozen=True, slots=True)
class TokenChances:
    """The chosen token, and the likeliest ones in descending order; none has a chance of 0."""

    chosen: TokenChance
    top: tuple[TokenChance, ...]


def token_chances(sampler: Sampler, token: int, n_top: int, vocab: Vocab) -> TokenChances:
    """Of the token that the sampler chose last."""
    found = [
        TokenChance(index, vocab.piece(index, special=True), chance)
        for index, chance in sampler.candidates(vocab.n_tokens)
    ]
    chosen = next((entry for entry in found if entry.token == token), None)
    # a grammar chooses anew where the first choice breaks it: nothing else is then left
    chosen = chosen or TokenChance(token, vocab.piece(token, special=True), 1.0)
    return TokenChances(chosen, tuple(found[:n_top]))


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
