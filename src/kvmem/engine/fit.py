"""The pool at the start: it is tried, and smaller where a device has less than was counted on."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvmem.config import EngineConfig
from kvmem.engine.checkpoint import Checkpoint, DeviceCopy
from kvmem.engine.memory import Memory, TieredMemory
from kvmem.errors import CapacityError, ConfigError, DecodeError, HostCapacityError
from kvmem.llama.model import Model
from kvmem.llama.state import state_bytes
from kvmem.sizes import DeviceMemory, MemoryFacts, PoolSizes, resolve, size

__all__ = ["advice", "check_plain", "make_fitting", "run_largest"]

# Less than this free on a GPU, and its back end ends the process at the first batch: it has no
# other way to say that its own buffers cannot grow.
LEAST_FREE_BYTES = 64 << 20

_log = logging.getLogger(__name__)


def make_fitting(
    model: Model, config: EngineConfig, facts: MemoryFacts, make: Callable[[PoolSizes], Memory]
) -> tuple[PoolSizes, Memory]:
    """What `make` gives for the sizes that follow; an automatic pool shrinks until it does.

    Raises CapacityError that says what to ask for instead.
    """
    is_automatic = config.memory.enabled and config.memory.budget_tokens is None
    sizes = resolve(config.memory, facts)
    while True:
        try:
            return sizes, _tried(make(sizes))
        except HostCapacityError:
            raise
        except CapacityError as error:
            smaller = _smaller(config, facts, sizes) if is_automatic else None
            if smaller is None:
                ways = advice(model, config, facts, sizes)
                raise CapacityError(f"{error}; try {ways}" if ways else str(error)) from error
            _log.warning(
                "a pool of %d tokens did not fit after all, so it is %d: %s",
                sizes.pool_tokens,
                smaller.pool_tokens,
                error,
            )
            sizes = smaller


def check_plain(
    model: Model,
    config: EngineConfig,
    facts: MemoryFacts,
    sizes: PoolSizes,
    taken: Sequence[DeviceMemory],
) -> None:
    """Raises CapacityError, as a start would, where the cache of plain llama.cpp does not fit.

    taken: what it takes of each device.
    """
    n_tokens = sizes.workspace_tokens
    for device in taken:
        if device.bytes_of(n_tokens) > device.free_bytes:
            raise CapacityError(
                f"no context of {n_tokens} cells in batches of {config.memory.ubatch}: it takes "
                f"{size(device.bytes_of(n_tokens))} of {device.name or 'the machine'}, where "
                f"{size(device.free_bytes)} are free; try {advice(model, config, facts, sizes)}"
            )


def _tried(memory: Memory) -> Memory:
    """The same, once it has run."""
    try:
        if isinstance(memory, TieredMemory):
            rehearse(memory)
    except BaseException:
        memory.close()
        raise
    return memory


def _smaller(config: EngineConfig, facts: MemoryFacts, sizes: PoolSizes) -> PoolSizes | None:
    """The next pool to try; None where there is none."""
    try:
        found = resolve(config.memory, facts, sizes.pool_tokens * 7 // 8)
    except ConfigError:
        return None
    return found if found.n_budget_blocks >= 2 and found.n_slots < sizes.n_slots else None


def advice(model: Model, config: EngineConfig, facts: MemoryFacts, sizes: PoolSizes) -> str:
    """Settings that take less of the device; none where all are as small as can be."""
    memory = config.memory
    ways = [f"ubatch_tokens={memory.ubatch // 2}"] if memory.ubatch >= 64 else []
    if not memory.enabled:
        ways.insert(0, f"workspace_tokens={sizes.workspace_tokens * 3 // 4}")
    elif sizes.n_budget_blocks > 2:
        budget = max(2, sizes.n_budget_blocks * 3 // 4) * sizes.block_tokens
        ways.insert(0, f"budget_tokens={budget}")
    n_layers = config.model.n_gpu_layers
    if n_layers and any(not device.is_host for device in facts.devices):
        n_most = model.n_layer + model.n_layer_nextn + 1  # the output counts, too
        n_layers = n_most if n_layers < 0 else min(n_layers, n_most)
        ways.append(f"n_gpu_layers={n_layers * 7 // 8}")
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


def rehearse(memory: TieredMemory) -> None:
    """Let a GPU take now what its back end takes at run time: it cannot say then that there is no
    more.

    Raises CapacityError, before it is asked, where next to nothing is free.
    """
    devices = [share for share in memory.context.shares() if share.device]
    for share in devices:
        if share.free < LEAST_FREE_BYTES:
            raise CapacityError(
                f"{share.device} has {share.free >> 20} MiB left beside the pool, and needs "
                f"{LEAST_FREE_BYTES >> 20} to run"
            )
    if devices:
        try:
            run_largest(memory)
        except DecodeError as error:
            raise CapacityError(f"no room to run beside the pool: {error}") from error
    if memory.device_copy is not None:
        take_copy(memory, memory.device_copy)


def take_copy(memory: TieredMemory, copy: DeviceCopy) -> None:
    """Let llama.cpp take the device memory of a state now. It does so at the first save, and where
    there is none it ends the process; any later save is as large.
    """
    _decode_last(memory, 1, 0)
    context = memory.context
    n_bytes = state_bytes(context) - state_bytes(context, on_device=True)
    shares = context.shares()
    n_states = sum(share.states for share in shares)
    for share in shares:
        needed = n_bytes * share.states // n_states + LEAST_FREE_BYTES
        if share.device and share.states and share.free < needed:
            raise CapacityError(
                f"{share.device} has {share.free >> 20} MiB left beside the pool, and needs "
                f"{needed >> 20} for a checkpoint and to run"
            )
    copy.save(Checkpoint(1, np.empty(0, np.uint8)))
    memory.clear_device()


def run_largest(memory: TieredMemory) -> None:
    """Decode the largest batch and a step in the last cells of an empty pool, so that attention
    goes over all of it, and forget them.
    """
    context, n_cells = memory.context, memory.port.n_slots * memory.block_tokens
    n_batch = min(context.n_ubatch, n_cells - 1, context.n_ctx - 1)
    for n, start in ((n_batch, 0), (1, n_batch)):
        _decode_last(memory, n, start)
    memory.clear_device()


def _decode_last(memory: TieredMemory, n: int, start: int) -> None:
    """Decode n tokens at the positions from start on, in cells counted from the last one down."""
    pos = np.arange(start, start + n, dtype=np.int32)
    cells = memory.port.n_slots * memory.block_tokens - 1 - pos
    tokens = np.zeros(n, np.int32)
    memory.port.place_cells(cells)
    memory.context.decode(tokens, pos)
    if memory.drafter is not None:
        memory.drafter.head.follow(cells, tokens, pos, memory.drafter.hidden)
