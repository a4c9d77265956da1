"""What the memory takes of each device and of the machine: the sizes that a configuration leaves
open follow from what is free, and every number says where it is from.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmem.config import MemoryConfig
from kvmem.errors import ConfigError

__all__ = [
    "DeviceMemory",
    "MemoryFacts",
    "PoolSizes",
    "largest_pool",
    "resolve",
    "size",
    "workspace_of",
]

MAX_AUTO_RESERVE_TOKENS = 16_384
DEFAULT_RECENT_TOKENS = 128
SHARED_POOL_FRACTION = 0.5  # pool and host store live in the same RAM: half each
HOST_FRACTION = 0.5
GIB = 1 << 30
# Of a GPU, beside all that is known: what its back end takes at run time, modules of kernels,
# libraries, and other programs.
HEADROOM_BYTES = 256 << 20
HEADROOM_FRACTION = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device, or the memory of the host, and what a pool takes of it.

    name: ggml's name of the device; "" for the host.
    free_bytes: what is free, the weights already taken off. total_bytes: all of it.
    weight_bytes: the weights that lie there.
    kv_bytes_per_token: K and V rows of one token in the layers that lie there.
    state_bytes: recurrent states. checkpoint_bytes: of the one that is kept on the device.
    staging_bytes: buffers that blocks are copied through.
    compute_bytes: the buffers of llama.cpp's graphs over a pool of up to compute_tokens;
        compute_bytes_per_token: what each token beyond them adds at most.
    """

    name: str
    free_bytes: int
    total_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int = 0
    state_bytes: int = 0
    checkpoint_bytes: int = 0
    staging_bytes: int = 0
    compute_bytes: int = 0
    compute_tokens: int = 0
    compute_bytes_per_token: float = 0.0

    @property
    def is_host(self) -> bool:
        return not self.name

    @property
    def headroom_bytes(self) -> int:
        """What an automatic pool leaves free."""
        if self.is_host:
            return int((1 - SHARED_POOL_FRACTION) * self.free_bytes)
        return max(HEADROOM_BYTES, int(HEADROOM_FRACTION * self.total_bytes))

    def compute_bytes_of(self, pool_tokens: int) -> int:
        more = max(0, pool_tokens - self.compute_tokens)
        return self.compute_bytes + int(self.compute_bytes_per_token * more)

    def bytes_beside(self, pool_tokens: int) -> int:
        """All that a pool of so many tokens takes here beside its cells."""
        fixed = self.state_bytes + self.checkpoint_bytes + self.staging_bytes
        return fixed + self.compute_bytes_of(pool_tokens)

    def bytes_of(self, pool_tokens: int) -> int:
        return pool_tokens * self.kv_bytes_per_token + self.bytes_beside(pool_tokens)

    def most_tokens(self, *, keep_bytes: int = 0) -> int:
        """The largest pool that fits and leaves keep_bytes free."""
        room = self.free_bytes - keep_bytes - self.bytes_beside(0)
        within = self.compute_tokens * self.kv_bytes_per_token
        if room <= within:
            return max(0, room) // self.kv_bytes_per_token
        each = self.kv_bytes_per_token + self.compute_bytes_per_token
        return self.compute_tokens + int((room - within) / each)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What `resolve` must know of the model and the machine.

    trained_tokens: the context length that the model was trained for.
    kv_bytes_per_token: K and V rows of one token over all attention layers, in the chosen types,
        those of the draft head included.
    host_bytes_per_token: the same in the host store, with summaries and tables, rounded up.
    devices: of each device and of the host what is free and what is taken.
    free_host_bytes, host_bytes: of the memory of the machine.
    checkpoint_bytes: one recurrent state and what goes back with it; 0 for a model without.
    state_device_bytes: all that is on the devices for the state. rollback_bytes: what of it is
        there so that drafts can be taken back.
    draft_bytes_per_token: the draft head's part of kv_bytes_per_token.
    """

    trained_tokens: int
    kv_bytes_per_token: int
    host_bytes_per_token: int
    devices: tuple[DeviceMemory, ...]
    free_host_bytes: int
    host_bytes: int
    checkpoint_bytes: int = 0
    state_device_bytes: int = 0
    rollback_bytes: int = 0
    draft_bytes_per_token: int = 0

    @property
    def holders(self) -> list[DeviceMemory]:
        """Where cells lie."""
        return [device for device in self.devices if device.kv_bytes_per_token]

    @property
    def free_device_bytes(self) -> int:
        """What is free where cells will lie."""
        return sum(device.free_bytes for device in self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Every size of the memory, resolved. `sources` says where each value came from."""

    workspace_tokens: int
    block_tokens: int
    n_budget_blocks: int
    n_reserve_blocks: int
    n_sink_blocks: int
    n_recent_blocks: int
    host_limit_bytes: int
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def budget_tokens(self) -> int:
        return self.n_budget_blocks * self.block_tokens

    @property
    def reserve_tokens(self) -> int:
        return self.n_reserve_blocks * self.block_tokens

    @property
    def n_slots(self) -> int:
        """Blocks that the device pool holds."""
        return self.n_budget_blocks + self.n_reserve_blocks

    @property
    def pool_tokens(self) -> int:
        """Cells of the device pool; the workspace plays no part once the budget is given."""
        return self.n_slots * self.block_tokens


