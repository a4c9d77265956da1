"""Conversations as tokens: rows to train on, and held-out questions with the spans of their facts.

    python bench/recall_model/recall_tokens.py OUT.jsonl --seed 1 --each 20

writes held-out conversations in the form of heldout.jsonl. The vocabulary is that of the GGUF file.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from recall_conversations import (
    Conversation,
    Mark,
    Piece,
    Style,
    join,
    write_conversation,
)

HERE: Final = Path(__file__).resolve().parent
MODEL: Final = HERE / "recall-qwen35.gguf"

# llama.cpp's pre-type "qwen35": src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_QWEN35.
PRE_TOKENS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Tokenize = Callable[[str], list[int]]

SEEDS_APART: Final = 10**9
"""Seeds of one length of held-out conversations from those of the next."""


class Vocabulary:
    """The byte-level BPE of a GGUF file. The text of this project's conversations is ASCII."""

    def __init__(self, path: Path = MODEL) -> None:
        fields = gguf.GGUFReader(path).fields
        pieces: list[str] = fields["tokenizer.ggml.tokens"].contents()
        merges: list[str] = fields["tokenizer.ggml.merges"].contents()
        types: list[int] = fields["tokenizer.ggml.token_type"].contents()
        self.path = path
        self._pieces = pieces
        self._merges = [tuple(merge.split(" ")) for merge in merges]
        self._is_text = [kind == gguf.TokenType.NORMAL for kind in types]
        # each character of a piece stands for one byte, and added tokens are ASCII
        self.lengths: NDArray[np.int64] = np.array([len(piece) for piece in pieces])

    def tokenizer(self) -> Tokenize:
        """Text to tokens, by the `tokenizers` package; <|im_start|> and its like are one each."""
        from tokenizers import AddedToken, Regex, Tokenizer
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as InTurn

        text = {p: i for i, p in enumerate(self._pieces) if self._is_text[i]}
        bpe = Tokenizer(BPE(text, self._merges))
        split = Split(Regex(PRE_TOKENS), "isolated")
        bpe.pre_tokenizer = InTurn([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        added = [p for i, p in enumerate(self._pieces) if not self._is_text[i]]
        bpe.add_tokens([AddedToken(piece, normalized=False) for piece in added])
        if any(bpe.token_to_id(piece) != i for i, piece in enumerate(self._pieces)):
            raise ValueError(f"{self.path}: its added tokens do not stand behind the others")
        return lambda content: bpe.encode(content, add_special_tokens=False).ids


@dataclass(frozen=True, slots=True)
class Encoded:
    """tokens: int64 [n]. kinds: int64 [n], the Kind of each. spans: [start, stop) of each mark."""

    tokens: NDArray[np.int64]
    kinds: NDArray[np.int64]
    spans: dict[Mark, tuple[int, int]]


def encode(pieces: Sequence[Piece], tokenize: Tokenize, lengths: NDArray[np.int64]) -> Encoded:
    """Tokens of a text that is ASCII, and which piece each is of: the one of its last character.

    lengths: int64 [n_vocab], the bytes of each token.
    Raises ValueError: the tokens do not join to the text.
    """
    text = join(pieces)
    tokens = np.array(tokenize(text), np.int64)
    ends = np.cumsum(lengths[tokens])
    if not text.isascii() or ends[-1] != len(text):
        raise ValueError("the tokens do not join to the text: another vocabulary?")
    piece_ends = np.cumsum([len(piece.text) for piece in pieces])
    kinds = np.array([piece.kind for piece in pieces])[np.searchsorted(piece_ends, ends, "left")]
    spans = {}
    for piece, end in zip(pieces, piece_ends, strict=True):
        if piece.mark is not None:
            # the token that holds the first character to the one that holds the last
            first = int(np.searchsorted(ends, end - len(piece.text), "right"))
            spans[piece.mark] = first, int(np.searchsorted(ends, end, "left")) + 1
    return Encoded(tokens, kinds, spans)


def training_row(
    seed: int, n_tokens: int, tokenize: Tokenize, lengths: NDArray[np.int64]
) -> Encoded:
    """Exactly n_tokens of a conversation whose places are not held out; short ones are denser."""
    dense = n_tokens <= 512
    question_rate, fact_tokens = (0.9, 40.0) if dense else (0.6, 65.0)
    wanted = 1.08 * n_tokens
    while True:
        style = Style(tokens=int(wanted), question_rate=question_rate, fact_tokens=fact_tokens)
        conversation = write_conversation(seed, style)
        row = encode(tuple(conversation.pieces()), tokenize, lengths)
        if len(row.tokens) >= n_tokens:
            return Encoded(row.tokens[:n_tokens], row.kinds[:n_tokens], {})
        wanted *= 1.12


def held_out_item(
    conversation: Conversation, tokenize: Tokenize, lengths: NDArray[np.int64]
) -> dict[str, Any]:
    """A line of heldout.jsonl, without its id and target_tokens (README.md says what is in it)."""
    history = encode(tuple(conversation.pieces()), tokenize, lengths)
    return {
        "messages": [
            {"role": message.role, "content": join(message.pieces)}
            for message in conversation.messages
        ],
        "n_tokens": len(history.tokens),
        "questions": [
            {
                "text": question.text,
                "answer": join(question.answer),
                "value": question.value,
                "kind": question.kind,
                "spans": [history.spans[mark] for mark in question.gold],
                "stale": [history.spans[mark] for mark in question.stale],
            }
            for question in conversation.questions
        ],
    }


def held_out_items(
    seed: int, n_tokens: int, tokenize: Tokenize, lengths: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    """Endless conversations of about n_tokens with five questions, on places that are held out."""
    style = Style(
        tokens=n_tokens, held_out=True, question_rate=0.15, fact_tokens=60, final_questions=5
    )
    for number in count((seed * 10 + 1) * SEEDS_APART + n_tokens * 1000):
        conversation = write_conversation(number, style)
        if len(conversation.questions) < style.final_questions:
            continue
        item = held_out_item(conversation, tokenize, lengths)
        if 0.85 * n_tokens < item["n_tokens"] < 1.08 * n_tokens:
            yield {"target_tokens": n_tokens, **item}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write held-out conversations with questions.")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--each", type=int, default=20, help="conversations of each length")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    vocabulary = Vocabulary()
    tokenize = vocabulary.tokenizer()
    lines = [
        item
        for n_tokens in options.tokens
        for item, _ in zip(
            held_out_items(options.seed, n_tokens, tokenize, vocabulary.lengths),
            range(options.each),
            strict=False,
        )
    ]
    with options.out.open("w", encoding="utf-8") as out:
        for number, line in enumerate(lines, 1):
            out.write(json.dumps({"id": f"h{number:02d}", **line}) + "\n")


if __name__ == "__main__":
    main()
