"""What always holds between the parts of a memory, as code: for tests, between any two calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmem.engine.conversation import Conversation

if TYPE_CHECKING:
    from kvmem.engine.memory import TieredMemory

__all__ = ["check_memory"]


def check_memory(memory: "TieredMemory", parked: Sequence[Conversation]) -> None:
    """AssertionError names the first broken invariant. parked: all that are not on the device."""
    memory.index.flush()
    memory.working_set.check([one.history for one in parked])
    for one in parked:
        assert one.lexical.n_blocks == one.summaries.n_blocks <= one.history.n_blocks
        assert all(n <= one.history.n_tokens for n in one.checkpoints.positions)
        if memory.is_hybrid and one.history.n_tokens:
            assert one.checkpoints.positions[-1] == one.history.n_tokens
    assert memory.lexical.n_blocks == memory.summaries.n_blocks <= memory.working_set.n_sealed
    assert memory.summaries.pairs == memory.scoring.pairs
    assert memory.summaries.slice_tokens == memory.scoring.slice_tokens
    assert memory.port.n_cells_used == memory.working_set.n_cells_used
    assert memory.port.do_caches_agree
    assert memory.host.used <= memory.host.limit
    assert all(n <= memory.n_tokens for n in memory.checkpoints.positions)
    assert memory.is_whole or memory.working_set.n_pending
    if memory.is_hybrid and memory.is_whole and memory.n_tokens:
        assert memory.port.recurrent_pos == memory.working_set.pos[-1, 0]
