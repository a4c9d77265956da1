"""A token's position is not its index, as soon as something takes up positions of its own.

The rows of an image will (M-RoPE); here text jumps ahead. Cells, records, the draft head and what
is taken back go by the index; rotations and masks by the position.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ENDLESS, Recorded, foresee, random_tokens, record
from numpy.typing import NDArray
from stock import largest_difference, replay, stock_context

from kvmem.engine.events import TokenEvent
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import Prompt, positions_behind, text_positions
from kvmem.engine.room import make_room
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import Cancelled

EXACT: dict[str, Any] = {"ordered": True, "type_k": "f16", "type_v": "f16", "n_drafts": 3}
JUMPS = ((70, 0), (50, 7), (33, 100), (90, 1))
"""Tokens of each piece, and how far its first position lies behind the next one."""
HISTORY = random_tokens(sum(n for n, _ in JUMPS), seed=1)


def read_with_jumps(memory: TieredMemory) -> None:
    """The history, as memory.decode reads it, but for the positions."""
    start = 0
    for n, jump in JUMPS:
        tokens = np.array(HISTORY[start : start + n], np.int32)
        working_set = memory.working_set
        make_room(memory, n)
        cells = working_set.prepare(n)
        pos = positions_behind(working_set.pos, n)
        pos[:, :3] += jump
        first = np.ascontiguousarray(pos[:, 0])
        memory.context.decode(tokens, first)
        assert memory.drafter is not None
        memory.drafter.follow(cells, tokens, first)
        working_set.commit(tokens, pos)
        memory.seal()
        memory.save_checkpoint()
        start += n


def say(recorded: Recorded, n: int) -> tuple[int, ...]:
    """A reply behind the history as it is; the prompt ends with one token more."""
    prompt = Prompt(tokens=(*recorded.session.tokens.tolist(), 9))
    params = GenerateParams(sampling=ENDLESS, max_tokens=n)
    events = recorded.session.generate(prompt, params)
    return tuple(event.token for event in events if isinstance(event, TokenEvent))


def test_behind_an_image_text_goes_on_at_its_largest_position() -> None:
    rows = np.array([[5, 5, 5, 0], [5, 5, 6, 0], [5, 6, 5, 0], [5, 6, 6, 0]], np.int32)
    np.testing.assert_array_equal(positions_behind(rows, 3), text_positions(7, 10))
    np.testing.assert_array_equal(positions_behind(rows[:0], 2), text_positions(0, 2))


@pytest.mark.parametrize("mtp_state", ["snapshots", "replay"])
def test_a_reply_with_drafts_is_stock_llama_at_the_same_positions(
    mtp_state: str, tiny_qwen35_mtp: Path
) -> None:
    settings = {**EXACT, "budget_tokens": 1024, "mtp_state": mtp_state}
    with record(tiny_qwen35_mtp, **{**settings, "n_drafts": 3}) as recorded:
        read_with_jumps(recorded.memory)
        said = say(recorded, 40)
    with record(tiny_qwen35_mtp, **settings) as recorded:
        memory = recorded.memory
        assert memory.drafter is not None
        foresee(memory.drafter, AtPositions(sum(jump for _, jump in JUMPS), (*HISTORY, 9, *said)))
        read_with_jumps(memory)
        assert say(recorded, 40) == said
        memory.check()
        assert memory.working_set.pos[-1, 0] == memory.n_tokens - 1 + 108
        calls = recorded.calls
        own = [call for call in calls if call.logits is not None and call.outputs == "all"]
        assert len(own) < 25, "drafts were accepted"
    with stock_context(tiny_qwen35_mtp, n_rs_seq=3) as context:
        rows = replay(context, calls)
    of_reply = [i for i, call in enumerate(calls) if call.outputs == "all" or len(call.tokens) == 1]
    assert largest_difference([calls[i] for i in of_reply], [rows[i] for i in of_reply]) == 0
    # the comparison sees positions that are the indices
    for call in calls:
        call.pos[:] -= 100 * (call.pos[0] > 120 + 100)
    with stock_context(tiny_qwen35_mtp, n_rs_seq=3) as context:
        rows = replay(context, calls)
    assert largest_difference([calls[i] for i in of_reply], [rows[i] for i in of_reply]) > 0.01


class AtPositions(list[int]):
    """Tokens that are asked for by their position."""

    def __init__(self, ahead: int, tokens: tuple[int, ...]) -> None:
        super().__init__([*[0] * ahead, *tokens])


def test_blocks_and_checkpoints_come_back_at_their_positions(tiny_qwen35_mtp: Path) -> None:
    with record(tiny_qwen35_mtp, **EXACT, budget_tokens=256) as recorded:
        memory = recorded.memory
        read_with_jumps(memory)
        working_set = memory.working_set
        pos = working_set.pos.copy()
        blocks = [working_set.read(block) for block in working_set.resident().tolist()[:-1]]
        seen = (0, 3, 5, 7)
        before = what_follows(memory, seen)
        recorded.session.apply([1, 2, 4, 6, 7])
        recorded.session.apply(range(8))
        np.testing.assert_array_equal(working_set.pos, pos)
        assert [working_set.read(block) for block in range(len(blocks))] == blocks
        for one, other in zip(before, what_follows(memory, seen), strict=True):
            np.testing.assert_array_equal(one, other)
        memory.check()
        # back to the second piece, and forth again
        recorded.session.truncate(130)
        assert memory.n_tokens == 120 and memory.port.recurrent_pos == 126
        memory.decode(np.array([5, 6], np.int32))
        np.testing.assert_array_equal(working_set.pos[-2:, 0], [127, 128])
        memory.check()


def what_follows(memory: TieredMemory, seen: tuple[int, ...]) -> list[NDArray[Any]]:
    """With these blocks in sight: what the head proposes behind a token, and the token's logits."""
    memory.working_set.apply(np.array(seen, np.int32))
    start = memory.n_tokens
    assert memory.drafter is not None
    hidden = memory.drafter.hidden.copy()
    cells = memory.working_set.prepare(4, reply=True)
    pos = positions_behind(memory.working_set.pos, 4)
    first = np.ascontiguousarray(pos[:, 0])
    token = np.array([9], np.int32)
    drafts = memory.drafter.propose(cells, token, first, 3).copy()
    memory.working_set.rollback()
    memory.decode(token, reply=True)
    logits = memory.context.logits()
    memory.truncate(start)
    assert memory.n_tokens == start
    np.testing.assert_array_equal(memory.drafter.hidden, hidden)
    return [drafts, logits]


