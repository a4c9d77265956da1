"""Slow, plain twins of what kv does with C loops. They import nothing of what they judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def select_twin(
    scores: Sequence[float],
    n_blocks: int,
    budget_blocks: int,
    pins: Iterable[int],
    sink_blocks: int,
    recent_blocks: int,
    edge: NDArray[np.float32] | None = None,
    edge_threshold: float = float("inf"),
) -> list[int] | None:
    """The selection, or None where what must stay is more than the budget."""
    must = set(pins) | ({n_blocks - 1} if n_blocks else set())
    if len(must) > budget_blocks:
        return None
    line = list(must)
    line += range(min(sink_blocks, n_blocks))
    line += [n_blocks - 1 - i for i in range(min(recent_blocks, n_blocks))]
    for block in sorted(range(n_blocks), key=lambda b: (-scores[b], -b)):
        line.append(block)
        if edge is None:
            continue
        if block > 0 and edge[block - 1, 1] >= edge_threshold:
            line.append(block - 1)
        if block + 1 < n_blocks and edge[block + 1, 0] >= edge_threshold:
            line.append(block + 1)
    return sorted(list(dict.fromkeys(line))[:budget_blocks])


def run_placement(
    held: dict[int, int],
    leaving: Iterable[int],
    moves: Iterable[Sequence[int]],
    incoming: Iterable[Sequence[int]],
) -> dict[int, int]:
    """Carry out a placement on a dict of block to slot, refusing what a device would refuse."""
    held = dict(held)
    for block in leaving:
        del held[block]
    for block, source, target in moves:
        assert held[block] == source, f"block {block} is in {held[block]}, not {source}"
        assert target not in held.values(), f"slot {target} is used"
        held[block] = target
    for block, slot in incoming:
        assert block not in held, f"block {block} is resident"
        assert slot not in held.values(), f"slot {slot} is used"
        held[block] = slot
    return held


def place_twin(blocks: Sequence[int], held: dict[int, int], n_slots: int) -> dict[int, int]:
    """Slots without compaction: who stays keeps the slot, the others take the lowest free ones."""
    slots = {block: held[block] for block in blocks if block in held}
    free = [slot for slot in range(n_slots) if slot not in slots.values()]
    for block in blocks:
        if block not in slots:
            slots[block] = free.pop(0)
    return slots


@dataclass
class HistoryTwin:
    """A history as lists: every token with its position and its rows."""

    block_tokens: int
    row_bytes: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    pos: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    @property
    def n_blocks(self) -> int:
        return -(-len(self.tokens) // self.block_tokens)

    def span(self, block: int) -> range:
        """Token indices of the block."""
        start = block * self.block_tokens
        return range(start, min(start + self.block_tokens, len(self.tokens)))

    def is_complete(self, block: int) -> bool:
        return len(self.span(block)) == self.block_tokens

    def block_bytes(self, block: int) -> bytes:
        """Tensor after tensor, the rows of the block's tokens."""
        pieces, offset = [], 0
        for n_bytes in self.row_bytes:
            pieces += [self.rows[index][offset : offset + n_bytes] for index in self.span(block)]
            offset += n_bytes
        return b"".join(pieces)

    def append(
        self, tokens: Sequence[int], pos: NDArray[np.int32], rows: NDArray[np.uint8]
    ) -> None:
        self.tokens += [int(token) for token in tokens]
        self.pos += [tuple(int(p) for p in one) for one in pos]
        self.rows += [one.tobytes() for one in rows]

    def cut(self, n_tokens: int) -> None:
        del self.tokens[n_tokens:], self.pos[n_tokens:], self.rows[n_tokens:]
