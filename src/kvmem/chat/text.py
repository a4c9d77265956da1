"""Texts mixed with token ids, as llama-server's plain endpoints take them."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvmem.chat.fields import FieldError, UnsupportedFieldError

__all__ = ["MixedText", "Tokenizer", "check_tokens", "read_mixed_text", "tokenize_mixed"]

MixedText = tuple[str | int, ...]
"""Texts and token ids, in order."""


class Tokenizer(Protocol):
    """llama.vocab.Vocab, as far as it is used here."""

    n_tokens: int

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]: ...
    def piece(self, token: int, *, special: bool = True) -> bytes: ...


def read_mixed_text(value: object, path: str) -> MixedText:
    """A string, a list of strings and token ids, or {"prompt_string": ...}."""
    if isinstance(value, dict):
        return (_read_wrapped(value, path),)
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise FieldError(path, "must be a string or a list of strings and token ids")
    return tuple(parts)


def _read_wrapped(value: dict[str, Any], path: str) -> str:
    text = value.get("prompt_string")
    if not isinstance(text, str):
        raise FieldError(f"{path}.prompt_string", "must be a string")
    if value.get("multimodal_data"):
        raise UnsupportedFieldError(
            f"{path}.multimodal_data", "is not supported yet: images cannot be read"
        )
    return text


def tokenize_mixed(
    text: MixedText,
    tokenizer: Tokenizer,
    path: str,
    *,
    add_special: bool,
    parse_special: bool = True,
) -> list[int]:
    """Token ids. What the model wants at the start comes before a text that stands first.

    Raises FieldError, about this field: an id is outside the vocabulary.
    """
    tokens: list[int] = []
    for index, part in enumerate(text):
        if isinstance(part, str):
            tokens += tokenizer.tokenize(
                part, add_special=add_special and index == 0, parse_special=parse_special
            )
        else:
            tokens.append(part)
    return check_tokens(tokens, tokenizer, path)


def check_tokens(tokens: Sequence[int], tokenizer: Tokenizer, path: str) -> list[int]:
    """The same. Raises FieldError if one is outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < tokenizer.n_tokens:
            raise FieldError(
                path,
                f"holds token {token}, which is outside the vocabulary of {tokenizer.n_tokens}",
            )
    return list(tokens)
