"""Tokens by segments are those of the whole text, whatever text and vocabulary."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import tiny_vocab
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stories import write_stories
from tiny import KINDS, write

from kvmem.chat import segments
from kvmem.chat.segments import SegmentTokenizer, find_cuts
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

ROOT = Path(__file__).resolve().parents[2]
PRES = ("qwen2", "gpt-2", "llama-bpe", "deepseek-v3", "gpt-4o", "smollm")
NASTY = (
    "<a>", "a><b", "<a><a>", "aba", "<|im", "_end|>", "|><|", " <s p>", "<nl>\n", "\n\n", "  ",
    "<é>", "é><", "<\uff5cx\uff5c>",
)  # fmt: skip
"""Special tokens that hold, touch or end like each other, or have spaces at their ends."""

WORDS = (
    "the", " the", "  ", " ", "\n", "\r\n", "\t", "is", "user", "assistant\n", "<", "|>", "<|im_",
    "start|>", "end|>", "_end|>", "</", "think>", "é", "日本", "🙂", "\u200d", "e\u0301", "İ", "ß",
    "\ufeff", "\x00", "1234567", "'s", "x" * 30, "Ġ", "▁", "<0x0A>", "<s>", "</s>", "[INST]",
)  # fmt: skip


class Vocabularies:
    """Those of the tests, each loaded once."""

    def __init__(self, folder: Path, tiny: Callable[..., Path]) -> None:
        self._folder = folder
        self._tiny = tiny
        self._loaded: dict[str, tuple[Model, Vocab]] = {}

    def __getitem__(self, name: str) -> Vocab:
        if name not in self._loaded:
            model = Model(self._path(name))
            self._loaded[name] = (model, Vocab(model))
        return self._loaded[name][1]

    def _path(self, name: str) -> Path:
        made = self._folder / f"{name}.gguf"
        if name == "spm":
            return write_stories(made)
        if name == "recall":
            return ROOT / "bench" / "recall_model" / "recall-qwen35.gguf"
        if name == "phi-3":  # of such a name, llama.cpp takes the spaces behind special tokens away
            extra = ("<unk>", "<s>", "</s>")
            return write(made, replace(KINDS["llama"], name="Phi-3-tiny", extra_tokens=extra))
        if name == "nasty":
            return write(made, replace(KINDS["llama"], extra_tokens=NASTY))
        return write(made, replace(KINDS["llama"], pre=name))

    def close(self) -> None:
        for model, _ in self._loaded.values():
            model.close()


@pytest.fixture(scope="module")
def vocabularies(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]
) -> Iterator[Vocabularies]:
    made = Vocabularies(tmp_path_factory.mktemp("vocabularies"), tiny)
    yield made
    made.close()


def all_specials(vocab: Vocab) -> list[str]:
    return [text.decode() for text, _ in vocab.specials().values()]


def texts(vocab: Vocab) -> st.SearchStrategy[str]:
    """Pieces of text, special tokens and parts of these, in any order."""
    specials = all_specials(vocab)
    cut = st.tuples(st.sampled_from(specials), st.integers(0, 12), st.booleans()).map(
        lambda item: item[0][: item[1]] if item[2] else item[0][item[1] :]
    )
    piece = st.one_of(st.sampled_from(specials), st.sampled_from(WORDS), cut, st.text(max_size=6))
    return st.lists(piece, max_size=24).map("".join)


def check(vocab: Vocab, tokenizer: SegmentTokenizer, text: str) -> None:
    found = tokenizer.tokenize(text)
    expected = vocab.tokenize(text, add_special=True)
    assert found.tokens.tolist() == expected
    data = text.encode("utf-8", "surrogatepass")
    if found.ends is None:
        return
    assert len(found.ends) == len(expected)
    start = 0
    for token, end in zip(expected, found.ends.tolist(), strict=True):
        assert end >= start
        if end > start:
            piece = vocab.piece(token)
            assert data[start:end] in (piece, piece.removeprefix(b" "))
        start = end
    assert start == len(data)


@pytest.mark.parametrize("name", [*PRES, "spm", "recall", "phi-3", "nasty"])
def test_segments_give_the_tokens_of_the_whole(vocabularies: Vocabularies, name: str) -> None:
    vocab = vocabularies[name]
    tokenizer = SegmentTokenizer(vocab, " ".join(all_specials(vocab)))

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(text=texts(vocab))
    def holds(text: str) -> None:
        check(vocab, tokenizer, text)
        check(vocab, tokenizer, text)  # all of it is remembered now

    holds()


def test_segments_give_the_tokens_of_the_whole_with_smollm2(demo_model: Path) -> None:
    with Model(demo_model) as model:
        vocab = Vocab(model)
        tokenizer = SegmentTokenizer(vocab, " ".join(all_specials(vocab)))
        rng = random.Random(0)
        specials = all_specials(vocab)
        for _ in range(300):
            pieces = rng.choices([*WORDS, *specials, *specials], k=rng.randrange(30))
            check(vocab, tokenizer, "".join(pieces))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    extra=st.lists(st.text("<a|b> ", min_size=1, max_size=4), min_size=2, max_size=6, unique=True),
    seed=st.integers(0, 1 << 20),
)
def test_any_special_tokens(
    extra: list[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("extra") / "m.gguf"
    taken = {*tiny_vocab.byte_letters(), "he", "the", "in"}
    tokens = tuple(text for text in extra if text not in taken)
    with Model(write(path, replace(KINDS["llama"], n_layers=1, extra_tokens=tokens))) as model:
        vocab = Vocab(model)
        tokenizer = SegmentTokenizer(vocab, "".join(all_specials(vocab)))
        rng = random.Random(seed)
        for _ in range(40):
            pieces = rng.choices([*tokens, *"<a|b> ", "<|im_end|>"], k=rng.randrange(24))
            check(vocab, tokenizer, "".join(pieces))
    path.unlink()


def test_without_the_rule_tokens_differ(
    vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: cut at every special token, and the texts above show it."""
    vocab = vocabularies["nasty"]
    everywhere = {text.decode(): token for token, (text, _) in vocab.specials().items()}
    monkeypatch.setattr(segments, "find_cuts", lambda *_: everywhere)
    tokenizer = SegmentTokenizer(vocab, "")
    with pytest.raises(AssertionError):
        for text in ("<a><b", "<a><a>", "<|im_end|>", "ababa", "   "):
            check(vocab, tokenizer, text)


