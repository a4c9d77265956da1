"""The options of an engine, which most commands have, as a dataclass: one field, one flag, one
variable.

A flag wins over its variable (LLAMA_ARG_* where llama-server has the flag, KVMEM_* where it is
ours). `cli.takes` gives a command the options of such classes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast

from kvmem.cli.flags import flag, llama_flag
from kvmem.config import (
    MAX_BYTES,
    DraftConfig,
    DraftState,
    EngineConfig,
    FlashAttention,
    KvType,
    MemoryConfig,
    ModelConfig,
    QueryPolicy,
    QueryReplay,
    Scorer,
    SpecType,
)
from kvmem.errors import ConfigError

__all__ = ["EngineOptions"]

GIB = 1 << 30


class Unsaid(NamedTuple):
    """What holds where nothing is given. max_ubatch: None for as large as a batch."""

    kv_dtype: KvType
    batch: int
    max_ubatch: int | None


OURS = Unsaid("q8_0", 512, None)
LLAMA_CPP = Unsaid("f16", 2048, 512)
"""Its own defaults, so that --no-kvmem gives the logits that it gives."""

SWITCH = {"enabled": "on", "true": "on", "1": "on", "disabled": "off", "false": "off", "0": "off",
          "-1": "auto"}  # fmt: skip
"""llama-server's other words for a switch; what is none of them is MemoryConfig's to refuse."""

MODEL_PANEL = "Model"
MEMORY_PANEL = "Memory"
DRAFT_PANEL = "Drafts"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, memory and drafts."""

    model: Annotated[
        Path | None,
        llama_flag("-m", "--model", env="MODEL", panel=MODEL_PANEL, help="GGUF file of the model."),
    ] = None
    n_gpu_layers: Annotated[
        str,
        llama_flag(
            "-ngl", "--gpu-layers", "--n-gpu-layers", env="N_GPU_LAYERS", panel=MODEL_PANEL,
            help="Layers on the GPU: a number, or all.",
        ),
    ] = "all"  # fmt: skip
    threads: Annotated[
        int,
        llama_flag("-t", "--threads", env="THREADS", panel=MODEL_PANEL,
               help="Threads of a decode step; -1 for all cores that kvmem may use."),
    ] = -1  # fmt: skip
    threads_batch: Annotated[
        int,
        llama_flag("-tb", "--threads-batch", env="THREADS_BATCH", panel=MODEL_PANEL,
              help="Threads that read the prompt; -1 for as many as -t."),
    ] = -1  # fmt: skip
    mmap: Annotated[
        bool,
        flag("--mmap/--no-mmap", panel=MODEL_PANEL, help="Map the file instead of reading it."),
    ] = True
    mlock: Annotated[
        bool, flag("--mlock", panel=MODEL_PANEL, help="Keep the mapped model in RAM.")
    ] = False
    load_mode: Annotated[
        Literal["auto", "none", "mmap", "mlock", "mmap+mlock"],
        llama_flag("-lm", "--load-mode", env="LOAD_MODE", panel=MODEL_PANEL,
                   help="llama-server's name for both; wins over them. auto leaves it to them."),
    ] = "auto"  # fmt: skip
    chat_template: Annotated[
        str | None,
        llama_flag("--chat-template", env="CHAT_TEMPLATE", panel=MODEL_PANEL,
                   help="Jinja text in place of the model's chat template, or chatml."),
    ] = None  # fmt: skip
    chat_template_file: Annotated[
        Path | None,
        llama_flag("--chat-template-file", env="CHAT_TEMPLATE_FILE", panel=MODEL_PANEL,
               help="The same, from a file."),
    ] = None  # fmt: skip
    jinja: Annotated[
        bool,
        llama_flag("--jinja", env="JINJA", panel=MODEL_PANEL,
               help="Accepted for llama-server's sake: templates are always Jinja."),
    ] = False  # fmt: skip
    workspace: Annotated[
        int,
        llama_flag("-c", "--ctx-size", env="CTX_SIZE", panel=MEMORY_PANEL,
               help="Workspace: tokens that a history may have. It does not size the device pool. "
               "0 for the length that the model was trained for."),
    ] = 0  # fmt: skip
    kvmem: Annotated[
        bool,
        flag("--kvmem/--no-kvmem", panel=MEMORY_PANEL,
              help="Bounded working set with recall; off is plain llama.cpp."),
    ] = True  # fmt: skip
    budget: Annotated[
        int,
        flag("--kvmem-budget", env="KVMEM_BUDGET", panel=MEMORY_PANEL,
              help="History tokens on the device, in whole blocks. 0 for what free memory holds."),
    ] = 0  # fmt: skip
    reserve: Annotated[
        int | None,
        flag("--kvmem-gen-reserve", env="KVMEM_GEN_RESERVE", panel=MEMORY_PANEL,
              help="Cells kept free for a reply, which may still be longer. Left out: a quarter of "
              "the pool, at most 16384."),
    ] = None  # fmt: skip
    block: Annotated[
        int,
        flag("--kvmem-block-tokens", env="KVMEM_BLOCK_TOKENS", panel=MEMORY_PANEL,
              help="Tokens of a block, the unit of choice and transfer. A budget under 2048 "
              "tokens wants 32 or 16, one of 512 or less 8."),
    ] = 128  # fmt: skip
    sink: Annotated[
        int,
        flag("--kvmem-sink-tokens", env="KVMEM_SINK_TOKENS", panel=MEMORY_PANEL,
              help="Always visible head of the history; 0 for one block."),
    ] = 0  # fmt: skip
    recent: Annotated[
        int | None,
        flag("--kvmem-recent-tokens", env="KVMEM_RECENT_TOKENS", panel=MEMORY_PANEL,
              help="Always visible newest part. Left out: 128, less where the budget is small."),
    ] = None  # fmt: skip
    scorer: Annotated[
        Scorer,
        flag("--kvmem-scorer", env="KVMEM_SCORER", panel=MEMORY_PANEL,
              help="How blocks are ranked for a question."),
    ] = "fused"  # fmt: skip
    calibration: Annotated[
        str,
        flag("--kvmem-calibration", env="KVMEM_CALIBRATION", panel=MEMORY_PANEL,
              help="Which attention heads score: auto for what kvmem calibrate found for this "
              "model, off for the middle half of the layers, or a file that it wrote."),
    ] = "auto"  # fmt: skip
    query_replay: Annotated[
        QueryReplay,
        flag("--kvmem-query-replay", env="KVMEM_QUERY_REPLAY", panel=MEMORY_PANEL,
              help="auto: a question is read again only where it saw other blocks than those that "
              "were chosen for it. legacy: always."),
    ] = "auto"  # fmt: skip
    query_policy: Annotated[
        QueryPolicy,
        flag("--kvmem-query-policy", env="KVMEM_QUERY_POLICY", panel=MEMORY_PANEL,
              help="user: the last user message asks, also for what follows below it. legacy: all "
              "that is new from that message on asks, anew each time."),
    ] = "user"  # fmt: skip
    host_gb: Annotated[
        float,
        flag("--kvmem-host-gb", env="KVMEM_HOST_GB", panel=MEMORY_PANEL,
              help="Limit of the host store in GiB, taken as it fills and never passed. 0 for half "
              "of the free RAM."),
    ] = 0.0  # fmt: skip
    conversations: Annotated[
        int,
        flag("--kvmem-conversations", env="KVMEM_CONVERSATIONS", panel=MEMORY_PANEL,
              help="Histories that are kept and take turns on the device."),
    ] = 8  # fmt: skip
    conversations_gb: Annotated[
        float,
        flag("--kvmem-conversations-gb", "--kvmem-session-ram-gb", env="KVMEM_CONVERSATIONS_GB",
              panel=MEMORY_PANEL,
              help="GiB that all conversations may take of the host limit while there are several; "
              "the least recently used leaves. 0 for all of it."),
    ] = 0.0  # fmt: skip
    device_checkpoint: Annotated[
        bool,
        flag("--kvmem-device-checkpoint", env="KVMEM_DEVICE_CHECKPOINT", panel=MEMORY_PANEL,
              help="Of a hybrid model, keep the state that a question's second pass begins from on "
              "the device as well: faster to put back, for the memory of one state."),
    ] = False  # fmt: skip
    kv_dtype: Annotated[
        KvType | None,
        flag("--kv-dtype", env="KVMEM_KV_DTYPE", panel=MEMORY_PANEL,
              help="Type of K and V. Left out: q8_0, or f16 with --no-kvmem, as llama.cpp has it."),
    ] = None  # fmt: skip
    type_k: Annotated[
        KvType | None,
        llama_flag("-ctk", "--cache-type-k", env="CACHE_TYPE_K", panel=MEMORY_PANEL,
               help="Type of K alone; wins over --kv-dtype."),
    ] = None  # fmt: skip
    type_v: Annotated[
        KvType | None,
        llama_flag("-ctv", "--cache-type-v", env="CACHE_TYPE_V", panel=MEMORY_PANEL,
               help="Type of V alone; wins over --kv-dtype."),
    ] = None  # fmt: skip
    flash_attn: Annotated[
        str,
        llama_flag("-fa", "--flash-attn", env="FLASH_ATTN", panel=MEMORY_PANEL,
               help="Flash attention, which quantised V needs: on, off or auto."),
    ] = "auto"  # fmt: skip
    batch: Annotated[
        int | None,
        llama_flag("-b", "--batch-size", env="BATCH", panel=MEMORY_PANEL,
               help="Most tokens of one decode call. Left out: 512, or 2048 with --no-kvmem."),
    ] = None  # fmt: skip
    ubatch: Annotated[
        int | None,
        llama_flag("-ub", "--ubatch-size", env="UBATCH", panel=MEMORY_PANEL,
               help="Most tokens computed at once. Left out: as -b, with --no-kvmem at most 512."),
    ] = None  # fmt: skip

    spec_type: Annotated[
        SpecType,
        llama_flag("--spec-type", env="SPEC_TYPE", panel=DRAFT_PANEL,
               help="draft-mtp: the model's MTP block proposes tokens, and one batch verifies "
               "them. Replies stay the same."),
    ] = "none"  # fmt: skip
    spec_draft_n_max: Annotated[
        int,
        llama_flag("--spec-draft-n-max", env="SPEC_DRAFT_N_MAX", panel=DRAFT_PANEL,
               help="Most proposals of a step, 1 to 5."),
    ] = 3  # fmt: skip
    spec_draft_n_min: Annotated[
        int,
        llama_flag("--spec-draft-n-min", env="SPEC_DRAFT_N_MIN", panel=DRAFT_PANEL,
               help="Fewer proposals than these are not tried."),
    ] = 0  # fmt: skip
    spec_draft_p_min: Annotated[
        float,
        llama_flag("--spec-draft-p-min", "--draft-p-min", env="SPEC_DRAFT_P_MIN", panel=DRAFT_PANEL,
               help="A step's proposals end before the first that the MTP block holds for less "
               "likely than this, 0 to 1."),
    ] = 0.0  # fmt: skip
    spec_kv_dtype: Annotated[
        KvType,
        flag("--spec-kv-dtype", env="KVMEM_SPEC_KV_DTYPE", panel=DRAFT_PANEL,
              help="Type of the MTP block's K and V."),
    ] = "f16"  # fmt: skip
    spec_type_k: Annotated[
        KvType | None,
        llama_flag("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k",
               env="SPEC_DRAFT_CACHE_TYPE_K", panel=DRAFT_PANEL,
               help="Type of its K alone; wins over --spec-kv-dtype."),
    ] = None  # fmt: skip
    spec_type_v: Annotated[
        KvType | None,
        llama_flag("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v",
               env="SPEC_DRAFT_CACHE_TYPE_V", panel=DRAFT_PANEL,
               help="Type of its V alone; wins over --spec-kv-dtype."),
    ] = None  # fmt: skip
    mtp_state: Annotated[
        DraftState,
        flag("--kvmem-mtp-state", env="KVMEM_MTP_STATE", panel=DRAFT_PANEL,
              help="How failed proposals leave the recurrent state: by a snapshot for each, or by "
              "replay of recorded inputs, which takes less memory."),
    ] = "snapshots"  # fmt: skip

    def config(self) -> EngineConfig:
        """Raises ConfigError: a rule is broken, or no model is named."""
        if self.model is None:
            raise ConfigError("model", "not given", "the path of a GGUF file")
        if self.workspace < 0:
            rule = "at least 1, or 0 for the length that the model was trained for"
            raise ConfigError("workspace_tokens", self.workspace, rule)
        if not self.kvmem:
            self._check_plain()
        unsaid = OURS if self.kvmem else LLAMA_CPP
        batch = unsaid.batch if self.batch is None else self.batch
        ubatch = self.ubatch
        if ubatch is None and unsaid.max_ubatch is not None:
            ubatch = min(batch, unsaid.max_ubatch)
        return EngineConfig(
            model=ModelConfig(
                path=self.model,
                n_gpu_layers=_layers(self.n_gpu_layers),
                n_threads=_threads("n_threads", self.threads, "all cores"),
                n_threads_batch=_threads("n_threads_batch", self.threads_batch, "as many as -t"),
                use_mmap=self.mmap if self.load_mode == "auto" else "mmap" in self.load_mode,
                use_mlock=self.mlock if self.load_mode == "auto" else "mlock" in self.load_mode,
                chat_template=self._template(),
            ),
            memory=MemoryConfig(
                enabled=self.kvmem,
                workspace_tokens=self.workspace or None,
                budget_tokens=self.budget or None,
                reserve_tokens=self.reserve,
                block_tokens=self.block,
                sink_tokens=self.sink,
                recent_tokens=self.recent,
                host_limit_bytes=_bytes("kvmem_host_gb", self.host_gb),
                conversations=self.conversations,
                conversations_bytes=_bytes("kvmem_conversations_gb", self.conversations_gb),
                device_checkpoint=self.device_checkpoint,
                scorer=self.scorer,
                calibration=self.calibration,
                query_replay=self.query_replay,
                query_policy=self.query_policy,
                type_k=self.type_k or self.kv_dtype or unsaid.kv_dtype,
                type_v=self.type_v or self.kv_dtype or unsaid.kv_dtype,
                batch_tokens=batch,
                ubatch_tokens=ubatch,
                flash_attn=cast(FlashAttention, SWITCH.get(self.flash_attn, self.flash_attn)),
            ),
            draft=DraftConfig(
                spec_type=self.spec_type,
                n_max=self.spec_draft_n_max,
                n_min=self.spec_draft_n_min,
                p_min=self.spec_draft_p_min,
                type_k=self.spec_type_k or self.spec_kv_dtype,
                type_v=self.spec_type_v or self.spec_kv_dtype,
                state=self.mtp_state,
            ),
        )

    def _check_plain(self) -> None:
        """Plain llama.cpp has no use for these sizes."""
        for setting, value in (
            ("budget_tokens", self.budget),
            ("reserve_tokens", self.reserve),
            ("sink_tokens", self.sink),
            ("recent_tokens", self.recent),
            ("host_limit_bytes", self.host_gb),
            ("conversations_bytes", self.conversations_gb),
            ("device_checkpoint", self.device_checkpoint),
        ):
            if value:
                raise ConfigError("kvmem", "off", f"on with {setting}={value}")

    def _template(self) -> str | None:
        source = self._template_source()
        if source is not None and source != "chatml" and re.fullmatch(r"[\w.-]+", source):
            # a name of llama-server's own templates
            raise ConfigError("chat_template", source, "Jinja text, or chatml for the plain form")
        return source

    def _template_source(self) -> str | None:
        if self.chat_template_file is None:
            return self.chat_template
        if self.chat_template is not None:
            raise ConfigError(
                "chat_template_file", self.chat_template_file, "given without chat_template"
            )
        try:
            return self.chat_template_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "chat_template_file", self.chat_template_file, f"a readable file ({error})"
            ) from None


def _layers(text: str) -> int:
    if text in ("all", "auto"):
        return -1
    try:
        return int(text)
    except ValueError:
        raise ConfigError("n_gpu_layers", text, "a number, or all") from None


def _bytes(setting: str, gib: float) -> int | None:
    """None for 0, which leaves the choice to us."""
    if not 0 <= gib <= MAX_BYTES // GIB:  # nan is not, either
        raise ConfigError(setting, gib, f"GiB, from 0 to {MAX_BYTES // GIB}")
    return int(gib * GIB) if gib else None


def _threads(setting: str, count: int, otherwise: str) -> int | None:
    """None for -1, which leaves the choice to us."""
    if count < 1 and count != -1:
        raise ConfigError(setting, count, f"at least 1, or -1 for {otherwise}")
    return None if count == -1 else count
