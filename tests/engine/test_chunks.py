"""The pieces in which a prompt is read: whole blocks where it can be, never more than a batch."""

from pathlib import Path

import pytest
from engines import SIZES, ask, random_tokens, record


@pytest.mark.parametrize("batch_tokens", [1, 5, 16, 31, 32, 33, 100, 128, 4096])
def test_any_batch_reads_any_prompt(batch_tokens: int, tiny_llama: Path) -> None:
    with record(tiny_llama, batch_tokens=batch_tokens, budget_tokens=512) as recorded:
        n_read = 0
        for n_tokens in (37, 300, 301):
            ask(recorded.session, random_tokens(n_tokens), max_tokens=0)
            calls, recorded.calls[:] = recorded.calls.copy(), []
            assert max(len(call.tokens) for call in calls) <= batch_tokens
            assert calls[0].start == n_read
            assert sum(len(call.tokens) for call in calls) == n_tokens - n_read
            n_read = n_tokens
        recorded.memory.check()


def test_chunks_end_at_borders(tiny_llama: Path) -> None:
    with record(tiny_llama, batch_tokens=100, budget_tokens=512) as recorded:
        recorded.session.read(random_tokens(410))
        assert [len(call.tokens) for call in recorded.calls] == [96, 96, 96, 96, 26]
        recorded.calls.clear()
        recorded.session.read(random_tokens(200))
        assert [call.start + len(call.tokens) for call in recorded.calls] == [480, 576, 610]


def test_a_chunk_leaves_three_quarters_of_the_budget_to_look_back_at(tiny_llama: Path) -> None:
    with record(tiny_llama, batch_tokens=4096) as recorded:
        recorded.session.read(random_tokens(1000))
        block = SIZES["block_tokens"]
        assert {len(call.tokens) for call in recorded.calls[:-1]} == {2 * block}
        for call in recorded.calls[4:]:
            assert call.visible is not None
            assert len(call.visible) == 6
            assert call.visible[0] == 0  # the sink


def test_ubatches_need_not_divide_blocks(tiny_llama: Path) -> None:
    replies = set()
    for ubatch in (7, 50, 128):
        with record(tiny_llama, ubatch_tokens=ubatch, scorer="recency") as recorded:
            replies.add(ask(recorded.session, random_tokens(900), max_tokens=40).tokens)
            recorded.memory.check()
    assert len(replies) == 1
