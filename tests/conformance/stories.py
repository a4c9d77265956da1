"""A tiny llama in place of stories260K, the model that llama.cpp's server tests were written for.

Those tests expect two things of the model besides a working server: prompts of so many tokens, and
replies in which certain words come. So the vocabulary here is of the same kind (SentencePiece, byte
tokens, `<s>` with id 1) with pieces that give the expected counts, and what the model says is made
of a few phrases that have the expected words. Which phrase comes is up to random weights.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
from tiny import N_HEADS, N_KV_HEADS, Shape, add_metadata, finish
from tiny_vocab import CHATML

SHAPE: Final = Shape()
N_SPLITS: Final = 3

# Found by search: with these pieces, in rank order, all prompts of test_chat_completion,
# test_completion and test_ctx_shift have the lengths that those files state.
PIECES: Final = (
    "st", "im", "▁b", "yst", "ti", "si", "ch", "ite", "re", "ore", "syst", "te", "▁Hel", "▁He",
    "in", "▁be", "late", "ate", "d|", "us", "wi", "ot", "nim", "you", "▁e", "▁the", "qu", "vel",
    "ou", "co", "▁w", "ning", "ute", "ctetur", "ve", "▁ho", "ok", "▁conse", "late,", "con", ">us",
    "ated", "adipi", "ed", "it", "dipi", "cte", "cons", "am,", "▁H", "▁T", "eve", "as", "sist",
    "ing", "▁tr", "cated", "Wr", "di", "ur", "aning", "▁co", "gn", "he", "at", "li", "▁Hi",
    "▁cons", "not", "▁t", "rit", "usm", "tem", "▁as", "fe", "it,", "ps", "▁c", "on", "ich", "bou",
    "abou", "qua.", "dip", "▁ci", "▁ei", "ncated", "a.", "tur", "▁ul", "et", "Wh", "ul", "▁A",
    "ho", "wil", "▁Th", "rc", "m,", "ost", "▁s", "▁abou", "▁li", "▁beli", "▁p", "▁how", "▁sed",
    "oke", "mco", "qui", "um", "nul", "ck", "ox", "zy", "og", "mps",
)  # fmt: skip
LETTERS: Final = ("▁", "\n", *(chr(code) for code in range(0x21, 0x7F)))

# No word of these is one that test_logit_bias forbids.
PHRASE: Final = "▁Suddenly▁{}▁felter▁Whillicter▁going▁girl▁forest\n▁blue"
WHO: Final = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ines", "Jon", "Kim", "Leo", "Mia",
    "Ned", "Ola", "Pia", "Quin", "Ray", "Sue", "Tom", "Uma", "Vic", "Wim", "Xia", "Yan", "Zoe",
    "Ari", "Bea", "Cid", "Dot", "Eli", "Fay",
)  # fmt: skip

STEADY: Final = 0
"""This dimension of the hidden row is the same everywhere: what reads it is a bias."""
STEADY_VALUE: Final = 8.0

F32 = npt.NDArray[np.float32]


def write_stories(path: Path, *, split: bool = False) -> Path:
    """Write the model. Returns the path, or that of the first of N_SPLITS files."""
    tensors = dict(_tensors(len(_vocabulary())))
    # The writer fills a file before it begins the next, so that this gives N_SPLITS files.
    most = -(-len(tensors) // N_SPLITS) if split else 0
    writer = gguf.GGUFWriter(str(path), SHAPE.arch, split_max_tensors=most)
    add_metadata(writer, SHAPE)
    _add_vocabulary(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    return path.with_name(f"{path.stem}-00001-of-{N_SPLITS:05}.gguf") if split else path


def _vocabulary() -> list[tuple[str, float, gguf.TokenType]]:
    """Text, score and type of each token. The higher the score, the earlier a piece is joined."""
    special = [
        ("<unk>", 0.0, gguf.TokenType.UNKNOWN),
        ("<s>", 0.0, gguf.TokenType.CONTROL),
        ("</s>", 0.0, gguf.TokenType.CONTROL),
    ]
    bytes_ = [(f"<0x{value:02X}>", 0.0, gguf.TokenType.BYTE) for value in range(256)]
    said = [*PIECES, *LETTERS, *(PHRASE.format(name) for name in WHO)]
    normal = [(text, -float(rank), gguf.TokenType.NORMAL) for rank, text in enumerate(said)]
    return special + bytes_ + normal


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    texts, scores, types = zip(*_vocabulary(), strict=True)
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHATML)


def _tensors(n_vocab: int) -> Iterable[tuple[str, F32]]:
    """The weights: f32 [n_out, n_in] each."""
    rng = np.random.default_rng(SHAPE.seed)

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> F32:
        drawn = rng.standard_normal((n_out, n_in)) * (gain / n_in**0.5)
        return np.asarray(drawn, np.float32)

    def adds_to_row(n_in: int, gain: float = 1.0) -> F32:
        made = matrix(SHAPE.n_embd, n_in, gain)
        made[STEADY] = 0
        return made

    wide, narrow = SHAPE.n_embd, SHAPE.n_ff
    n_query, n_kv = N_HEADS * SHAPE.head_dim, N_KV_HEADS * SHAPE.head_dim
    embedding = rng.standard_normal((n_vocab, wide)).astype(np.float32)
    embedding[:, STEADY] = STEADY_VALUE
    yield "token_embd.weight", embedding
    yield "output_norm.weight", np.ones(wide, np.float32)
    yield "output.weight", _output(matrix(n_vocab, wide))
    for layer in range(SHAPE.n_layers):
        prefix = f"blk.{layer}."
        yield prefix + "attn_norm.weight", np.ones(wide, np.float32)
        yield prefix + "attn_q.weight", matrix(n_query, wide, 1.5)
        yield prefix + "attn_k.weight", matrix(n_kv, wide, 1.5)
        yield prefix + "attn_v.weight", matrix(n_kv, wide)
        yield prefix + "attn_output.weight", adds_to_row(n_query, 2.0)
        yield prefix + "ffn_norm.weight", np.ones(wide, np.float32)
        yield prefix + "ffn_gate.weight", matrix(narrow, wide)
        yield prefix + "ffn_up.weight", matrix(narrow, wide)
        yield prefix + "ffn_down.weight", adds_to_row(narrow)


def _output(rows: F32) -> F32:
    """The output head: phrases are likely, letters and pieces come if a grammar wants them."""
    texts = [text for text, _, _ in _vocabulary()]
    rows[:, STEADY] = -4.0
    rows[-len(WHO) :, STEADY] = 0
    # Special and byte tokens never, and neither the fence nor the space around JSON that its
    # grammar allows.
    around = (texts.index(text) for text in ("`", "\n", "▁"))
    for never in (*range(texts.index(PIECES[0])), *around):
        rows[never] = 0
        rows[never, STEADY] = -16.0
    return rows


if __name__ == "__main__":
    write_stories(Path(sys.argv[1], "stories.gguf"))
    write_stories(Path(sys.argv[1], "stories-split.gguf"), split=True)
