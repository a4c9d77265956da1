"""What a pool takes beside its cells, where no machine of the tests has the room to try it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engines import make_config

from kvmem.cli.plan import make_plan
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import facts
from kvmem.engine.facts import _Measure
from kvmem.engine.fit import _smaller
from kvmem.llama.context import Share
from kvmem.sizes import DeviceMemory, MemoryFacts, PoolSizes, resolve

MIB = 1 << 20
GIB = 1 << 30
HOST = (64 * GIB, 64 * GIB)


@dataclass
class Weights:
    """All that is asked of a model here."""

    n_ctx_train: int
    is_dry: bool = False


def devices_of(
    memory: MemoryConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    row: int = 1024,
    compute: Callable[[int], int] = lambda _: 100 * MIB,
) -> tuple[DeviceMemory, ...]:
    """Of a GPU whose graphs over so many cells take what `compute` says."""

    def shares_of(_: object, *, n_cells: int, **__: object) -> list[Share]:
        assert n_cells <= facts.MOST_TOKENS
        return [Share("CUDA0", free, 2 * free, 0, n_cells * row, 0, compute(n_cells))]

    monkeypatch.setattr(facts, "shares_of", shares_of)
    config = EngineConfig(model=ModelConfig(path=Path("m.gguf")), memory=memory)
    model: Any = Weights(n_ctx_train=32768)
    return _Measure(model, config, *HOST).devices()


def linear(n_cells: int) -> int:
    return 100 * MIB + 2048 * n_cells


def late(n_cells: int) -> int:
    """The graphs of the cells are the largest from 845,000 on."""
    return max(300 * MIB, 4096 * n_cells - 3000 * MIB)


@pytest.mark.parametrize("compute", [linear, late])
@pytest.mark.parametrize("budget", [None, 1 << 22])
@pytest.mark.parametrize("free", [5 * GIB, 14 * GIB, 80 * GIB])
def test_graphs_grow_beyond_the_largest_pool_that_is_measured(
    free: int,
    budget: int | None,
    compute: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryConfig(workspace_tokens=1 << 22, budget_tokens=budget)
    (device,) = devices_of(memory, monkeypatch, free=free, compute=compute)
    fits = device.most_tokens(keep_bytes=device.headroom_bytes)
    for n_tokens in (128, 1 << 20, 3 << 19, 1 << 21, 3 << 20, 1 << 22):
        assert device.compute_bytes_of(n_tokens) >= compute(n_tokens) or n_tokens * 1024 > free
    assert fits * 1024 + compute(fits) <= free - device.headroom_bytes
    if free == 80 * GIB:
        assert device.compute_bytes_of(1 << 22) == compute(1 << 22)


def test_a_pool_within_what_is_measured_is_told_by_its_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryConfig(workspace_tokens=65536)
    (device,) = devices_of(memory, monkeypatch, free=80 * GIB, compute=linear)
    largest = 65536 + 128
    assert (device.compute_tokens, device.compute_bytes) == (largest, linear(largest))


@pytest.mark.parametrize(
    ("block", "row", "tokens", "staging"),
    [
        (128, 1024, 65536, 2 * 64 * MIB),  # two of many blocks each
        (32, 64, 4096, 2 * (4096 + 32) * 64),  # the whole pool
        (1024, 320 << 10, 65536, 2 * 320 * MIB),  # two of a block each
    ],
)
def test_a_buffer_for_copies_holds_a_block_at_least(
    block: int, row: int, tokens: int, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryConfig(workspace_tokens=tokens, block_tokens=block)
    (device,) = devices_of(memory, monkeypatch, free=80 * GIB, row=row)
    assert device.staging_bytes == staging


@pytest.mark.parametrize("use_mmap", [True, False])
def test_weights_that_are_not_mapped_are_taken_off_the_host_store(
    use_mmap: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_host_memory", lambda: (GIB, 2 * GIB))
    config = make_config(tiny_llama, host_limit_bytes=None)
    plan = make_plan(replace(config, model=replace(config.model, use_mmap=use_mmap)))
    (host,) = plan.facts.devices
    assert host.weight_bytes > 0
    taken = 0 if use_mmap else host.weight_bytes
    assert host.free_bytes == plan.facts.free_host_bytes == GIB - taken
    beside = host.bytes_of(plan.sizes.pool_tokens)
    assert plan.sizes.host_limit_bytes == (GIB - taken - beside) // 2


@pytest.mark.parametrize("n_blocks", [3, 8, 20, 512, 600])
def test_a_pool_that_does_not_fit_shrinks_to_the_least(n_blocks: int) -> None:
    """A sink, a block to look back at, and one of reserve."""
    config = EngineConfig(
        model=ModelConfig(path=Path("m.gguf")), memory=MemoryConfig(workspace_tokens=1 << 20)
    )
    free = 2 * n_blocks * 128 * 1024
    host = DeviceMemory(name="", free_bytes=free, total_bytes=free, kv_bytes_per_token=1024)
    found = MemoryFacts(
        trained_tokens=1 << 20,
        kv_bytes_per_token=1024,
        host_bytes_per_token=1100,
        devices=(host,),
        free_host_bytes=GIB,
        host_bytes=GIB,
    )
    sizes: PoolSizes | None = resolve(config.memory, found)
    tried: list[int] = []
    while sizes is not None:
        assert not tried or tried[-1] * 7 // 8 == sizes.n_slots < tried[-1]
        tried.append(sizes.n_slots)
        sizes = _smaller(config, found, sizes)
    assert (tried[0], tried[-1]) == (n_blocks, 3)