class OnePosition:
    """A port that has the position of the last token for that of any state, as within an image."""

    def __init__(self, memory: TieredMemory) -> None:
        self._port, self._working_set = memory.port, memory.working_set

    def __getattr__(self, name: str) -> Any:
        if name == "recurrent_pos":
            return self._working_set.pos[-1, 0] if self._working_set.n_tokens else -1
        return getattr(self._port, name)


@pytest.mark.parametrize("is_behind", [False, True], ids=["before", "behind"])
def test_a_cancel_is_told_by_tokens_where_positions_are_one(
    is_behind: bool, tiny_qwen35: Path
) -> None:
    """Rows of an image may be cut into two batches; llama.cpp takes text at new positions alone."""
    tokens = np.array(HISTORY[:80], np.int32)
    with record(tiny_qwen35, budget_tokens=1024) as recorded:
        memory, context = recorded.memory, recorded.context
        memory.port = OnePosition(memory)  # type: ignore[assignment]
        memory.decode(tokens[:40])
        memory.save_checkpoint()
        memory.decode(tokens[40:60])
        context.stop_at, context.stop_behind = 1, is_behind
        with pytest.raises(Cancelled):
            memory.decode(tokens[60:])
        assert memory.n_tokens == context.n_seen == (40 if is_behind else 60)
        memory.check()
