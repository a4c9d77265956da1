"""A block's bytes survive every trip between device and host, in whatever slot it lands."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import devices
import numpy as np
import pytest
from engines import random_tokens

from kvmem.engine.prompt import text_positions
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

pytestmark = pytest.mark.usefixtures("device")

BLOCK = 16
N_SLOTS = 6
N_BLOCKS = 20

KV_TYPES = [
    ("f32", "f32"),
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
    ("q4_0", "q5_0"),
]


@contextmanager
def filled(
    path: Path, types: tuple[str, str], ordered: bool
) -> Iterator[tuple[WorkingSet, list[bytes]]]:
    """N_BLOCKS of history, the newest open, and the bytes that each block had when it was full."""
    with (
        Model(path, n_gpu_layers=devices.n_gpu_layers(path)) as model,
        Context(
            model, n_ctx=1024, n_cells=N_SLOTS * BLOCK, block_tokens=BLOCK, n_batch=BLOCK,
            type_k=types[0], type_v=types[1],
        ) as context,
    ):  # fmt: skip
        working_set = WorkingSet(
            LlamaPort(context), block_tokens=BLOCK, budget_blocks=4, reserve_blocks=1,
            slack_blocks=1, budget=HostBudget(1 << 26), ordered=ordered,
        )  # fmt: skip
        contents = []
        for block in range(N_BLOCKS):
            n_tokens = BLOCK if block < N_BLOCKS - 1 else 5
            if working_set.room() < n_tokens:
                working_set.apply(working_set.resident()[-3:])
            tokens = np.array(random_tokens(n_tokens, seed=block), np.int32)
            pos = text_positions(block * BLOCK, block * BLOCK + n_tokens)
            working_set.prepare(n_tokens)
            context.decode(tokens, np.ascontiguousarray(pos[:, 0]), outputs="none")
            working_set.commit(tokens, pos)
            contents.append(working_set.read(block))
        working_set.seal()
        yield working_set, contents
        del working_set  # before the context, whose host memory it holds


@pytest.mark.part(kind=["qwen3_64", "qwen35"], types=[("q8_0", "q8_0")])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "lowest-slot"])
@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("kind", ["llama", "qwen3_64", "qwen35"])
def test_bytes_come_back_the_same_in_any_slot(
    kind: str, types: tuple[str, str], ordered: bool, tiny: Callable[..., Path]
) -> None:
    rng = np.random.default_rng(7)
    places: dict[int, set[int]] = {}
    with filled(tiny(kind), types, ordered) as (working_set, contents):
        assert len(set(contents)) == N_BLOCKS
        row_bytes = working_set.payload_bytes // BLOCK
        assert {len(content) for content in contents} == {BLOCK * row_bytes, 5 * row_bytes}
        for _ in range(60):
            n_others = int(rng.integers(0, 5))
            others = rng.choice(N_BLOCKS - 1, n_others, replace=False).tolist()
            before = set(working_set.resident().tolist())
            wanted = {*others, N_BLOCKS - 1}
            transfer = working_set.apply(sorted(wanted))
            assert (transfer.n_in, transfer.n_out) == (len(wanted - before), len(before - wanted))
            assert transfer.bytes_in == transfer.n_in * working_set.payload_bytes
            assert transfer.bytes_out == 0  # all were stored already
            working_set.check()
            for block in wanted:
                assert working_set.read(block) == contents[block]
                places.setdefault(block, set()).add(working_set.slot_of(block))
    assert len(places) == N_BLOCKS
    assert max(len(slots) for slots in places.values()) >= 3


def test_a_damaged_record_is_seen(tiny_llama: Path) -> None:
    with filled(tiny_llama, ("q8_0", "q8_0"), False) as (working_set, contents):
        assert not working_set.is_resident(4)
        address = working_set.record_address(4)
        byte = ctypes.c_ubyte.from_address(address + working_set.payload_bytes // 2)
        byte.value ^= 1
        working_set.apply([4, N_BLOCKS - 1])
        assert working_set.read(4) != contents[4]
        byte.value ^= 1
        working_set.apply([N_BLOCKS - 1])
        working_set.apply([4, N_BLOCKS - 1])
        assert working_set.read(4) == contents[4]


def test_a_kept_block_keeps_its_slot(tiny_llama: Path) -> None:
    rng = np.random.default_rng(3)
    with filled(tiny_llama, ("f16", "f16"), False) as (working_set, _):
        n_moved = 0
        for _ in range(80):
            others = rng.choice(N_BLOCKS - 1, int(rng.integers(0, 5)), replace=False).tolist()
            wanted = sorted({*others, N_BLOCKS - 1})
            slots = {int(b): working_set.slot_of(int(b)) for b in working_set.resident()}
            transfer = working_set.apply(wanted)
            changed = [b for b in wanted if b in slots and working_set.slot_of(b) != slots[b]]
            assert len(changed) == transfer.n_moved  # only a counted compaction moves a block
            assert all(working_set.slot_of(b) < slots[b] for b in changed)
            n_moved += transfer.n_moved
            again = working_set.apply(wanted)
            assert (again.n_in, again.n_out, again.n_moved) == (0, 0, 0)
        assert working_set.counters.blocks_moved == n_moved > 0
