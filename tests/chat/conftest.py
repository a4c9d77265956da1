"""What tests of chats have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmem.chat.render import ChatRenderer
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate
from kvmem.llama.vocab import Vocab


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


@pytest.fixture(scope="session")
def vocab(model: Model) -> Vocab:
    return Vocab(model)


@pytest.fixture(scope="module")
def renderer(vocab: Vocab) -> Iterator[ChatRenderer]:
    with ChatTemplate(vocab.model) as template:
        yield ChatRenderer(template, vocab)
