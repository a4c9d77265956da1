"""Settings: each rule names setting, value and itself; sizes follow from model and machine."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmem.config import MemoryConfig, ModelConfig, ServerConfig
from kvmem.errors import ConfigError
from kvmem.sizes import DeviceMemory, MemoryFacts, PoolSizes, resolve

GIB = 1 << 30
MIB = 1 << 20
HOST = DeviceMemory(name="", free_bytes=8 * GIB, total_bytes=16 * GIB, kv_bytes_per_token=1024)
FACTS = MemoryFacts(
    trained_tokens=8192,
    kv_bytes_per_token=1024,
    host_bytes_per_token=1100,
    devices=(HOST,),
    free_host_bytes=8 * GIB,
    host_bytes=16 * GIB,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"budget_tokens": 100},
            "budget_tokens is 100, but must be at least two blocks (block_tokens=128), of which "
            "the sink is one",
        ),
        (
            {"reserve_tokens": 0},
            "reserve_tokens is 0, but must be at least one block (block_tokens=128)",
        ),
        (
            {"budget_tokens": 512, "sink_tokens": 512},
            "sink_tokens is 512, but must be below budget_tokens=512 "
            "(the sink is at least one block)",
        ),
        (
            {"budget_tokens": 512, "sink_tokens": 600},
            "sink_tokens is 600, but must be below budget_tokens=512 "
            "(the sink is at least one block)",
        ),
        (
            {"budget_tokens": 128},
            "budget_tokens is 128, but must be at least two blocks (block_tokens=128), of which "
            "the sink is one",
        ),
        (
            {"budget_tokens": 512, "recent_tokens": 384},
            "recent_tokens is 384, but must be below budget_tokens=512 less the sink of 128",
        ),
        ({"block_tokens": 20}, "block_tokens is 20, but must be a multiple of 8 from 8 to 1024"),
        ({"workspace_tokens": 0}, "workspace_tokens is 0, but must be at least 1"),
        ({"host_limit_bytes": 0}, "host_limit_bytes is 0, but must be at least 1"),
        (
            {"type_k": "f16"},
            "type_v is q8_0, but must be as type_k=f16, where one of them is a float",
        ),
        ({"flash_attn": "off"}, "flash_attn is off, but must be on or auto with type_v=q8_0"),
        (
            {"ubatch_tokens": 1024},
            "ubatch_tokens is 1024, but must be at most batch_tokens=512",
        ),
        (
            {"scorer": "best"},
            "scorer is best, but must be one of fused, heads, lexical, mass, cosine, recency",
        ),
    ],
)
def test_a_broken_rule_names_itself(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(**fields)
    assert str(caught.value) == message


def test_rules_of_the_blocks_do_not_bind_without_the_memory() -> None:
    assert MemoryConfig(enabled=False, budget_tokens=1).enabled is False


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_an_unknown_type_is_refused_with_and_without_the_memory(name: str, enabled: bool) -> None:
    fields: dict[str, Any] = {name: "bogus"}
    rule = f"{name} is bogus, but must be one of f32, f16, q8_0, q5_0, q4_0"
    with pytest.raises(ConfigError, match=rule):
        MemoryConfig(enabled=enabled, **fields)
    assert MemoryConfig(enabled=False, type_k="q8_0", type_v="f16").type_v == "f16"


def test_a_budget_between_two_blocks_is_floored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = MemoryConfig(budget_tokens=500, block_tokens=32)
    assert config.budget_tokens == 480
    assert caplog.messages == ["budget_tokens=500 is no multiple of block_tokens=32; using 480"]


def sizes(facts: MemoryFacts = FACTS, **fields: Any) -> PoolSizes:
    return resolve(MemoryConfig(**fields), facts)


def test_everything_is_visible_where_it_fits() -> None:
    pool = sizes()
    assert (pool.workspace_tokens, pool.budget_tokens, pool.reserve_tokens) == (8192, 8192, 128)
    assert pool.sources["budget_tokens"] == "auto: the whole workspace fits"


def test_a_tiny_workspace_still_has_room_beside_the_sink() -> None:
    assert sizes(workspace_tokens=64).n_budget_blocks == 3


def test_a_small_device_gets_half_of_what_is_free() -> None:
    pool = sizes(replace(FACTS, devices=(replace(HOST, free_bytes=4 << 20),)))
    assert pool.pool_tokens == 2048
    assert pool.reserve_tokens == 512  # a quarter


def test_a_reserve_that_leaves_no_budget_is_what_is_named() -> None:
    small = replace(FACTS, devices=(replace(HOST, free_bytes=4 << 20),))
    rule = "reserve_tokens is 2048, but must be at most 1792: a pool of 2048 fits, and a budget "
    with pytest.raises(ConfigError, match=f"^{rule}needs two blocks of it$"):
        sizes(small, reserve_tokens=2048)
    assert sizes(small, reserve_tokens=1792).n_budget_blocks == 2


@pytest.mark.parametrize(("budget", "reserve"), [(512, 160), (4096, 1344), (131072, 16384)])
def test_the_reserve_is_a_quarter_of_the_pool_up_to_16384(budget: int, reserve: int) -> None:
    pool = sizes(budget_tokens=budget, block_tokens=32, workspace_tokens=262144)
    assert pool.reserve_tokens == reserve


def test_the_pool_does_not_depend_on_the_workspace() -> None:
    pools = {
        sizes(budget_tokens=512, block_tokens=32, workspace_tokens=tokens).pool_tokens
        for tokens in (2048, 65536)
    }
    assert len(pools) == 1


def test_recent_gives_way_in_a_small_budget() -> None:
    assert sizes(budget_tokens=96, block_tokens=32, workspace_tokens=1024).n_recent_blocks == 1
    assert sizes(budget_tokens=512, block_tokens=32, workspace_tokens=1024).n_recent_blocks == 4


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"host_limit_bytes is .* \(a block\) to the machine's 16.0 GiB"
    ):
        sizes(host_limit_bytes=17 * GIB)
    with pytest.raises(ConfigError, match=r"budget_tokens is 33554432, .* at most 8372224 beside"):
        sizes(budget_tokens=1 << 25, workspace_tokens=1 << 26)


def test_a_device_without_room_is_named() -> None:
    with pytest.raises(ConfigError, match=r"budget_tokens is auto, .* a block needs 131072"):
        sizes(replace(FACTS, devices=(replace(HOST, free_bytes=1000),)))


# A card of 16 GiB behind 13.2 GiB of weights, as docs/gpu.md has it.
CARD = DeviceMemory(
    name="CUDA0",
    free_bytes=2515 * MIB,
    total_bytes=16384 * MIB,
    kv_bytes_per_token=34816,
    state_bytes=150 * MIB,
    staging_bytes=128 * MIB,
    compute_bytes=500 * MIB,
    compute_tokens=1024,
    compute_bytes_per_token=2048.0,
)


def on(*devices: DeviceMemory) -> MemoryFacts:
    each = sum(device.kv_bytes_per_token for device in devices)
    return replace(FACTS, devices=devices, kv_bytes_per_token=each)


def test_a_pool_on_a_gpu_leaves_room_for_all_else() -> None:
    pool = sizes(on(CARD), workspace_tokens=262144)
    headroom = 327 * MIB  # 2 % of the card
    assert CARD.bytes_of(pool.pool_tokens) <= CARD.free_bytes - headroom
    assert CARD.bytes_of(pool.pool_tokens + 256) > CARD.free_bytes - headroom - MIB
    assert pool.pool_tokens == 40064
    assert pool.sources["budget_tokens"] == "auto: what CUDA0 has for it"


def test_a_card_without_room_beside_the_buffers_says_so() -> None:
    with pytest.raises(
        ConfigError,
        match=r"of the 900 MiB that are free on CUDA0 1.1 GiB are for buffers and kept free, "
        r"and a block needs 4456448",
    ):
        sizes(on(replace(CARD, free_bytes=900 * MIB)), workspace_tokens=262144)


def test_the_tightest_of_several_gpus_decides() -> None:
    half = replace(CARD, kv_bytes_per_token=17408, compute_bytes_per_token=0.0)
    other = replace(half, name="CUDA1", free_bytes=1515 * MIB)
    pool = sizes(on(half, other), workspace_tokens=262144)
    assert pool == sizes(on(other), workspace_tokens=262144)
    assert pool.sources["budget_tokens"] == "auto: what CUDA1 has for it"


def test_cells_of_layers_on_the_cpu_are_taken_off_the_host() -> None:
    """One layer of 32 on a large GPU: most of the pool lies in the memory of the host."""
    gpu = replace(CARD, free_bytes=80 * GIB, total_bytes=80 * GIB, kv_bytes_per_token=1088)
    host = replace(HOST, kv_bytes_per_token=33728)
    pool = sizes(on(gpu, host), workspace_tokens=262144)
    in_host = pool.pool_tokens * 33728
    assert 3.9 * GIB < in_host <= 4 * GIB
    assert pool.sources["budget_tokens"] == "auto: what the machine has for it"
    assert pool.host_limit_bytes == (8 * GIB - in_host) // 2


def test_a_given_pool_counts_what_lies_beside_it_and_no_headroom() -> None:
    most = CARD.most_tokens() // 128 * 128 - 16384
    assert sizes(on(CARD), budget_tokens=most, reserve_tokens=16384, workspace_tokens=262144)
    with pytest.raises(
        ConfigError,
        match=rf"at most {most} beside .* of CUDA0 are free; buffers beside it take 873 MiB; "
        "ubatch_tokens=256 needs less",
    ):
        sizes(on(CARD), budget_tokens=most + 128, reserve_tokens=16384, workspace_tokens=262144)


def test_a_pool_is_not_larger_than_it_may_be() -> None:
    pool = resolve(MemoryConfig(workspace_tokens=262144), on(CARD), 20_000)
    assert pool.pool_tokens == 19968
    assert pool.sources["budget_tokens"] == "auto: a larger pool did not fit"


def on_blocks(n_blocks: int) -> DeviceMemory:
    """A host whose half holds so many."""
    return replace(HOST, free_bytes=2 * n_blocks * 128 * 1024)


@pytest.mark.parametrize("given", [{}, {"reserve_tokens": 256}])
def test_a_pool_that_is_chosen_is_as_large_as_it_may_be(given: dict[str, Any]) -> None:
    config = MemoryConfig(workspace_tokens=262144, **given)
    for n_blocks in range(5, 700):
        facts = on(on_blocks(n_blocks))
        assert resolve(config, facts).n_slots == n_blocks
        small = resolve(config, on(on_blocks(1000)), n_blocks * 128 + 127)
        assert small.n_slots == n_blocks
        assert given or small.n_reserve_blocks == max(1, min(n_blocks // 4, 128))


@pytest.mark.parametrize("given", [{}, {"reserve_tokens": 128}])
def test_a_machine_without_room_for_two_blocks_of_budget_is_the_cause(
    given: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="is auto, but must be at least two blocks"):
        sizes(on(on_blocks(2)), workspace_tokens=262144, **given)


# It has the output layer alone: no cells.
LAST = replace(CARD, name="CUDA1", kv_bytes_per_token=0, staging_bytes=0, free_bytes=1000 * MIB)


@pytest.mark.parametrize("budget", [None, 4096])
def test_a_gpu_without_cells_has_room_for_its_buffers(budget: int | None) -> None:
    """Those of the graphs, and its states; where the pool is chosen, what stays free, too."""
    kept = 0 if budget else LAST.headroom_bytes
    fields: dict[str, Any] = {
        "workspace_tokens": 8192,
        "budget_tokens": budget,
        "reserve_tokens": 128,
    }
    n_tokens = (budget or 8192) + 128
    needed = 650 * MIB + (n_tokens - 1024) * 2048 + kept
    assert sizes(on(CARD, replace(LAST, free_bytes=needed)), **fields).pool_tokens == n_tokens
    what = "are for buffers" if budget else "are for buffers and kept free"
    with pytest.raises(
        ConfigError,
        match="n_gpu_layers is more than CUDA1 has room for, but must be less: of the "
        rf"[\d.]+ MiB that are free there [\d.]+ MiB {what}; ubatch_tokens=256 needs less",
    ):
        sizes(on(CARD, replace(LAST, free_bytes=needed - 1)), **fields)


def test_a_workspace_above_the_trained_length_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        sizes(workspace_tokens=10_000, budget_tokens=512)
    assert "above the 8192 tokens" in caplog.text


def test_threads_default_to_the_cores_of_the_process() -> None:
    model = ModelConfig(path=Path("m.gguf"), n_threads=3)
    assert (model.threads, model.threads_batch) == (3, 3)
    assert ModelConfig(path=Path("m.gguf")).threads >= 1
    with pytest.raises(ConfigError, match="n_threads is 0"):
        ModelConfig(path=Path("m.gguf"), n_threads=0)


def test_server_settings() -> None:
    with pytest.raises(ConfigError, match="port is 70000, but must be from 0 to 65535"):
        ServerConfig(port=70000)
    with pytest.raises(ConfigError, match="api_keys"):
        ServerConfig(api_keys=("",))