@pytest.mark.parametrize(
    ("specials", "kept"),
    [
        (["<a>", "<b>"], ["<a>", "<b>"]),
        (["<a>", "a><b"], []),
        (["<a>", "x<a>x"], []),
        (["<a>", ">>"], [">>"][:0]),
        (["aba", "<c>"], ["<c>"]),
        ([" <a>", "<b>\n", "<c>"], ["<c>"]),
        (["<a>", "<a>", "<c>"], ["<c>"]),
        (["<a>", ""], []),
    ],
)
def test_which_tokens_are_cut_at(specials: list[str], kept: list[str]) -> None:
    told = {token: (text.encode(), False) for token, text in enumerate(specials)}
    assert list(find_cuts(told, ["".join(specials).encode()])) == kept
    assert find_cuts(told, [b"nothing"]) == {}
    stripping = {token: (text, True) for token, (text, _) in told.items()}
    assert find_cuts(stripping, ["".join(specials).encode()]) == {}


def test_template_tokens_of_real_vocabularies_are_cut_at(
    vocabularies: Vocabularies, demo_model: Path
) -> None:
    vocab = vocabularies["recall"]
    source = vocab.model.metadata("tokenizer.chat_template") or ""
    assert {"<|im_start|>", "<|im_end|>"} <= find_cuts(vocab.specials(), [source.encode()]).keys()
    with Model(demo_model) as model:
        source = model.metadata("tokenizer.chat_template") or ""
        named = [source.encode()]
        assert {"<|im_start|>", "<|im_end|>"} <= find_cuts(Vocab(model).specials(), named).keys()


class CountingVocab(Vocab):
    """Notes the parts between special tokens that it is asked to tokenise."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.asked: list[str] = []

    def token_array(self, text: str, **options: bool) -> NDArray[np.int32]:
        self.asked += re.split(r"<\|\w+\|>", text)
        return super().token_array(text, **options)

    def take(self) -> list[str]:
        """What was asked since the last call."""
        taken, self.asked = self.asked, []
        return taken


def test_what_is_remembered_is_bounded_and_not_tokenised_again(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = CountingVocab(model)
        tokenizer = SegmentTokenizer(vocab, "<|im_end|>", limit_bytes=20_000)
        vocab.take()
        history = [f"message {i}" for i in range(8)]
        tokenizer.tokenize("<|im_end|>".join(history))
        assert vocab.take() == history
        history[3] = "edited"
        text = "<|im_end|>".join([*history, "and one more"])
        tokens = tokenizer.tokenize(text).tokens.tolist()
        assert vocab.take() == ["edited", "and one more"]
        assert tokens == vocab.tokenize(text, add_special=True)
        for i in range(200):
            tokenizer.tokenize("<|im_end|>".join([f"other {i}", "kept"]))
            assert 0 < tokenizer.kept_bytes <= 20_000
        vocab.take()
        tokenizer.tokenize("kept<|im_end|>message 1")
        assert vocab.take() == ["message 1"]


def test_several_threads_at_a_time(vocabularies: Vocabularies) -> None:
    vocab = vocabularies["qwen2"]
    tokenizer = SegmentTokenizer(vocab, "<|im_end|>", limit_bytes=8_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            text = "<|im_end|>".join(f"part {rng.randrange(30)}" for _ in range(5))
            if tokenizer.tokenize(text).tokens.tolist() != vocab.tokenize(text, add_special=True):
                wrong.append(text)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_piece_ends_by_hand(vocabularies: Vocabularies) -> None:
    vocab = vocabularies["qwen2"]
    tokens = vocab.token_array("the <|im_end|>é")
    ends = vocab.piece_ends(tokens, "the <|im_end|>é".encode())
    assert ends is not None
    assert ends.tolist() == [3, 4, 14, 15, 16]
    assert vocab.piece_ends(tokens, b"the <|im_end|>e") is None
    assert vocab.piece_ends(tokens, b"more than the tokens have") is None
    behind = vocab.piece_ends(tokens, "<|im_end|>é".encode())
    assert behind is not None
    assert behind.tolist() == [-1, 0, 10, 11, 12]
    nothing = vocab.piece_ends(np.empty(0, np.int32), b"")
    assert nothing is not None
    assert len(nothing) == 0
