"""Rolling a recurrent state back by recorded inputs gives the states that snapshots give.

Bit by bit on the CPU: the delta net runs over one token after the other, and a token with g = 0 and
beta = 0 leaves the state as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ask, make_config, random_tokens, record
from numpy.typing import NDArray

from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import text_positions
from kvmem.errors import ConfigError, ModelError, StateError
from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.state import roll_back_state

I32 = NDArray[np.int32]

SIZES: dict[str, Any] = {"budget_tokens": 512, "type_k": "f16", "type_v": "f16", "n_drafts": 3}


def decode(memory: TieredMemory, tokens: I32, n_rejected: int) -> NDArray[np.float32]:
    """Append a batch save its last tokens; the logits of all."""
    working_set = memory.working_set
    start = working_set.n_tokens
    pos = text_positions(start, start + len(tokens))
    cells = working_set.prepare(len(tokens), reply=True)
    first_pos = np.ascontiguousarray(pos[:, 0])
    memory.context.decode(tokens, first_pos, outputs="all")
    n_kept = len(tokens) - n_rejected
    roll_back_state(memory.context, n_rejected)
    assert memory.drafter is not None
    memory.drafter.follow(cells[:n_kept], tokens[:n_kept], first_pos[:n_kept])
    working_set.commit(tokens[:n_kept], pos[:n_kept])
    return np.stack([memory.context.logits(i) for i in range(len(tokens))])


class Pair:
    """The same history by snapshots and by replay; `check` compares what comes out of both."""

    def __init__(self, *engines: Engine) -> None:
        self.memories: list[TieredMemory] = [engine.tiered for engine in engines]

    @property
    def n_tokens(self) -> int:
        return self.memories[0].n_tokens

    def step(self, tokens: I32, n_rejected: int) -> None:
        rows = [decode(memory, tokens, n_rejected) for memory in self.memories]
        np.testing.assert_array_equal(rows[0], rows[1])

    def save(self) -> None:
        for memory in self.memories:
            memory.save_checkpoint()

    def truncate(self, n_tokens: int) -> None:
        for memory in self.memories:
            memory.truncate(n_tokens)


@pytest.mark.parametrize(
    ("kind", "n_max"), [("qwen35_mtp", 3), ("qwen35_mtp", 5), ("qwen3next_mtp", 3)]
)
def test_1000_random_steps_equal_those_of_snapshots(
    kind: str, n_max: int, tiny: Callable[..., Path]
) -> None:
    rng = np.random.default_rng(n_max)
    settings = {**SIZES, "n_drafts": n_max}
    with (
        Engine(make_config(tiny(kind), **settings)) as one,
        Engine(make_config(tiny(kind), **settings, mtp_state="replay")) as other,
    ):
        pair = Pair(one, other)
        for _ in range(1000):
            kind_of_step = rng.random()
            if pair.n_tokens > 400:
                pair.truncate(int(rng.integers(0, 300)))
            if kind_of_step < 0.04:  # a chunk of a prompt: nothing of it is rolled back
                pair.step(rng.integers(0, 250, int(rng.integers(n_max + 2, 40)), np.int32), 0)
            elif kind_of_step < 0.08:
                pair.save()
            elif kind_of_step < 0.11 and pair.n_tokens:
                pair.truncate(int(rng.integers(pair.n_tokens)))
            else:
                n = int(rng.integers(1, n_max + 2))
                pair.step(rng.integers(0, 250, n, np.int32), int(rng.integers(n)))


def test_another_token_is_seen(tiny_qwen35_mtp: Path) -> None:
    """The comparison can fail: one side accepts another token before the rejected one."""
    with (
        Engine(make_config(tiny_qwen35_mtp, **SIZES)) as one,
        Engine(make_config(tiny_qwen35_mtp, **SIZES, mtp_state="replay")) as other,
    ):
        pair = Pair(one, other)
        pair.step(np.arange(20, dtype=np.int32), 0)
        for memory, accepted in zip(pair.memories, (2, 9), strict=True):
            decode(memory, np.array([1, accepted, 3], np.int32), 1)
        with pytest.raises(AssertionError):
            pair.step(np.array([4], np.int32), 0)


@pytest.mark.parametrize(("n_read", "n_back"), [(40, 1), (3, 3)])
def test_only_a_small_batch_can_be_rolled_back(
    n_read: int, n_back: int, tiny_qwen35_mtp: Path
) -> None:
    """What a prompt's chunk has committed stays, and so does the first token of a batch."""
    with Engine(make_config(tiny_qwen35_mtp, **SIZES, mtp_state="replay")) as engine:
        memory = engine.tiered
        memory.read(np.arange(20, dtype=np.int32))
        memory.read(np.arange(n_read, dtype=np.int32))
        with pytest.raises(StateError, match="no snapshot that far back"):
            roll_back_state(memory.context, n_back)


def test_it_takes_one_state_and_some_rows(tiny_qwen35_mtp: Path) -> None:
    n_bytes = {}
    for state in ("snapshots", "replay"):
        with record(tiny_qwen35_mtp, **SIZES, mtp_state=state) as recorded:
            n_bytes[state] = recorded.memory.port.device_bytes()[1]
            facts = recorded.engine.facts
            assert facts.state_device_bytes == n_bytes[state]
            ask(recorded.session, random_tokens(50))
            checkpoints = recorded.memory.checkpoints
            assert checkpoints.n_bytes == len(checkpoints) * facts.checkpoint_bytes > 0
    # two layers with a state of 4 heads of 32 x 32 and 3 columns of 256 channels
    state_row, conv_row = 4 * 32 * 32 * 4, 3 * 256 * 4
    assert n_bytes["snapshots"] == 2 * 4 * (state_row + conv_row)
    records = -(-4 * (4 * 32 + 4 * 32 + 2 * 4) // (3 * 256))
    assert n_bytes["replay"] == 2 * (state_row + (4 + records) * conv_row)


@pytest.mark.parametrize(("n_rs_seq", "n_seq_max"), [(0, 1), (2, 2)])
def test_it_is_for_one_sequence_that_is_rolled_back(
    n_rs_seq: int, n_seq_max: int, tiny_qwen35_mtp: Path
) -> None:
    with (
        Model(tiny_qwen35_mtp) as model,
        pytest.raises(ConfigError, match="one sequence, or off"),
    ):
        Context(
            model, n_ctx=64, n_cells=64, block_tokens=16,
            replay=True, n_rs_seq=n_rs_seq, n_seq_max=n_seq_max,
        )  # fmt: skip


def test_other_architectures_say_so(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model, pytest.raises(ModelError, match="qwen35 and qwen3next alone"):
        Context(model, n_ctx=64, n_cells=64, block_tokens=16, replay=True, n_rs_seq=2)
