"""What the sizes of the memory follow from.

The model as it is loaded, and the machine as it is now.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from kvmem.config import EngineConfig, MemoryConfig, MemoryFacts
from kvmem.engine.calibration import Calibration, scoring
from kvmem.kv.layout import KV_TYPES, KvLayout
from kvmem.kv.slabs import record_bytes
from kvmem.llama import runtime
from kvmem.llama.context import Context
from kvmem.llama.draft import DraftContext
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

__all__ = ["Probe", "host_bytes_per_token", "memory_facts", "probe"]

# Beside the record: tokens, positions and the token index of each token, the version of each block.
TOKEN_BYTES = 20 + 4
BLOCK_BYTES = 8

PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a throw-away context of one block tells.

    checkpoint_bytes, state_device_bytes, rollback_bytes: as MemoryFacts has them.
    draft_bytes: the draft head's rows in layout.payload_bytes.
    """

    layout: KvLayout
    checkpoint_bytes: int
    state_device_bytes: int
    rollback_bytes: int
    draft_bytes: int


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
        n_batch=PROBE_TOKENS,
        n_ubatch=PROBE_TOKENS,
        type_k=memory.type_k,
        type_v=memory.type_v,
        flash_attn="off" if memory.flash_attn == "off" else "on",
        n_rs_seq=config.draft.n_rollback,
        replay=config.draft.replays,
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
    model: Model, config: EngineConfig, calibration: Calibration | None = None
) -> MemoryFacts:
    """Facts for MemoryConfig.resolve. The model is loaded, so its weights are not in the free
    memory any more.

    Raises ModelError as `probe` does.
    """
    memory = config.memory
    checkpoint_bytes = states = rollback_bytes = draft_bytes = 0
    if memory.enabled:
        found = probe(model, config)
        kv_bytes = found.layout.payload_bytes // memory.block_tokens
        host_bytes = host_bytes_per_token(found.layout, calibration, memory.scorer)
        checkpoint_bytes, states = found.checkpoint_bytes, found.state_device_bytes
        rollback_bytes = found.rollback_bytes
        draft_bytes = found.draft_bytes // memory.block_tokens
    else:
        kv_bytes = host_bytes = _estimate_kv_bytes(model, memory)
    machine_free, machine_total = _host_memory()
    gpus = [device for device in runtime.devices() if device[2] == "gpu"]
    on_gpu = bool(gpus) and config.model.n_gpu_layers != 0
    return MemoryFacts(
        trained_tokens=model.n_ctx_train,
        kv_bytes_per_token=kv_bytes,
        host_bytes_per_token=host_bytes,
        free_device_bytes=max(
            0, (sum(gpu[3] for gpu in gpus) if on_gpu else machine_free) - states
        ),
        device_bytes=sum(gpu[4] for gpu in gpus) if on_gpu else machine_total,
        free_host_bytes=machine_free,
        host_bytes=machine_total,
        shared=not on_gpu,
        checkpoint_bytes=checkpoint_bytes,
        state_device_bytes=states,
        rollback_bytes=rollback_bytes,
        draft_bytes_per_token=draft_bytes,
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
