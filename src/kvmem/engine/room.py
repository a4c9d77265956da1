"""Room for what is to come: which blocks leave the device for it, and what leaves the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvmem.errors import HostCapacityError

if TYPE_CHECKING:
    from kvmem.engine.memory import TieredMemory

__all__ = ["make_reply_room", "make_room", "room_beside_reply", "with_room"]

T = TypeVar("T")


def with_room(memory: "TieredMemory", action: Callable[[], T]) -> T:
    """Do this; where the host limit forbids it, let others go one by one: first what nobody
    needs, then conversations that were not used for long, then checkpoints, which save time
    where the rest cannot be had again.
    """
    may_trim = True
    while True:
        try:
            return action()
        except HostCapacityError:
            if may_trim:  # once: what fails halfway may leave an empty slab each time
                may_trim = False
                if memory.working_set.trim():
                    continue
            if memory.checkpoints.give_back_spare() or memory.make_room_on_host():
                continue
            if not memory.checkpoints.give_way():
                raise
            memory.note("the host limit is near: checkpoints gave way to blocks")


def room_beside_reply(memory: "TieredMemory") -> int:
    """Tokens that fit with nothing leaving and half of the reserve left to the reply."""
    half = -(-memory.sizes.n_reserve_blocks // 2) * memory.block_tokens
    ws = memory.working_set
    return max(ws.room(), ws.room(reply=True) - half)


def make_room(memory: "TieredMemory", n_tokens: int) -> None:
    """Let the oldest blocks behind the sink leave until n_tokens fit in the budget."""
    ws = memory.working_set
    if ws.room() >= n_tokens:
        return
    n_new = memory.n_blocks_of(ws.n_tokens + n_tokens) - ws.n_blocks
    n_keep = memory.budget_blocks - n_new
    resident = ws.resident()
    sink = resident[resident < memory.sizes.n_sink_blocks]
    rest = resident[resident >= memory.sizes.n_sink_blocks]
    kept = np.concatenate([sink, rest[-max(1, n_keep - len(sink)) :]])[-n_keep:]
    memory.seal()
    ws.apply(kept)


def make_reply_room(memory: "TieredMemory", reply_from_block: int) -> int:
    """Let the oldest finished blocks of the reply leave for its next token; how many left."""
    ws = memory.working_set
    if ws.room(reply=True) >= 1:
        return 0
    memory.seal()
    own = range(reply_from_block, ws.n_blocks - 1)
    # a reserve of one block holds no finished block of the reply: then the oldest of the history
    # behind the sink
    first = reply_from_block if any(ws.is_resident(b) for b in own) else memory.sizes.n_sink_blocks
    n_left = ws.make_room(1, reply_from_block=first)
    memory.restore_order()
    return n_left
