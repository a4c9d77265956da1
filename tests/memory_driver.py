"""A working set on a NumPy device beside its twin, for tests that tell a story."""

from __future__ import annotations

import numpy as np
from oracles import HistoryTwin

from kvmem.kv.budget import HostBudget
from kvmem.kv.port import ArrayPort
from kvmem.kv.working_set import WorkingSet

ROW_BYTES = (3, 5)
RECORD_BYTES = 4096  # of blocks as small as these
TABLE_BYTES = 64 * 1024


class MemoryDriver:
    """Reads random tokens into a working set and knows every byte that it must hold."""

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        budget_blocks: int = 3,
        reserve_blocks: int = 2,
        slack_blocks: int = 0,
        n_records: int = 300,
        ordered: bool = False,
    ) -> None:
        n_slots = budget_blocks + reserve_blocks + slack_blocks
        self.random = np.random.default_rng(7)
        self.port = ArrayPort(n_slots, block_tokens, ROW_BYTES)
        self.budget = HostBudget(TABLE_BYTES + n_records * RECORD_BYTES)
        self.ws = WorkingSet(
            self.port,
            block_tokens=block_tokens,
            budget_blocks=budget_blocks,
            reserve_blocks=reserve_blocks,
            slack_blocks=slack_blocks,
            budget=self.budget,
            ordered=ordered,
        )
        self.twin = HistoryTwin(block_tokens, ROW_BYTES)

    def decode(
        self, n_tokens: int, *, n_accepted: int | None = None, reply: bool = False
    ) -> list[int]:
        """One decode call whose first n_accepted tokens stay; returns the cells of all."""
        cells: list[int] = self.ws.prepare(n_tokens, reply=reply).tolist()
        tokens = self.random.integers(0, 1000, n_tokens, dtype=np.int32)
        pos = self.random.integers(0, 1000, (n_tokens, 4), dtype=np.int32)
        rows = self.random.integers(0, 256, (n_tokens, sum(ROW_BYTES)), dtype=np.uint8)
        self.port.decode(tokens, pos, rows)
        n = n_tokens if n_accepted is None else n_accepted
        self.ws.commit(tokens[:n], pos[:n])
        self.twin.append(tokens[:n].tolist(), pos[:n], rows[:n])
        return cells

    def read(self, n_tokens: int) -> None:
        """Prefill token by token; when the budget is full, all but the newest block leave."""
        for _ in range(n_tokens):
            if not self.ws.room():
                self.ws.evict(self.ws.resident().tolist()[:-1])
            self.decode(1)
        self.check()

    def check(self) -> None:
        """Every invariant holds and every byte is right, on the device and on the host."""
        self.ws.check()
        self.check_bytes()

    def check_bytes(self) -> None:
        """The second half of that, where there are other histories."""
        assert self.ws.tokens.tolist() == self.twin.tokens
        for block in range(self.twin.n_blocks):
            assert self.ws.read(block) == self.twin.block_bytes(block), f"block {block}"
        for block in self.ws.resident().tolist():
            for i, index in enumerate(self.twin.span(block)):
                cell = self.ws.slot_of(block) * self.twin.block_tokens + i
                assert self.port.rows(cell).tobytes() == self.twin.rows[index], f"cell {cell}"
