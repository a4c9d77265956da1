"""The recall model's conversations: what is asked was told, and the spans say where."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall_conversations import Kind, Style, join, write_conversation
from recall_heldout import load
from recall_language import ADJECTIVES, ATTRIBUTES, FORMS, NOUNS, is_held_out
from recall_tokens import MODEL, Tokenize, Vocabulary, encode, held_out_items, training_row

from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

PLACE = re.compile(rf"\b({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)})\b")
VALUES = (Kind.VALUE, Kind.NEWEST, Kind.HOP_VALUE)
SEEDS = st.integers(0, 10**9)

lengths = Vocabulary().lengths


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with Model(MODEL) as model:
        yield Vocab(model)


@pytest.fixture(scope="module")
def tokenize(vocab: Vocab) -> Tokenize:
    return vocab.tokenize


@pytest.fixture(scope="module")
def items(tokenize: Tokenize) -> list[dict[str, Any]]:
    """60 new ones, as long as those in the repository."""
    sizes = (1024, 2048, 4096)
    return [item for n in sizes for item in islice(held_out_items(5, n, tokenize, lengths), 20)]


def render(item: dict[str, Any]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in item["messages"])


def listen(name: str, **given: str) -> re.Pattern[str]:
    """What FORMS[name] may sound like, with what is given as a pattern in its slots."""
    forms = [re.sub(r"\\{(\w+)\\}", lambda m: given[m[1]], re.escape(f)) for f in FORMS[name]]
    return re.compile("|".join(forms))


def test_lengths_are_those_of_the_pieces(vocab: Vocab) -> None:
    assert [len(vocab.piece(token)) for token in range(vocab.n_tokens)] == lengths.tolist()


def test_kinds_are_as_common_as_in_the_repository(items: list[dict[str, Any]]) -> None:
    ours = Counter(question["kind"] for item in items for question in item["questions"])
    theirs = Counter(question["kind"] for item in load() for question in item["questions"])
    assert sum(ours.values()) == sum(theirs.values()) == 300
    for kind, n in theirs.items():
        share = n / 300
        assert abs(ours[kind] - n) / 300 < 3 * (2 * share * (1 - share) / 300) ** 0.5


def test_spans_point_at_what_was_told(items: list[dict[str, Any]], vocab: Vocab) -> None:
    """In new conversations as in those of the repository."""
    n_stale = 0
    for item in [*items, *load()]:
        tokens = vocab.tokenize(render(item))
        assert len(tokens) == item["n_tokens"]
        for question in item["questions"]:
            assert (question["kind"] == "none") == (not question["spans"])
            if question["kind"] == "none":
                continue
            told, *alias = question["spans"]
            answered = re.search(r"The (.+?) for (\w+ \w+) is (.+)\.$", question["answer"])
            assert answered and answered[3] == question["value"]
            assert vocab.detokenize(tokens[slice(*told)]).strip() == question["value"]
            assert (len(question["stale"]) > 0) == (question["kind"] == "update") or alias
            for span in [*question["stale"], told]:
                before = vocab.detokenize(tokens[max(0, span[0] - 40) : span[0]])
                about = [listen(name, attribute=answered[1], place=answered[2])
                         for name in ("told", "told in a log", "changed")]  # fmt: skip
                assert any(re.search(f"(?:{form.pattern})$", before) for form in about)
            for span in question["stale"]:
                n_stale += 1
                assert span[1] <= told[0], "a newer value stands before an older one"
            assert len(alias) == (question["kind"] == "hop")
            for span in alias:
                name = question["answer"].split(" is ")[0]
                said = vocab.detokenize(tokens[slice(*span)]).strip()
                assert listen("alias told", alias=name, place=answered[2]).fullmatch(said)
    assert n_stale > 50


def test_the_repository_speaks_this_language() -> None:
    """A model that was trained on new conversations knows the forms of the held-out questions."""
    attribute = f"(?:{'|'.join(ATTRIBUTES)})"
    alias = rf"(?:{'|'.join(FORMS['group'])}) (?:{'|'.join(FORMS['animal'])})"
    place = f"(?:{PLACE.pattern}|{alias})"
    question = listen("question", attribute=attribute, place=place)
    answer = listen("answer", attribute=attribute, place=place).pattern
    hop, plain = (
        re.compile(rf"{alias} is {PLACE.pattern}\. {answer} .+\."),
        re.compile(rf"{answer} .+\."),
    )
    vain = listen("no record", attribute=attribute, place=place)
    for item in load():
        for asked in item["questions"]:
            assert question.fullmatch(asked["text"])
            form = {"none": vain, "hop": hop}.get(asked["kind"], plain)
            assert form.fullmatch(asked["answer"])


def test_places_are_kept_apart(items: list[dict[str, Any]]) -> None:
    """No place that is told of in one set is told of in the other."""
    for item in [*items, *load()]:
        for question in item["questions"]:
            places = [match[0] for match in PLACE.finditer(question["answer"])]
            assert places and all(map(is_held_out, places[:1]))
    for seed in range(20):
        conversation = write_conversation(seed, Style(tokens=2000, final_questions=5))
        assert conversation.questions
        for asked in conversation.questions:
            found = PLACE.search(join(asked.answer))
            assert found and not is_held_out(found[0])


def test_one_pair_of_words_in_ten_is_held_out() -> None:
    places = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    assert sum(map(is_held_out, places)) / len(places) == pytest.approx(0.1, abs=0.005)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, n_tokens=st.sampled_from([256, 512, 1024]))
def test_a_row_teaches_only_what_was_told(
    tokenize: Tokenize, vocab: Vocab, seed: int, n_tokens: int
) -> None:
    row = training_row(seed, n_tokens, tokenize, lengths)
    assert row.tokens.shape == row.kinds.shape == (n_tokens,)
    again = training_row(seed, n_tokens, tokenize, lengths)
    assert np.array_equal(row.tokens, again.tokens) and np.array_equal(row.kinds, again.kinds)
    start = 0
    for kind, run in groupby(row.kinds.tolist()):
        stop = start + len(list(run))
        said = vocab.detokenize(row.tokens[start:stop])
        before = vocab.detokenize(row.tokens[:start])
        if kind in VALUES and stop < n_tokens:
            assert said in before
            assert re.search(r"<\|im_start\|>assistant\n[^\n]* is$", before)
        elif kind == Kind.PLACE and stop < n_tokens:
            assert PLACE.fullmatch(said.strip()) and said in before
        elif kind == Kind.NO_RECORD and stop < n_tokens:
            assert said.endswith("<|im_end|>") and said.startswith("I have no record of")
        start = stop


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_another_seed_tells_something_else(seed: int) -> None:
    style = Style(tokens=300)
    first, second, third = (write_conversation(s, style) for s in (seed, seed, seed + 1))
    assert first == second != third


def test_a_foreign_vocabulary_is_refused(tokenize: Tokenize) -> None:
    pieces = tuple(write_conversation(1, Style(tokens=200)).pieces())
    with pytest.raises(ValueError, match="another vocabulary"):
        encode(pieces, lambda text: tokenize(text)[:-1], lengths)
