"""A start copes where a pool does not fit after all, and a GPU takes what it needs at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ask, random_tokens, record

from kvmem.engine.fit import run_largest


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama_64", {}), ("qwen35_64", {"ordered": True}), ("qwen35_mtp", {"n_drafts": 3})],
)
def test_the_largest_batch_leaves_nothing_behind(
    kind: str, settings: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    tokens = random_tokens(700)
    replies = []
    for is_run in (False, True):
        with record(tiny(kind), **settings) as recorded:
            memory = recorded.memory
            if is_run:
                recorded.calls.clear()
                run_largest(memory)
                assert [len(call.tokens) for call in recorded.calls] == [128, 1]
                assert memory.port.n_cells_used == 0
                memory.check()
            replies.append(ask(recorded.session, tokens, max_tokens=20).tokens)
            memory.check()
    assert replies[0] == replies[1]
