"""A history on llama.cpp's own cache that has left the device in part, for tests of its copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import devices
import numpy as np
from engines import random_tokens

from kvmem.engine.prompt import text_positions
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort, fail_cuda
from kvmem.llama.model import Model

BLOCK = 16
N_BLOCKS = 12
N_SLOTS = 7


class Story:
    """Twelve blocks, the newest open, of which a few are resident; and what each of them holds."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.port = LlamaPort(context)
        self.ws = WorkingSet(
            self.port, block_tokens=BLOCK, budget_blocks=4, reserve_blocks=2, slack_blocks=1,
            budget=HostBudget(1 << 26), ordered=True,
        )  # fmt: skip
        self.contents: list[bytes] = []
        self.has_lacked = False

    def read(self, n_tokens: int) -> None:
        start = self.ws.n_tokens
        tokens = np.array(random_tokens(n_tokens, seed=start), np.int32)
        pos = text_positions(start, start + n_tokens)
        self.ws.prepare(n_tokens)
        self.context.decode(tokens, np.ascontiguousarray(pos[:, 0]), outputs="none")
        self.ws.commit(tokens, pos)
        self.contents.append(self.ws.read(self.ws.n_blocks - 1))

    def check(self) -> None:
        self.ws.check()
        assert self.port.n_cells_used == self.ws.n_cells_used
        for block, content in enumerate(self.contents):
            assert self.ws.read(block) == content, f"block {block}"


@contextmanager
def story(
    path: Path,
    pinned_bytes: int | None = None,
    n_gpu_layers: int | None = None,
    lacking: tuple[int, int] | None = None,
) -> Iterator[Story]:
    """lacking: which call to CUDA fails while the buffers for copies are made, and how many do."""
    layers = devices.n_gpu_layers(path) if n_gpu_layers is None else n_gpu_layers
    with Model(path, n_gpu_layers=layers) as model:
        if lacking is not None:
            fail_cuda(lacking[0], count=lacking[1])
        with Context(
            model, n_ctx=1024, n_cells=N_SLOTS * BLOCK, block_tokens=BLOCK, n_batch=BLOCK,
            type_k="q8_0", type_v="q8_0",
        ) as context:  # fmt: skip
            is_waiting = fail_cuda(0)
            told = Story(context)
            told.has_lacked = lacking is not None and not is_waiting
            if pinned_bytes is not None:
                told.port.limit_pinned(pinned_bytes)
            for block in range(N_BLOCKS):
                if told.ws.room() < BLOCK:
                    told.ws.apply(told.ws.resident()[-3:])
                told.read(BLOCK if block < N_BLOCKS - 1 else 5)
            told.check()
            yield told
            del told.ws  # before the context, whose host memory it holds


CALLS: dict[str, tuple[Callable[[Story], object], int]] = {
    # blocks 9, 10 and 11 are resident, 10 without a copy: one goes out, one moves, three come in
    # 8, 9, 10 and 11 are resident, all without a copy: three go out, 11 moves, two come in
    "apply": (lambda told: told.ws.apply([1, 2, 11]), 6),
    "seal": (lambda told: told.ws.seal(), 3),
    "truncate": (lambda told: told.ws.truncate(4 * BLOCK), 1),
}
