"""What the sizes of the memory follow from.

The model as it is loaded, and the machine as it is now.
"""

import logging
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.calibration import Calibration, scoring
from kvmem.errors import ConfigError, ModelError
from kvmem.kv.layout import KV_TYPES, KvLayout
from kvmem.kv.slabs import record_bytes
from kvmem.llama import runtime
from kvmem.llama.context import Context, Share, shares_of
from kvmem.llama.draft import DraftContext
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model
from kvmem.sizes import DeviceMemory, MemoryFacts, largest_pool, workspace_of

__all__ = [
    "Probe",
    "context_settings",
    "host_bytes_per_token",
    "memory_facts",
    "plain_devices",
    "probe",
    "warn_without_gpu",
]

# Beside the record: tokens, positions and the token index of each token, the version of each block.
TOKEN_BYTES = 20 + 4
BLOCK_BYTES = 8

PROBE_TOKENS = 16

# A CUDA device copies through two buffers of at most so much, but never less than a block
# (adapter/kvmem-transfer.cu).
STAGING_BYTES = 64 << 20
# No larger pool is measured: llama.cpp's tables of its cells are real, 50 bytes for each.
MOST_TOKENS = 1 << 21
# Times that the graphs of a pool are measured, each closer to the largest that fits.
N_MEASURES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a throw-away context of one block tells.

    checkpoint_bytes, state_device_bytes, rollback_bytes: as MemoryFacts has them.
    state_bytes: one recurrent state.
    draft_bytes: the draft head's rows in layout.payload_bytes.
    """

    layout: KvLayout
    checkpoint_bytes: int
    state_bytes: int
    state_device_bytes: int
    rollback_bytes: int
    draft_bytes: int


def context_settings(config: EngineConfig) -> dict[str, Any]:
    """What every context of a configuration is made with, whatever its size."""
    memory, draft = config.memory, config.draft
    # a tiered V must lie in rows, and only flash attention keeps it so
    needs_flash = memory.enabled and memory.flash_attn == "auto"
    return {
        "n_batch": memory.batch_tokens,
        "n_ubatch": memory.ubatch,
        "type_k": memory.type_k,
        "type_v": memory.type_v,
        "flash_attn": "on" if needs_flash else memory.flash_attn,
        "n_rs_seq": draft.n_rollback,
        "replay": draft.replays,
    }


def probe(model: Model, config: EngineConfig) -> Probe:
    """Read the layout of the cache from the graph.

    Raises ModelError if the architecture's cache cannot be tiered, or has no head for drafts.
    """
    memory = config.memory
    with Context(
        model,
        n_ctx=memory.block_tokens,
        n_cells=memory.block_tokens,
        block_tokens=memory.block_tokens,
        **context_settings(config) | {"n_batch": PROBE_TOKENS, "n_ubatch": PROBE_TOKENS},
    ) as context:
        port = LlamaPort(context)
        layout, draft_bytes, hidden_bytes = port.layout, 0, 0
        if config.draft.enabled:
            head = DraftContext(context, type_k=config.draft.type_k, type_v=config.draft.type_v)
            port = LlamaPort(context)
            draft_bytes = port.layout.payload_bytes - layout.payload_bytes
            layout = port.layout
            hidden_bytes = head.n_embd * 4  # f32
            head.close()
        return Probe(
            layout=layout,
            checkpoint_bytes=port.state_bytes + hidden_bytes,
            state_bytes=port.state_bytes,
            state_device_bytes=port.device_bytes()[1],
            rollback_bytes=port.rollback_bytes,
            draft_bytes=draft_bytes,
        )


def host_bytes_per_token(layout: KvLayout, calibration: Calibration | None, scorer: str) -> int:
    """Record, summaries and tables of one token, as scoring with these pairs needs them."""
    used = scoring(layout, calibration, scorer)
    summaries = sum(
        (layout.layers[pair.layer].head_dim_k + 2) / used.slice_tokens for pair in used.pairs
    )
    block = record_bytes(layout.block_tokens, layout.payload_bytes) + BLOCK_BYTES
    return math.ceil(block / layout.block_tokens + summaries + TOKEN_BYTES)


def memory_facts(
    model: Model,
    config: EngineConfig,
    calibration: Calibration | None = None,
    *,
    placed: Model | None = None,
) -> MemoryFacts:
    """Facts for sizes.resolve.

    placed: the model as a start would load it, dry, where `model` is not loaded like that.

    Raises ModelError as `probe` does.
    """
    memory = config.memory
    placed = placed or model
    machine_free, machine_total = _host_memory()
    if not memory.enabled:
        kv_bytes = _estimate_kv_bytes(model, memory)
        return MemoryFacts(
            trained_tokens=model.n_ctx_train,
            kv_bytes_per_token=kv_bytes,
            host_bytes_per_token=kv_bytes,
            devices=(_plain_device(config, kv_bytes, machine_free, machine_total),),
            free_host_bytes=machine_free,
            host_bytes=machine_total,
        )
    found = probe(model, config)
    kept = Fraction(0)
    if memory.device_checkpoint and found.state_device_bytes:
        kept = Fraction(found.state_bytes, found.state_device_bytes)
    devices = _Measure(placed, config, machine_free, machine_total, kept).devices()
    return MemoryFacts(
        trained_tokens=model.n_ctx_train,
        kv_bytes_per_token=found.layout.payload_bytes // memory.block_tokens,
        host_bytes_per_token=host_bytes_per_token(found.layout, calibration, memory.scorer),
        devices=devices,
        free_host_bytes=next((p.free_bytes for p in devices if p.is_host), machine_free),
        host_bytes=machine_total,
        checkpoint_bytes=found.checkpoint_bytes,
        state_device_bytes=found.state_device_bytes,
        rollback_bytes=found.rollback_bytes,
        draft_bytes_per_token=found.draft_bytes // memory.block_tokens,
    )


class _Measure:
    """Where a pool lies, and what is taken beside it.

    llama.cpp's graphs grow with the pool, and at no size faster than at a larger one: the line
    between two sizes is never below what a size between them takes. Beyond MOST_TOKENS the
    line from half of them goes on.

    kept: of the bytes of recurrent states, what is kept of them on the same device. Layers are
    alike.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        machine_free: int,
        machine_total: int,
        kept: Fraction = Fraction(0),
    ) -> None:
        self._kept = kept
        self._model = model
        self._config = config
        self._host = (machine_free, machine_total)

    def devices(self) -> tuple[DeviceMemory, ...]:
        """For every pool up to the largest that could be chosen."""
        block = self._config.memory.block_tokens
        largest = largest_pool(self._config.memory, self._model.n_ctx_train)
        high = low = min(largest, MOST_TOKENS)
        above = below = self._at(high)
        holders = [device for device in above if device.kv_bytes_per_token]
        if largest > high or any(device.most_tokens() < high for device in holders):
            free = min(device.free_bytes // device.kv_bytes_per_token for device in holders)
            high, low = max(block, min(high, free // block * block)), block
            above, below = self._at(high), self._at(low)
        nearest = high // 2 if largest > high == MOST_TOKENS else high  # a line has two ends
        for _ in range(N_MEASURES - 1):
            devices = tuple(_between(*pair, low, high) for pair in zip(below, above, strict=True))
            fits = [device.most_tokens(keep_bytes=device.headroom_bytes)
                    for device in devices if device.kv_bytes_per_token]  # fmt: skip
            nearer = min(min(fits), nearest) // block * block
            if nearer <= low:
                break
            low, below = nearer, self._at(nearer)
        return tuple(_between(*pair, low, high) for pair in zip(below, above, strict=True))

    def _at(self, n_tokens: int) -> list[DeviceMemory]:
        """With a pool of this size, each device in the same order."""
        config, draft = self._config, self._config.draft
        shares = shares_of(
            self._model,
            n_ctx=workspace_of(config.memory, self._model.n_ctx_train),
            n_cells=n_tokens,
            draft_types=(draft.type_k, draft.type_v) if draft.enabled else None,
            **context_settings(config),
        )
        return sorted((self._device(share, n_tokens) for share in shares), key=lambda p: p.name)

    def _device(self, share: Share, n_tokens: int) -> DeviceMemory:
        row = -(-share.cells // n_tokens)
        block_bytes = self._config.memory.block_tokens * row
        free, total = (share.free, share.total) if share.device else self._host
        is_mapped = not share.device and self._config.model.use_mmap
        if self._model.is_dry and not is_mapped:
            free -= share.weights
        return DeviceMemory(
            name=share.device,
            free_bytes=max(0, free),
            total_bytes=total,
            weight_bytes=share.weights,
            kv_bytes_per_token=row,
            state_bytes=share.states,
            checkpoint_bytes=math.ceil(share.states * self._kept),
            staging_bytes=2 * max(min(STAGING_BYTES, share.cells), block_bytes)
            if share.device
            else 0,
            compute_bytes=share.compute,
        )


def _between(below: DeviceMemory, above: DeviceMemory, low: int, high: int) -> DeviceMemory:
    """What it takes for pools of up to `high` tokens, from what it takes for two."""
    slope = (above.compute_bytes - below.compute_bytes) / (high - low) if high > low else 0.0
    return replace(
        above,
        compute_bytes=below.compute_bytes,
        compute_tokens=low,
        compute_bytes_per_token=max(0.0, slope),
    )


def plain_devices(placed: Model, config: EngineConfig) -> tuple[DeviceMemory, ...]:
    """What a start without the memory takes of each device: as much as a pool of its size.

    None where kvmem cannot tier the cache, or not these types: then llama.cpp alone knows.
    """
    try:
        tiered = replace(config, memory=replace(config.memory, enabled=True))
        devices = _Measure(placed, tiered, *_host_memory()).devices()
    except (ConfigError, ModelError):
        return ()
    return tuple(replace(device, staging_bytes=0) for device in devices)


def _plain_device(config: EngineConfig, kv_bytes: int, free: int, total: int) -> DeviceMemory:
    """Of plain llama.cpp: the whole cache, on the GPUs if there are some."""
    gpus = runtime.gpus()
    name = ""
    if gpus and config.model.n_gpu_layers != 0:
        name = gpus[0].name
        free = sum(gpu.free_bytes for gpu in gpus)
        total = sum(gpu.total_bytes for gpu in gpus)
    return DeviceMemory(name=name, free_bytes=free, total_bytes=total, kv_bytes_per_token=kv_bytes)


def warn_without_gpu(model: ModelConfig) -> None:
    """A line where a number of layers was asked for; all of them means what there is."""
    if model.n_gpu_layers > 0:
        _warn(model.n_gpu_layers)


@cache  # once for a process that opens several engines
def _warn(n_layers: int) -> None:
    if not runtime.gpus():
        _log.warning(
            "n_gpu_layers=%d has no effect: this machine or this build has no GPU", n_layers
        )


def _estimate_kv_bytes(model: Model, memory: MemoryConfig) -> int:
    """Upper bound for plain llama.cpp, from the header.

    Every layer with attention, all heads of one size.
    """
    head_dim = model.n_embd // max(1, model.n_head)
    values = model.n_layer * model.n_head_kv * head_dim
    sizes = {kind.name: kind.n_bytes / kind.block for kind in KV_TYPES.values()}
    return max(1, int(values * (sizes[memory.type_k] + sizes[memory.type_v])))


def _host_memory() -> tuple[int, int]:
    """(available, total) bytes of RAM; in a container with a limit, of that."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    available, total = fields["MemAvailable"], fields["MemTotal"]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available, total
    if limit != "max":
        total = min(total, int(limit))
        available = min(available, max(0, int(limit) - used))
    return available, total
