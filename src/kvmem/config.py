"""Settings: frozen dataclasses that check themselves.

A field that is None is chosen later, from the model and the free memory, by `sizes.resolve`.
Every broken rule raises ConfigError with the setting, its value and the rule.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvmem.errors import ConfigError
from kvmem.server_config import ServerConfig

__all__ = [
    "DraftConfig",
    "DraftState",
    "EngineConfig",
    "FlashAttention",
    "KvType",
    "MemoryConfig",
    "ModelConfig",
    "QueryPolicy",
    "QueryReplay",
    "Scorer",
    "ServerConfig",
    "SpecType",
]

KvType = Literal["f32", "f16", "q8_0", "q5_0", "q4_0"]
FLOAT_KV_TYPES = ("f32", "f16")
Scorer = Literal["fused", "heads", "lexical", "mass", "cosine", "recency"]
QueryReplay = Literal["auto", "legacy"]
QueryPolicy = Literal["user", "legacy"]
FlashAttention = Literal["auto", "on", "off"]
SpecType = Literal["none", "draft-mtp"]
DraftState = Literal["snapshots", "replay"]

MAX_DRAFTS = 5
MAX_COUNT = (1 << 31) - 1  # llama.cpp counts tokens and layers in 32 bits
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS
MAX_BYTES = 1 << 50

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded.

    path: GGUF file (the first one of a split model).
    n_gpu_layers: -1 for all that fit the build, 0 for the CPU alone.
    n_threads, n_threads_batch: decode and prefill threads; None for the cores this process may use.
    chat_template: Jinja source that replaces the model's own template.
    """

    path: Path
    n_gpu_layers: int = -1
    n_threads: int | None = None
    n_threads_batch: int | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        _within("n_gpu_layers", self.n_gpu_layers, -1)
        for name in ("n_threads", "n_threads_batch"):
            value = getattr(self, name)
            if value is not None:
                _within(name, value, 1, MAX_THREADS)

    @property
    def threads(self) -> int:
        """Threads of a decode step."""
        return self.n_threads or len(os.sched_getaffinity(0))

    @property
    def threads_batch(self) -> int:
        """Threads of a prefill batch: as in decode unless given."""
        return self.n_threads_batch or self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The tiered KV memory.

    enabled: False is plain llama.cpp with a cache of workspace_tokens cells.
    workspace_tokens: logical limit of a history; None for the trained length.
    budget_tokens: history that attention sees at one time; floored to blocks; None for what fits.
    reserve_tokens: cells kept free for one reply; None for 25 % of the pool, at most 16,384.
    block_tokens: unit of choice and transfer.
    sink_tokens: always visible head of the history, floored to blocks; 0 for one block.
    recent_tokens: always visible newest part; None for 128, less where the budget is small.
    host_limit_bytes: limit of the host store, allocated as it fills; None for half of the free RAM.
    calibration: "auto" uses the pairs that `kvmem calibrate` found for this model and KV types, if
        it was run; "off" does not; else the path of such a file, which must hold.
    query_replay: "auto" reads a question again only where it saw other blocks than those that were
        chosen for it; "legacy" always.
    query_policy: "user" asks with the last user message, and keeps its Q for what follows below it;
        "legacy" asks anew with all that is new from that message on.
    conversations: histories that are kept and take turns on the device.
    conversations_bytes: what they may take of the host limit together, while there are several;
        None for all of it.
    device_checkpoint: of a hybrid model, keep the state that a second pass of a question begins
        from on the device as well, which takes the memory of one state there.
    ordered: place blocks in position order (bit-equality tests), at the cost of moves.
    """

    enabled: bool = True
    workspace_tokens: int | None = None
    budget_tokens: int | None = None
    reserve_tokens: int | None = None
    block_tokens: int = 128
    sink_tokens: int = 0
    recent_tokens: int | None = None
    host_limit_bytes: int | None = None
    scorer: Scorer = "fused"
    calibration: str = "auto"
    query_replay: QueryReplay = "auto"
    query_policy: QueryPolicy = "user"
    type_k: KvType = "q8_0"
    type_v: KvType = "q8_0"
    conversations: int = 1
    conversations_bytes: int | None = None
    device_checkpoint: bool = False
    ordered: bool = False
    batch_tokens: int = 512
    ubatch_tokens: int | None = None
    flash_attn: FlashAttention = "auto"

    def __post_init__(self) -> None:
        _one_of("scorer", self.scorer, get_args(Scorer))
        _one_of("query_replay", self.query_replay, get_args(QueryReplay))
        _one_of("query_policy", self.query_policy, get_args(QueryPolicy))
        # plain llama.cpp takes any two
        _require_pair("type_k", self.type_k, "type_v", self.type_v, may_mix=not self.enabled)
        _one_of("flash_attn", self.flash_attn, get_args(FlashAttention))
        if self.type_v not in FLOAT_KV_TYPES and self.flash_attn == "off":
            raise ConfigError("flash_attn", "off", f"on or auto with type_v={self.type_v}")
        _within("batch_tokens", self.batch_tokens, 1)
        if self.ubatch_tokens is not None:
            _within("ubatch_tokens", self.ubatch_tokens, 1)
            if self.ubatch_tokens > self.batch_tokens:
                raise ConfigError(
                    "ubatch_tokens", self.ubatch_tokens, f"at most batch_tokens={self.batch_tokens}"
                )
        if self.workspace_tokens is not None:
            _within("workspace_tokens", self.workspace_tokens, 1)
        if self.enabled:
            self._check_blocks()

    def _check_blocks(self) -> None:
        block = self.block_tokens
        if not 8 <= block <= 1024 or block % 8:
            raise ConfigError("block_tokens", block, "a multiple of 8 from 8 to 1024")
        for name in ("budget_tokens", "reserve_tokens"):
            value = getattr(self, name)
            if value is None:
                continue
            if name == "budget_tokens" and value < 2 * block:
                rule = f"at least two blocks (block_tokens={block}), of which the sink is one"
                raise ConfigError(name, value, rule)
            if value < block:
                raise ConfigError(name, value, f"at least one block (block_tokens={block})")
            _within(name, value, block)
            if value % block:
                whole = value // block * block
                _log.warning(
                    "%s=%d is no multiple of block_tokens=%d; using %d", name, value, block, whole
                )
                object.__setattr__(self, name, whole)
        _within("sink_tokens", self.sink_tokens, 0)
        _within("conversations", self.conversations, 1)
        if self.conversations_bytes is not None:
            _within("conversations_bytes", self.conversations_bytes, 1, MAX_BYTES)
            if self.conversations == 1:
                raise ConfigError(
                    "conversations_bytes",
                    self.conversations_bytes,
                    "given with conversations of 2 or more",
                )
            if self.host_limit_bytes is not None and (
                self.conversations_bytes > self.host_limit_bytes
            ):
                raise ConfigError(
                    "conversations_bytes",
                    self.conversations_bytes,
                    f"at most host_limit_bytes={self.host_limit_bytes}, of which it is a part",
                )
        if self.recent_tokens is not None:
            _within("recent_tokens", self.recent_tokens, 0)
        if self.host_limit_bytes is not None:
            _within("host_limit_bytes", self.host_limit_bytes, 1, MAX_BYTES)
        if self.budget_tokens is not None:
            self.check_pins(self.budget_tokens)

    def check_pins(self, budget_tokens: int) -> None:
        """What is always visible must leave room for what is chosen."""
        sink = self.n_sink_blocks * self.block_tokens
        if max(sink, self.sink_tokens) >= budget_tokens:
            raise ConfigError(
                "sink_tokens",
                max(sink, self.sink_tokens),
                f"below budget_tokens={budget_tokens} (the sink is at least one block)",
            )
        if self.recent_tokens is not None and sink + self.recent_tokens >= budget_tokens:
            raise ConfigError(
                "recent_tokens",
                self.recent_tokens,
                f"below budget_tokens={budget_tokens} less the sink of {sink}",
            )

    @property
    def ubatch(self) -> int:
        """llama.cpp's physical batch: as the logical one unless given."""
        return self.ubatch_tokens or self.batch_tokens

    @property
    def n_sink_blocks(self) -> int:
        return max(1, self.sink_tokens // self.block_tokens)

    @property
    def n_slack_blocks(self) -> int:
        """Slots beyond budget and reserve: ordered placement shifts blocks through a free one."""
        return 1 if self.ordered else 0

    @property
    def budget_blocks(self) -> int | None:
        """Blocks of the budget; None while it is to be chosen."""
        return None if self.budget_tokens is None else self.budget_tokens // self.block_tokens

    @property
    def reserve_blocks(self) -> int | None:
        """Blocks of the reserve; None while it is to be chosen."""
        return None if self.reserve_tokens is None else self.reserve_tokens // self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Speculative decoding.

    spec_type: "draft-mtp" lets the model's own MTP block propose tokens.
    n_max: most proposals of a step. n_min: fewer than these are not tried.
    p_min: a step's proposals end before the first that the block holds for less likely than this,
        among the ten likeliest tokens.
    type_k, type_v: of the block's K and V.
    state: how failed proposals leave the recurrent state: "snapshots" keeps one state for each,
        "replay" one in all and the inputs of the last tokens.
    """

    spec_type: SpecType = "none"
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    state: DraftState = "snapshots"

    def __post_init__(self) -> None:
        _one_of("mtp_state", self.state, get_args(DraftState))
        _one_of("spec_type", self.spec_type, get_args(SpecType))
        _require_pair("spec_draft_type_k", self.type_k, "spec_draft_type_v", self.type_v)
        if not 1 <= self.n_max <= MAX_DRAFTS:
            raise ConfigError("spec_draft_n_max", self.n_max, f"from 1 to {MAX_DRAFTS}")
        if not 0 <= self.n_min <= self.n_max:
            raise ConfigError(
                "spec_draft_n_min", self.n_min, f"from 0 to spec_draft_n_max={self.n_max}"
            )
        if not 0 <= self.p_min <= 1:
            raise ConfigError("spec_draft_p_min", self.p_min, "from 0 to 1")

    @property
    def enabled(self) -> bool:
        return self.spec_type != "none"

    @property
    def n_rollback(self) -> int:
        """Tokens that may have to be taken out of the recurrent state."""
        return self.n_max if self.enabled else 0

    @property
    def replays(self) -> bool:
        """Whether that is done by recorded inputs."""
        return self.enabled and self.state == "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an Engine needs."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        if not self.draft.enabled:
            return
        if not self.memory.enabled:
            raise ConfigError("spec_type", self.draft.spec_type, "none with --no-kvmem")
        # a step's drafts and the token before them, and llama.cpp keeps one more apart
        if self.memory.ubatch < self.draft.n_max + 2:
            raise ConfigError(
                "ubatch_tokens",
                self.memory.ubatch,
                f"at least {self.draft.n_max + 2} with spec_draft_n_max={self.draft.n_max}",
            )
        if self.draft.type_v not in FLOAT_KV_TYPES and self.memory.flash_attn == "off":
            rule = f"on or auto with spec_draft_type_v={self.draft.type_v}"
            raise ConfigError("flash_attn", "off", rule)


def _within(setting: str, value: int, least: int, most: int = MAX_COUNT) -> None:
    if value < least:
        raise ConfigError(setting, value, f"at least {least}")
    if value > most:
        raise ConfigError(setting, value, f"at most {most}")


def _one_of(setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(setting, value, f"one of {', '.join(allowed)}")


def _require_pair(
    name_k: str, type_k: str, name_v: str, type_v: str, *, may_mix: bool = False
) -> None:
    """Types that K and V can have together."""
    _one_of(name_k, type_k, get_args(KvType))
    _one_of(name_v, type_v, get_args(KvType))
    if may_mix or type_k == type_v:
        return
    if type_k in FLOAT_KV_TYPES or type_v in FLOAT_KV_TYPES:
        raise ConfigError(name_v, type_v, f"as {name_k}={type_k}, where one of them is a float")
