"""The bytes of a plan against those of an engine: pool, states, checkpoints, host records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
from engines import make_config, random_tokens, record

from kvmem.cli.plan import make_plan
from kvmem.engine.checkpoint import MAX_CHECKPOINTS
from kvmem.engine.engine import Engine
from kvmem.errors import HostCapacityError

DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "snapshots": {"n_drafts": 3, "mtp_state": "snapshots"},
    "replay": {"n_drafts": 3, "mtp_state": "replay"},
}
KINDS = [
    ("llama", "none"), ("qwen35_mtp", "none"), ("qwen35_mtp", "snapshots"),
    ("qwen35_mtp", "replay"), ("qwen35moe", "none"), ("qwen3next_mtp", "replay"),
]  # fmt: skip
N_TOKENS = 40 * 32


@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_the_bytes_are_those_of_an_engine(
    kind: str, drafts: str, tiny: Callable[..., Path]
) -> None:
    settings = {"workspace_tokens": 8192, **DRAFTS[drafts]}
    plan = make_plan(make_config(tiny(kind), **settings))
    with record(tiny(kind), **settings) as recorded:
        memory, facts = recorded.memory, plan.facts
        assert plan.pool_bytes == memory.device_bytes
        assert facts.state_device_bytes == memory.port.device_bytes()[1]
        recorded.session.read(random_tokens(N_TOKENS))
        memory.index.flush()
        working_set = memory.working_set
        # what lies in memory that grows by pieces is there for more tokens than these
        records = working_set.n_sealed * working_set.history.store.slabs.record_bytes
        tables = N_TOKENS * 20 + working_set.n_blocks * 8
        used = records + tables + N_TOKENS * 4 + N_TOKENS * summary_bytes(recorded.memory)
        assert used <= N_TOKENS * facts.host_bytes_per_token < used + N_TOKENS
        if not memory.is_hybrid:
            assert facts.checkpoint_bytes == plan.all_checkpoint_bytes == 0
            return
        held = memory.host.used
        for _ in range(MAX_CHECKPOINTS + 2):
            memory.save_checkpoint()
            assert memory.checkpoints.n_bytes % facts.checkpoint_bytes == 0
            assert memory.checkpoints.n_bytes <= plan.all_checkpoint_bytes
            memory.read(memory.tokens[:8])
        assert len(memory.checkpoints) == MAX_CHECKPOINTS
        assert memory.checkpoints.n_bytes == plan.all_checkpoint_bytes
        assert memory.host.used >= held + plan.all_checkpoint_bytes
        memory.check()


def summary_bytes(memory: Any) -> float:
    """Of a token: each pair has a key and a scale for each slice."""
    summaries = memory.summaries
    dims = [memory.layout.layers[pair.layer].head_dim_k for pair in summaries.pairs]
    return float(sum(dim + 2 for dim in dims) / summaries.slice_tokens)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_what_drafts_take_on_the_device_is_told_apart(
    drafts: str, tiny: Callable[..., Path]
) -> None:
    path = tiny("qwen35_mtp")
    without = make_plan(make_config(path)).facts
    facts = make_plan(make_config(path, **DRAFTS[drafts])).facts
    assert facts.state_device_bytes - facts.rollback_bytes == without.state_device_bytes
    assert (facts.rollback_bytes > 0) == (drafts != "none")
    if drafts == "snapshots":
        assert facts.rollback_bytes == 3 * without.state_device_bytes
        # of the states beside the newest none is saved
        assert facts.checkpoint_bytes == without.checkpoint_bytes + 4 * 128
    if drafts == "replay":
        assert facts.checkpoint_bytes > without.checkpoint_bytes + 4 * 128


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_largest_history_is_what_the_host_limit_holds(
    drafts: str, tiny: Callable[..., Path]
) -> None:
    """Read until no more fits: blocks on the device need no copy, and no piece is full."""
    path = tiny("qwen35_mtp")
    settings = {"workspace_tokens": 1 << 17, "host_limit_bytes": 8 << 20, **DRAFTS[drafts]}
    plan = make_plan(make_config(path, **settings))
    with record(path, **settings) as recorded:
        memory = recorded.memory
        with pytest.raises(HostCapacityError):
            for seed in range(1 << 17):
                recorded.session.read(random_tokens(512, seed))
                recorded.calls.clear()
        assert memory.host.used <= memory.host.limit
        found = memory.n_tokens / plan.n_history_tokens
        assert 0.85 < found < 1.02
        memory.check()


@pytest.mark.part
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kind", "drafts"), [("llama_64", "none"), ("qwen35_64", "none"), ("qwen35_mtp", "snapshots")]
)
@pytest.mark.parametrize("sizes", [{}, {"budget_tokens": None, "reserve_tokens": None}])
def test_a_plan_counts_on_each_device_what_a_start_takes(
    kind: str, drafts: str, sizes: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    """Without the weights: of those that would be on a GPU, it takes off what would be there."""
    config = make_config(tiny(kind), **DRAFTS[drafts], **sizes)
    plan = make_plan(config)
    with Engine(config) as engine:
        assert plan.sizes.pool_tokens == engine.sizes.pool_tokens
        shares = {share.device: share for share in engine.tiered.context.shares()}
        for device in plan.facts.devices:
            share = shares.pop(device.name)
            n_tokens = engine.sizes.pool_tokens
            if share.device or devices.current().name != "part":
                assert device.weight_bytes == share.weights
            else:  # mapped with what lies between: tests/llama/test_shares.py
                assert device.weight_bytes < share.weights < config.model.path.stat().st_size
            # CUDA fills up the last row of a quantised tensor; a plan spreads that over the tokens
            assert 0 <= device.kv_bytes_per_token * n_tokens - share.cells < n_tokens
            assert share.device or device.kv_bytes_per_token * n_tokens == share.cells
            assert device.state_bytes == share.states
            assert device.compute_bytes_of(n_tokens) == share.compute
            if share.device:
                in_use = share.total - share.free
                assert device.free_bytes < share.total - share.weights
                assert in_use > share.weights + share.cells + share.states + share.compute
        assert not shares
