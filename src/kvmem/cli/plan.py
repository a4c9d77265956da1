"""`kvmem plan`: what a configuration takes, and where each value comes from."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from kvmem.cli import logs, show
from kvmem.cli.options import EngineOptions
from kvmem.cli.takes import takes
from kvmem.config import EngineConfig
from kvmem.engine.calibration import Found, find
from kvmem.engine.checkpoint import MAX_CHECKPOINTS
from kvmem.engine.engine import Engine
from kvmem.engine.facts import memory_facts, plain_devices, warn_without_gpu
from kvmem.engine.fit import check_plain
from kvmem.llama.model import Model
from kvmem.sizes import DeviceMemory, MemoryFacts, PoolSizes, resolve

__all__ = ["Plan", "make_plan", "plan", "plan_of", "render_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Resolved sizes with what they cost.

    all_checkpoint_bytes: those that are kept, and the one that is written before another goes.
    n_history_tokens: largest history that the host limit and the workspace hold.
    n_easy_tokens: the largest beside all checkpoints; beyond it they give way to blocks.
    calibration: the pairs that score, and where they are from.
    """

    config: EngineConfig
    model: str
    weight_bytes: int
    facts: MemoryFacts
    sizes: PoolSizes
    calibration: Found

    @property
    def pool_bytes(self) -> int:
        return self.sizes.pool_tokens * self.facts.kv_bytes_per_token

    @property
    def all_checkpoint_bytes(self) -> int:
        return (MAX_CHECKPOINTS + 1) * self.facts.checkpoint_bytes

    @property
    def n_history_tokens(self) -> int:
        return self._tokens_in(self.sizes.host_limit_bytes)

    @property
    def n_easy_tokens(self) -> int:
        return self._tokens_in(max(0, self.sizes.host_limit_bytes - self.all_checkpoint_bytes))

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """(layer, KV head) of those that score; none without calibration, when all do."""
        found = self.calibration.calibration
        return [] if found is None else list(found.pairs)

    def _as_dict(self, device: DeviceMemory) -> dict[str, Any]:
        n_tokens = self.sizes.pool_tokens
        return {
            "name": device.name or "host",
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
            "weight_bytes": device.weight_bytes,
            "pool_bytes": n_tokens * device.kv_bytes_per_token,
            "state_bytes": device.state_bytes,
            "checkpoint_bytes": device.checkpoint_bytes,
            "compute_bytes": device.compute_bytes_of(n_tokens),
            "staging_bytes": device.staging_bytes,
            "headroom_bytes": device.headroom_bytes,
        }

    def _tokens_in(self, n_bytes: int) -> int:
        return min(self.sizes.workspace_tokens, n_bytes // self.facts.host_bytes_per_token)

    def as_dict(self) -> dict[str, Any]:
        """For --json; bytes and tokens as plain numbers."""
        sizes = self.sizes
        return {
            "model": self.model,
            "weight_bytes": self.weight_bytes,
            "kvmem": self.config.memory.enabled,
            "type_k": self.config.memory.type_k,
            "type_v": self.config.memory.type_v,
            "workspace_tokens": sizes.workspace_tokens,
            "block_tokens": sizes.block_tokens,
            "budget_tokens": sizes.budget_tokens,
            "reserve_tokens": sizes.reserve_tokens,
            "sink_tokens": sizes.n_sink_blocks * sizes.block_tokens,
            "recent_tokens": sizes.n_recent_blocks * sizes.block_tokens,
            "pool_tokens": sizes.pool_tokens,
            "pool_bytes": self.pool_bytes,
            "kv_bytes_per_token": self.facts.kv_bytes_per_token,
            "host_bytes_per_token": self.facts.host_bytes_per_token,
            "spec_type": self.config.draft.spec_type,
            "spec_draft_n_max": self.config.draft.n_max,
            "spec_draft_n_min": self.config.draft.n_min,
            "spec_draft_p_min": self.config.draft.p_min,
            "spec_type_k": self.config.draft.type_k,
            "spec_type_v": self.config.draft.type_v,
            "draft_bytes_per_token": self.facts.draft_bytes_per_token,
            "mtp_state": self.config.draft.state,
            "state_device_bytes": self.facts.state_device_bytes,
            "draft_rollback_bytes": self.facts.rollback_bytes,
            "checkpoint_bytes": self.facts.checkpoint_bytes,
            "max_checkpoints": MAX_CHECKPOINTS if self.facts.checkpoint_bytes else 0,
            "all_checkpoint_bytes": self.all_checkpoint_bytes,
            "host_limit_bytes": sizes.host_limit_bytes,
            "conversations": self.config.memory.conversations,
            "conversations_bytes": self.config.memory.conversations_bytes,
            "history_tokens": self.n_history_tokens,
            "history_tokens_beside_checkpoints": self.n_easy_tokens,
            "scorer": self.config.memory.scorer,
            "calibration": self.calibration.source,
            "calibrated_pairs": self._pairs,
            "free_device_bytes": self.facts.free_device_bytes,
            "devices": [self._as_dict(device) for device in self.facts.devices],
            "free_host_bytes": self.facts.free_host_bytes,
            "sources": dict(sizes.sources),
        }


@takes(EngineOptions)
def plan(
    options: EngineOptions,
    as_json: Annotated[bool, Option("--json", help="Print an object instead of a table.")] = False,
    verbose: Annotated[bool, Option("-v", "--verbose", help="Log to stderr.")] = False,
) -> None:
    """Show what a configuration takes: weights, pool, host store, and the history that fits."""
    logs.set_up(verbose=verbose)
    made = make_plan(options.config())
    print(json.dumps(made.as_dict(), indent=2) if as_json else render_plan(made))


def make_plan(config: EngineConfig) -> Plan:
    """Map the model, measure one block of its cache, and resolve the sizes.

    Raises ModelError, ConfigError and CapacityError as a start would.
    """
    load_mtp = config.draft.enabled
    warn_without_gpu(config.model)
    with (
        Model(config.model.path, n_gpu_layers=0, use_mmap=True, load_mtp=load_mtp) as model,
        # where its layers would lie; the first tells what only the graph of a real one knows
        Model(
            config.model.path,
            n_gpu_layers=config.model.n_gpu_layers,
            load_mtp=load_mtp,
            dry=True,
        ) as placed,
    ):
        calibration = find(config)
        facts = memory_facts(model, config, calibration.calibration, placed=placed)
        sizes = resolve(config.memory, facts)
        if not config.memory.enabled:
            check_plain(model, config, facts, sizes, plain_devices(placed, config))
        return Plan(
            config=config,
            model=_describe(model),
            weight_bytes=model.size_bytes,
            facts=facts,
            sizes=sizes,
            calibration=calibration,
        )


def plan_of(engine: Engine) -> Plan:
    """The plan that an engine runs by."""
    return Plan(
        config=engine.config,
        model=_describe(engine.model),
        weight_bytes=engine.model.size_bytes,
        facts=engine.facts,
        sizes=engine.sizes,
        calibration=engine.calibration,
    )


def _describe(model: Model) -> str:
    """llama.cpp's words, with the parameters where it knows no size of that name."""
    return model.description.replace(" ?B ", f" {show.count(model.n_params)} ")


def _add_device(add: Callable[..., None], made: Plan, device: DeviceMemory) -> None:
    """What else the pool takes of one device, and what is left there."""
    n_tokens = made.sizes.pool_tokens
    batch = f"llama.cpp's graphs, batches of {made.config.memory.ubatch} (-ub) over the pool"
    if device.is_host:
        if device.checkpoint_bytes:
            add("a checkpoint, host", None, device.checkpoint_bytes, "--kvmem-device-checkpoint")
        add("compute buffers, host", None, device.compute_bytes_of(n_tokens), batch)
        return
    name = device.name
    add(f"{name}, weights", None, device.weight_bytes, "of the layers that -ngl puts there")
    add("  pool", n_tokens, n_tokens * device.kv_bytes_per_token, "of the same layers")
    if device.state_bytes:
        add("  recurrent state", None, device.state_bytes, "of the same layers")
    if device.checkpoint_bytes:
        add("  a checkpoint", None, device.checkpoint_bytes, "--kvmem-device-checkpoint")
    add("  compute buffers", None, device.compute_bytes_of(n_tokens), batch)
    add("  staging buffers", None, device.staging_bytes, "blocks are copied through them")
    left = device.free_bytes - device.bytes_of(n_tokens)
    total = show.size(device.total_bytes)
    kept = show.size(device.headroom_bytes)
    add("  left free", None, left, f"of {total}; an automatic pool leaves {kept}")


def render_plan(made: Plan) -> str:
    """The plan as a table."""
    sizes, facts = made.sizes, made.facts
    sources = sizes.sources
    kinds = f"{made.config.memory.type_k} / {made.config.memory.type_v}"
    rows: list[tuple[str, str, str, str]] = [("", "tokens", "bytes", "from")]

    def add(name: str, tokens: int | None, n_bytes: int | None, source: str) -> None:
        rows.append(
            (
                name,
                "" if tokens is None else f"{tokens:,}",
                "" if n_bytes is None else show.size(n_bytes),
                source,
            )
        )

    add("weights", None, made.weight_bytes, made.model)
    add("workspace (-c)", sizes.workspace_tokens, None, sources["workspace_tokens"])
    if not made.config.memory.enabled:
        n_bytes = sizes.workspace_tokens * facts.kv_bytes_per_token
        add("KV cache", sizes.workspace_tokens, n_bytes, "--no-kvmem: plain llama.cpp")
        return show.table(rows, right=(1, 2))
    row = facts.kv_bytes_per_token
    block = sizes.block_tokens
    budget, reserve = sizes.budget_tokens, sizes.reserve_tokens
    sink, recent = sizes.n_sink_blocks * block, sizes.n_recent_blocks * block
    add("block", block, block * row, sources["block_tokens"])
    add("budget", budget, budget * row, sources["budget_tokens"])
    add("  sink, always in it", sink, None, sources["n_sink_blocks"])
    add("  recent, always in it", recent, None, sources["n_recent_blocks"])
    add("reserve", reserve, reserve * row, sources["reserve_tokens"])
    add("device pool", sizes.pool_tokens, made.pool_bytes, f"budget + reserve, K/V {kinds}")
    draft = made.config.draft
    if draft.enabled:
        n_bytes = sizes.pool_tokens * facts.draft_bytes_per_token
        kinds = f"K/V {draft.type_k} / {draft.type_v}"
        add("  draft head in it", sizes.pool_tokens, n_bytes, kinds)
    if facts.state_device_bytes:
        how = f"on the device, with {draft.state} for drafts" if draft.enabled else "on the device"
        add("recurrent state", None, facts.state_device_bytes, how)
    for device in facts.devices:
        _add_device(add, made, device)
    add("host store limit", None, sizes.host_limit_bytes, sources["host_limit_bytes"])
    memory = made.config.memory
    shared = memory.conversations_bytes or sizes.host_limit_bytes
    add("  conversations in it", None, shared, f"at most {memory.conversations} together")
    add("  a token in it", 1, facts.host_bytes_per_token, "K, V, summaries, tables")
    add("scorer", None, None, made.config.memory.scorer)
    add("  calibration", None, None, made.calibration.source)
    state = facts.checkpoint_bytes
    why = "the recurrent state" if state else "none: this model has attention layers only"
    if state and draft.enabled:
        why += " and the draft head's row"
    add("  a checkpoint in it", None, state, why)
    if state:
        kept = f"{MAX_CHECKPOINTS} kept, one being written"
        add("  all checkpoints", None, made.all_checkpoint_bytes, kept)
    whole = made.n_history_tokens == sizes.workspace_tokens
    limit = "the workspace" if whole else "the host limit"
    add("largest history", made.n_history_tokens, None, f"bounded by {limit}")
    if state:
        add(
            "  beside all checkpoints",
            made.n_easy_tokens,
            None,
            "beyond it they give way to blocks",
        )
    return show.table(rows, right=(1, 2))
