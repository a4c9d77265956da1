"""What is refused by its bytes would be refused by its tokens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.chat.token_bound import TokenBound
from kvmem.errors import ContextLengthError
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab


def longest(vocab: Vocab) -> str:
    return max((vocab.piece(t) for t in range(vocab.n_tokens)), key=len).decode()


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_it_is_as_near_as_a_text_of_longest_pieces(vocab: Vocab, n: int) -> None:
    text = longest(vocab) * n
    assert len(vocab.tokenize(text)) == n
    bound = TokenBound(vocab)
    bound.check(text, n + 1)
    with pytest.raises(ContextLengthError) as refused:
        bound.check(text, n)
    assert (refused.value.prompt_tokens, refused.value.limit_tokens) == (n, n)
    with pytest.raises(ContextLengthError):
        bound.check(text + "a", n + 1)


@given(data=st.data(), n=st.integers(1, 40))
def test_what_is_refused_has_as_many_tokens(vocab: Vocab, data: st.DataObject, n: int) -> None:
    pieces = st.sampled_from([longest(vocab), "<|im_end|>", " the", "é", "🙂", "\x00", " ", "ing"])
    text = data.draw(st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=60).map("".join))
    try:
        TokenBound(vocab).check(text, n)
    except ContextLengthError as error:
        assert len(vocab.tokenize(text)) >= error.prompt_tokens >= n


def test_no_bound_where_a_part_of_a_text_may_vanish(vocab: Vocab) -> None:
    class Other:
        """The same vocabulary under another name, with other specials, or without a byte."""

        n_tokens = vocab.n_tokens

        def __init__(self, kind: str = "gpt2", *, strips: bool = False, lacks: int = -1) -> None:
            self.kind, self._strips, self._lacks = kind, strips, lacks

        def specials(self) -> dict[int, tuple[bytes, bool]]:
            return {0: (b"<s>", self._strips)}

        def piece(self, token: int) -> bytes:
            return vocab.piece(token) if token != self._lacks else b"no byte"

    with pytest.raises(ContextLengthError):
        TokenBound(Other("llama")).check("\u2581" * 3 * 160, 30)  # type: ignore[arg-type]
    TokenBound(Other("llama")).check("\u2581" * 3 * 160, 31)  # type: ignore[arg-type]
    text = "\a" * 100_000
    with pytest.raises(ContextLengthError):
        TokenBound(Other()).check(text, 10)  # type: ignore[arg-type]
    for other in (Other("t5"), Other(strips=True), Other(lacks=ord("\a"))):
        TokenBound(other).check(text, 10)  # type: ignore[arg-type]


@pytest.mark.slow
def test_bytes_that_a_trained_vocabulary_lacks(demo_model: Path) -> None:
    with Model(demo_model) as model:
        vocab = Vocab(model)
        bound = TokenBound(vocab)
        text = "\x04" * 1000
        assert vocab.tokenize(text) == []
        bound.check(text, 1)
        with pytest.raises(ContextLengthError):
            bound.check(text + "a" * 1000, 10)
