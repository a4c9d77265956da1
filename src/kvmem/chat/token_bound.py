"""How many tokens a text has at least, which is known before it is tokenised."""

from functools import cached_property

from kvmem.chat.segments import KINDS
from kvmem.errors import ContextLengthError
from kvmem.llama.vocab import Vocab

__all__ = ["TokenBound"]


class TokenBound:
    """Of one vocabulary: no token stands for more bytes than the longest piece has.

    Bytes that have no token of their own are not counted: llama.cpp leaves them out. There is no
    bound for tokenizers that rewrite a text, nor where the spaces beside a token may vanish.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def check(self, text: str, limit_tokens: int) -> None:
        """Raises ContextLengthError where the text certainly has as many tokens, or more."""
        if 4 * len(text) < limit_tokens:  # a letter is up to four bytes
            return
        longest, left_out = self._pieces
        # SPM writes a space as that sign, so that pieces tell one from the other no longer
        data = text.replace("\u2581", " ").encode("utf-8", "surrogatepass")
        n_bytes = len(data.translate(None, left_out))
        n_least = -(-n_bytes // longest) if longest else 0
        if n_least >= limit_tokens:
            raise ContextLengthError(n_least, limit_tokens, is_least=True)

    @cached_property
    def _pieces(self) -> tuple[int, bytes]:
        """Bytes of the longest piece, 0 where there is no bound; and those that no piece is."""
        vocab = self._vocab
        if vocab.kind not in KINDS or any(strips for _, strips in vocab.specials().values()):
            return 0, b""
        pieces = {vocab.piece(token) for token in range(vocab.n_tokens)}
        left_out = bytes(byte for byte in range(256) if bytes([byte]) not in pieces)
        return max(map(len, pieces)), left_out
