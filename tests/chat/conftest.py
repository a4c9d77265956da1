"""What tests of chats have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmem.llama.model import Model


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model