def workspace_of(config: MemoryConfig, trained_tokens: int) -> int:
    return config.workspace_tokens or trained_tokens


def largest_pool(config: MemoryConfig, trained_tokens: int) -> int:
    """Tokens of the largest pool that `resolve` may choose, whatever is free."""
    whole = _whole_blocks(config, workspace_of(config, trained_tokens))
    budget = config.budget_blocks or whole
    reserve = config.reserve_blocks or _auto_reserve(config, budget, whole)
    return (budget + reserve) * config.block_tokens


def resolve(config: MemoryConfig, facts: MemoryFacts, most_tokens: int | None = None) -> PoolSizes:
    """Choose what was left to us. Raises ConfigError where the machine cannot give it.

    most_tokens: a pool that is chosen is not larger.
    """
    sources: dict[str, str] = {"workspace_tokens": "given"}
    workspace = workspace_of(config, facts.trained_tokens)
    if workspace > facts.trained_tokens:
        _log.warning(
            "workspace_tokens=%d is above the %d tokens that the model was trained for",
            workspace,
            facts.trained_tokens,
        )
    if config.workspace_tokens is None:
        sources["workspace_tokens"] = "auto: the trained length"
    budget, reserve = _resolve_pool(config, workspace, facts, most_tokens, sources)
    config.check_pins(budget * config.block_tokens)
    recent = DEFAULT_RECENT_TOKENS if config.recent_tokens is None else config.recent_tokens
    recent_blocks = min(
        -(-recent // config.block_tokens), max(0, budget - config.n_sink_blocks - 1)
    )
    sources["n_recent_blocks"] = "auto: 128" if config.recent_tokens is None else "given"
    sources["n_sink_blocks"] = "given" if config.sink_tokens else "auto: one block"
    sources["block_tokens"] = "given" if config.block_tokens != 128 else "default"
    return PoolSizes(
        workspace_tokens=workspace,
        block_tokens=config.block_tokens,
        n_budget_blocks=budget,
        n_reserve_blocks=reserve,
        n_sink_blocks=config.n_sink_blocks,
        n_recent_blocks=recent_blocks,
        host_limit_bytes=_resolve_host(
            config, facts, (budget + reserve) * config.block_tokens, sources
        ),
        sources=sources,
    )


def _resolve_pool(
    config: MemoryConfig,
    workspace: int,
    facts: MemoryFacts,
    most_tokens: int | None,
    sources: dict[str, str],
) -> tuple[int, int]:
    """Blocks of budget and reserve."""
    block = config.block_tokens
    whole = _whole_blocks(config, workspace)
    budget, reserve = config.budget_blocks, config.reserve_blocks
    is_automatic, is_short, kept = budget is None, False, 0
    sources["reserve_tokens"] = "given"
    sources["budget_tokens"] = "given"
    if budget is None:
        fits = [device.most_tokens(keep_bytes=device.headroom_bytes) for device in facts.holders]
        tightest = facts.holders[fits.index(min(fits))]
        pool = min(fits) // block
        what = f"what {_called(tightest)} has for it"
        if most_tokens is not None and most_tokens // block < pool:
            pool, what = most_tokens // block, "a larger pool did not fit"
        if pool >= whole + (reserve or 1):
            budget = whole
            sources["budget_tokens"] = "auto: the whole workspace fits"
        else:
            kept = reserve or _quarter(config, pool)
            budget = pool - kept
            sources["budget_tokens"] = f"auto: {what}"
            is_short = budget < 2
        if reserve is not None and budget < 2 < pool:
            raise ConfigError(
                "reserve_tokens",
                reserve * block,
                f"at most {(pool - 2) * block}: a pool of {pool * block} fits, and a budget needs "
                "two blocks of it",
            )
        if is_short:
            beside = tightest.bytes_beside(0) + tightest.headroom_bytes
            raise ConfigError(
                "budget_tokens",
                "auto",
                f"at least two blocks, but of the {size(tightest.free_bytes)} that are free on "
                f"{_called(tightest)} {size(beside)} are for buffers and kept free, and a "
                f"block needs {block * tightest.kv_bytes_per_token}",
            )
    if reserve is None:
        # of a pool that was chosen, what the budget left: a quarter anew could be a block more
        reserve = kept or _auto_reserve(config, budget, whole)
        sources["reserve_tokens"] = (
            "auto: one block, the budget holds the workspace"
            if budget >= whole
            else "auto: 25 % of the pool, at most 16,384"
        )
    for device in facts.holders:
        if (budget + reserve) * block > device.most_tokens():
            most = max(0, device.most_tokens() // block - reserve) * block
            buffers = (
                f"buffers beside it take {size(device.bytes_beside((budget + reserve) * block))}"
            )
            if not device.is_host and config.ubatch >= 64:
                buffers += f"; ubatch_tokens={config.ubatch // 2} needs less"
            raise ConfigError(
                "budget_tokens",
                budget * block,
                f"at most {most} beside a reserve of {reserve * block} "
                f"({device.free_bytes / GIB:.1f} of the {device.total_bytes / GIB:.1f} GiB of "
                f"{_called(device)} are free; {buffers})",
            )
    for device in facts.devices:
        if not device.is_host and not device.kv_bytes_per_token:
            _check_room(config, device, (budget + reserve) * block, is_automatic=is_automatic)
    return budget, reserve


def _check_room(
    config: MemoryConfig, device: DeviceMemory, pool_tokens: int, *, is_automatic: bool
) -> None:
    """A GPU without cells has no say in the pool, but its own buffers."""
    needed, what = device.bytes_beside(pool_tokens), "for buffers"
    if is_automatic:
        needed, what = needed + device.headroom_bytes, "for buffers and kept free"
    if needed > device.free_bytes:
        less = f"; ubatch_tokens={config.ubatch // 2} needs less" if config.ubatch >= 64 else ""
        raise ConfigError(
            "n_gpu_layers",
            f"more than {device.name} has room for",
            f"less: of the {size(device.free_bytes)} that are free there {size(needed)} are "
            f"{what}{less}",
        )


def _whole_blocks(config: MemoryConfig, workspace: int) -> int:
    """A budget for all of it: beside the sink and the block that is written, one to look back."""
    return max(-(-workspace // config.block_tokens), config.n_sink_blocks + 2)


def _auto_reserve(config: MemoryConfig, budget: int, whole: int) -> int:
    return 1 if budget >= whole else _quarter(config, budget * 4 // 3)


def _quarter(config: MemoryConfig, pool_blocks: int) -> int:
    """A quarter of the pool, at least a block, at most 16,384 tokens."""
    return max(1, min(pool_blocks // 4, MAX_AUTO_RESERVE_TOKENS // config.block_tokens))


def _resolve_host(
    config: MemoryConfig, facts: MemoryFacts, pool_tokens: int, sources: dict[str, str]
) -> int:
    least = config.block_tokens * facts.host_bytes_per_token
    if config.host_limit_bytes is not None:
        sources["host_limit_bytes"] = "given"
        given = config.host_limit_bytes
        if not least <= given <= facts.host_bytes:
            raise ConfigError(
                "host_limit_bytes",
                given,
                f"from {size(least)} (a block) to the machine's {size(facts.host_bytes)}",
            )
        return given
    used = sum(device.bytes_of(pool_tokens) for device in facts.devices if device.is_host)
    free = facts.free_host_bytes - used
    sources["host_limit_bytes"] = f"auto: {HOST_FRACTION:.0%} of the free host memory"
    if HOST_FRACTION * free < least:
        raise ConfigError(
            "host_limit_bytes",
            "auto",
            f"at least {size(least)} (a block), but {size(max(0, free))} are left beside the pool",
        )
    return int(HOST_FRACTION * free)


def _called(device: DeviceMemory) -> str:
    return device.name or "the machine"


def size(n_bytes: int) -> str:
    """For a line that tells what does not fit."""
    mib = n_bytes / (1 << 20)
    if n_bytes >= GIB:
        return f"{n_bytes / GIB:.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"
