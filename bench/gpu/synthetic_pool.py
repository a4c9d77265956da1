"""A working set over a context, filled with a far history that was never computed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.prompt import text_positions
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama import runtime
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

BLOCK = 128
BUDGET_BLOCKS, RESERVE_BLOCKS = 288, 128  # 36,864 and 16,384 tokens
REST_TOKENS = 4096  # of the workspace, behind the far history
HOST_LIMIT = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """far_tokens: of the history in `depth`, and at most in the others."""

    far_tokens: int = 258_048
    threads: int = 4


class Pool:
    """A context with a working set over it, and helpers to fill it without computing."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        *,
        budget: int | None = None,
        reserve: int | None = None,
        kv: str = "q8_0",
        n_rs_seq: int = 0,
        transfer: str | None = None,
        ubatch: int = 512,
    ) -> None:
        budget, reserve = budget or BUDGET_BLOCKS, reserve or RESERVE_BLOCKS
        self.settings = settings
        self.context = Context(
            model,
            n_ctx=settings.far_tokens + 2 * REST_TOKENS,
            n_cells=(budget + reserve) * BLOCK,
            block_tokens=BLOCK,
            n_batch=2048,
            n_ubatch=ubatch,
            type_k=kv,
            type_v=kv,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            n_rs_seq=n_rs_seq,
        )
        self.port = LlamaPort(self.context)
        if transfer:
            self.port.use_transfer(transfer)
        self.budget = HostBudget(HOST_LIMIT)
        self.ws = WorkingSet(
            self.port,
            block_tokens=BLOCK,
            budget_blocks=budget,
            reserve_blocks=reserve,
            slack_blocks=0,
            budget=self.budget,
        )
        self.rng = np.random.default_rng(3)

    def fake(self, n_tokens: int) -> None:
        """Append tokens that were never computed; blocks that fill are stored, old ones leave."""
        while n_tokens > 0:
            n = min(n_tokens, 64 * BLOCK)
            if self.ws.room() < n:
                self.ws.seal()
                self.ws.apply(self.ws.resident()[-1:])
            self._append(n)
            n_tokens -= n
        self.ws.seal()

    def append(self, n_blocks: int) -> None:
        """Blocks that were never computed, into the room that there is."""
        self._append(n_blocks * BLOCK)

    def _append(self, n_tokens: int) -> None:
        start = self.ws.n_tokens
        self.ws.prepare(n_tokens)
        self.ws.commit(np.ones(n_tokens, np.int32), text_positions(start, start + n_tokens))

    def decode(self, n: int, *, reply: bool = True, outputs: Any = "last") -> None:
        self.ws.prepare(n, reply=reply)
        start = self.ws.n_tokens
        tokens = self.rng.integers(0, min(1000, self.context.n_vocab), n).astype(np.int32)
        pos = text_positions(start, start + n)
        self.context.decode(tokens, np.ascontiguousarray(pos[:, 0]), outputs=outputs)
        self.ws.commit(tokens, pos)

    def random_selection(self, n_blocks: int) -> NDArray[np.int32]:
        """n_blocks of the history with the newest among them, ascending."""
        newest = self.ws.n_blocks - 1
        chosen = self.rng.choice(newest, n_blocks - 1, replace=False)
        return np.sort(np.append(chosen, newest)).astype(np.int32)

    def far(self, n_tokens: int | None = None, *, window: int | None = None) -> None:
        """A history of n_tokens; the budget (or `window` blocks) of it is visible."""
        n_tokens = n_tokens or self.settings.far_tokens
        self.fake(n_tokens - BLOCK)
        self.ws.apply(self.ws.resident()[-1:])
        self.decode(BLOCK, reply=False)
        self.ws.seal()
        self.ws.apply(
            self.ws.resident()[-1:]
        )  # what was faked is not visible until it comes back from the host
        self.ws.apply(self.random_selection(window or BUDGET_BLOCKS))

    def close(self) -> None:
        del self.ws
        self.context.close()


@contextmanager
def pool(model: Model, settings: Settings, **kwargs: Any) -> Iterator[Pool]:
    made = Pool(model, settings, **kwargs)
    try:
        yield made
    finally:
        made.close()


def steps_per_s(p: Pool, n_rows: int = 1, n_steps: int = 24, repeats: int = 5) -> list[float]:
    """Rows per second of decode steps of n_rows tokens, one value a repeat, after a warm-up."""
    for _ in range(6):
        p.decode(n_rows, outputs="all")
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(n_steps):
            p.decode(n_rows, outputs="all")
        rates.append(n_rows * n_steps / (time.perf_counter() - started))
    return rates


def free_bytes() -> int:
    return sum(gpu.free_bytes for gpu in runtime.gpus())
