"""Every architecture that llama.cpp knows: whether it runs with KV memory, and if not, why.

Data alone. test_architectures.py writes a tiny model of each and holds the table to it, and
scripts/gen-docs makes the table of docs/models.md from it. `keys` are those that differ from BASE;
llama.cpp asks by name for keys that it misses, and gets the value of DEFAULTS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

Value = bool | int | float | str | tuple[int, ...] | npt.NDArray[np.uint64]
Keys = Mapping[str, Value]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, N_FF, WINDOW_TOKENS = 128, 4, 2, 32, 64, 64

BASE: Final[Keys] = MappingProxyType(
    {
        "context_length": 131072,
        "embedding_length": WIDTH,
        "block_count": 2,
        "feed_forward_length": N_FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
    }
)

DEFAULTS: Final[Keys] = MappingProxyType(
    {
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "adapters.count": 1,
        "adapters.lora_rank": 8,
        "adapters.router_gain": 1.0,
        "adapters.token_ids_activate": (270,),
        "adapters.token_ids_substitute": (271,),
        "attention.clamp_kqv": 4.0,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.indexer.block_size": 4,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": HEAD_DIM,
        "attention.indexer.kpool": 4,
        "attention.indexer.local_blocks": 1,
        "attention.indexer.top_k": 16,
        "attention.key_length": HEAD_DIM,
        "attention.kv_lora_rank": 32,
        "attention.max_alibi_bias": 8.0,
        "attention.output_group_count": 4,
        "attention.output_lora_rank": 16,
        "attention.q_lora_rank": 32,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": WINDOW_TOKENS,
        "attention.value_length": HEAD_DIM,
        "attn_res.block_size": 12,
        "convnext.block_count": 2,
        "convnext.embedding_length": WIDTH,
        "embedding_length_per_layer_input": 32,
        "expert_count": 4,
        "expert_feed_forward_length": N_FF,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": N_FF,
        "expert_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "features_length": WIDTH,
        "hash_layer_count": 0,
        "hrm.h_cycles": 2,
        "hrm.l_cycles": 2,
        "hrm.layers_per_stack": 1,
        "hyper_connection.count": 4,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.low_rank": 8,
        "hyper_connection.magnitude": 2.0,
        "hyper_connection.sinkhorn_iterations": 2,
        "interleave_moe_layer_step": 2,
        "kda.gate_lower_bound": -5.0,
        "kda.head_dim": HEAD_DIM,
        "kda.safe_gate": True,
        "leading_dense_block_count": 1,
        "logit_scale": 1.0,
        "moe_every_n_layers": 2,
        "moe_latent_size": 32,
        "num_loops": 2,
        "posnet.block_count": 2,
        "posnet.embedding_length": WIDTH,
        "residual_scale": 1.5,
        "rope.dimension_count": HEAD_DIM,
        "rope.dimension_sections": (4, 4, 4, 4),
        "rope.scaling.original_context_length": 256,
        "shortconv.l_cache": 3,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "ssm.inner_size": 2 * WIDTH,
        "ssm.state_size": 16,
        "ssm.time_step_rank": HEADS,
        "swiglu_clamp_exp": 10.0,
        "time_decay_extra_dim": 16,
        "time_mix_extra_dim": 16,
        "use_parallel_residual": False,
        "wkv.head_size": HEAD_DIM,
        **{f"xielu.{name}": 1.0 for name in ("alpha_n", "alpha_p", "beta")},
        "xielu.eps": 1e-7,
    }
)

EXPERTS: Final[Keys] = MappingProxyType(
    {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": 32,
        "expert_latent_length": N_FF,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
        "interleave_moe_layer_step": 2,
        "leading_dense_block_count": 1,
    }
)
LATENT: Final[Keys] = MappingProxyType(
    {
        "attention.head_count_kv": 1,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.kv_lora_rank": 32,
        "attention.q_lora_rank": 32,
        "rope.dimension_count": 16,
    }
)
INDEXER: Final[Keys] = MappingProxyType(
    {"attention.indexer.head_count": 64, "attention.indexer.key_length": 128}
)
DELTA_NET: Final[Keys] = MappingProxyType(
    {
        "full_attention_interval": 2,
        "ssm.inner_size": 128,
        "ssm.state_size": 32,
        "rope.dimension_count": 16,
        "rope.dimension_sections": (3, 3, 2, 0),
    }
)
SHARED_ROPE: Final[Keys] = MappingProxyType(
    {
        "attention.head_count_kv": HEADS,
        "attention.key_length": 96,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
    }
)
WINDOW: Final[Keys] = MappingProxyType(
    {"attention.sliding_window": WINDOW_TOKENS, "attention.sliding_window_pattern": 2}
)
WINDOW_LIST: Final[Keys] = MappingProxyType(
    {"attention.sliding_window": WINDOW_TOKENS, "attention.sliding_window_pattern": (1, 0)}
)
EQUAL_HEADS: Final[Keys] = MappingProxyType({"attention.head_count_kv": HEADS})
FIRST_HAS_KV: Final[Keys] = MappingProxyType({"attention.head_count_kv": (KV_HEADS, 0)})
SCALED: Final[Keys] = MappingProxyType(
    {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a model is refused. message: a part of the error. plain: whether --no-kvmem runs it."""

    message: str
    because: str
    plain: bool = True


REASONS: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "window": Reason(
            "sliding-window layers keep a second cache",
            "sliding-window layers keep a second cache, whose cells cannot be placed",
        ),
        "recurrent": Reason("purely recurrent", "a recurrent state alone: no blocks to tier"),
        "mla": Reason("MLA layers keep a latent K alone", "MLA: a latent K, and no V rows"),
        "msa": Reason("an MSA cache mirrors", "MSA: an index mirrors the cells of K and V"),
        "dsa": Reason("a DSA cache mirrors", "DSA: an index mirrors the cells of K"),
        "dsv4": Reason("a DSV4 cache compresses", "DSV4: K of groups of tokens, beside a window"),
        "index": Reason(
            "a hybrid cache with an index", "hybrid with an index that mirrors the cells of K and V"
        ),
        "flash": Reason("flash attention is off", "no flash attention, so V lies in columns"),
        "router": Reason(
            "its router looks", "a router looks for the newest switch token in the whole history"
        ),
        "cache": Reason("keeps no KV cache", "no KV cache: an encoder, or audio", plain=False),
        "ahead": Reason("attention looks ahead", "attention looks ahead: embeddings", plain=False),
        "encoder": Reason("what an encoder made", "needs an encoder, or is a draft", plain=False),
        "diffusion": Reason("writes by diffusion", "writes by diffusion", plain=False),
    }
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A tiny model and what comes of it. reason: a name in REASONS, "" where memory runs it.

    label: what the table says of a variant. extras: optional tensors that it has.
    """

    arch: str
    reason: str = ""
    keys: Keys = field(default_factory=dict)
    label: str = ""
    extras: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arch}, {self.label}" if self.label else self.arch


def kinds(names: str, reason: str = "", *keys: Keys) -> list[Kind]:
    """Architectures of one outcome that need the same keys."""
    return [
        Kind(name, reason, {k: v for one in keys for k, v in one.items()}) for name in names.split()
    ]


LAYERED_FF: Final[Keys] = MappingProxyType(
    {
        "block_count": 3,
        "feed_forward_length": (0, 0, N_FF),
        "attention.head_count": (HEADS, 0, 0),
        "attention.head_count_kv": (KV_HEADS, 0, 0),
    }
)
NGRAMS: Final[Keys] = MappingProxyType(
    {
        "attention.compress_ratios": (4, 4),
        "ple.layers": (0,),
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "ple.layer_multipliers": np.array([1, 3, 5], np.uint64),
        "ple.head_offsets": np.array([0, 282, 564, 846], np.uint64),
        "ple.head_vocab_sizes": np.array([282] * 4, np.uint64),
        "embedding_length_per_layer_input": 32,
    }
)

ARCHITECTURES: Final[tuple[Kind, ...]] = (
    # one attention cache
    *kinds(
        "llama deci falcon gptneox baichuan refact bloom stablelm qwen qwen2 qwen2vl qwen3 "
        "qwen3vl phi2 phi3 plamo plamo3 codeshell orion internlm2 minicpm gemma starcoder2 xverse "
        "command-r olmo olmo2 chatglm glm4 bitnet jais jais2 nemotron exaone exaone4 granite "
        "arcee ernie4_5 smollm3 seed_oss apertus cogvlm pangu-embedded mistral3 "
        "nanbeige pockettts k2-horizon openelm hunyuan-dense hunyuan_vl maincoder talkie"
    ),
    *kinds("hrm_text", "", {"block_count": 6}),
    *kinds("gpt2 starcoder mpt", "", {"context_length": 4096}),
    *kinds(
        "qwen2moe qwen3moe qwen3vlmoe phimoe dbrx arctic deepseek glm4moe granitemoe bailingmoe "
        "bailingmoe2 ernie4_5-moe hunyuan-moe hy_v3 smallthinker grovemoe minimax-m2 mellum laguna",
        "",
        EXPERTS,
    ),
    *kinds("olmoe dots1 deepseek2-ocr", "", EXPERTS, EQUAL_HEADS),
    *kinds("paddleocr", "", EXPERTS, {"rope.dimension_sections": (4, 6, 6, 0)}),
    *kinds("minicpm3", "", SHARED_ROPE),
    # an attention cache beside a recurrent state
    *kinds("qwen35", "", DELTA_NET),
    *kinds("qwen35moe qwen3next", "", EXPERTS, DELTA_NET),
    *kinds("jamba granitehybrid lfm2", "", FIRST_HAS_KV),
    *kinds("lfm2moe", "", EXPERTS, FIRST_HAS_KV),
    *kinds("falcon-h1"),
    *kinds("plamo2", "", FIRST_HAS_KV, {"ssm.group_count": 0}),
    *kinds("nemotron_h", "", LAYERED_FF),
    *kinds("nemotron_h_moe", "", EXPERTS, LAYERED_FF),
    *kinds("minimax-01", "", EXPERTS, {"full_attention_interval": 2}),
    # refused with memory, plain without
    *kinds("gemma2 gemma3", "window", WINDOW),
    *kinds(
        "gemma3n",
        "window",
        WINDOW,
        {
            "block_count": 22,
            "embedding_length": 64,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
            "attention.sliding_window_pattern": 5,
            "embedding_length_per_layer_input": 16,
        },
    ),
    Kind(
        "gemma4",
        "window",
        {
            **WINDOW_LIST,
            "attention.key_length_swa": HEAD_DIM,
            "attention.value_length_swa": HEAD_DIM,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 32,
            "rope.freq_base_swa": 10000.0,
        },
        extras=("rope_freqs.weight",),
    ),
    *kinds("cohere2 gpt-oss", "window", EXPERTS, WINDOW),
    *kinds("llama4 afmoe", "window", EXPERTS, WINDOW, {"block_count": 4}),
    *kinds("exaone-moe", "window", EXPERTS, WINDOW),
    *kinds("cohere2moe mimo2 step35 maple", "window", EXPERTS, WINDOW_LIST),
    *kinds("granite_swa muse-glimmer spark2_5", "window", WINDOW_LIST),
    *kinds("mamba mamba2", "recurrent"),
    *kinds("rwkv6", "recurrent", {"wkv.head_size": 64}),
    *kinds("deepseek2 mistral4", "mla", EXPERTS, LATENT),
    *kinds("kimi-linear kimi-k3", "mla", EXPERTS, LATENT, {"attention.head_count_kv": (1, 0)}),
    *kinds(
        "bailingmoe3",
        "mla",
        EXPERTS,
        LATENT,
        {"attention.head_count_kv": (1, 0), "rope.dimension_sections": (2, 3, 3, 0)},
    ),
    *kinds("minimax-m3", "msa", EXPERTS, {"attention.indexer.head_count": KV_HEADS}),
    *kinds("deepseek32 glm-dsa", "dsa", EXPERTS, LATENT, INDEXER),
    *kinds(
        "hy_v4",
        "dsa",
        EXPERTS,
        LATENT,
        INDEXER,
        {"attention.indexer.types": (1, 0), "attention.indexer.top_k": 16},
    ),
    *kinds(
        "dots3note",
        "dsa",
        EXPERTS,
        LATENT,
        INDEXER,
        {
            **{f"{name}_swa": value for name, value in LATENT.items() if "attention.k" in name},
            "attention.value_length_swa": 32,
            "attention.value_length_mla_swa": 32,
            "attention.sliding_window": WINDOW_TOKENS,
            "attention.sliding_window_pattern": (0, 1),
            "attention.indexer.types": (1, 0),
            "rope.freq_base_swa": 10000.0,
        },
    ),
    *kinds(
        "deepseek4",
        "dsv4",
        EXPERTS,
        INDEXER,
        {
            "block_count": 4,
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.compress_ratios": (0, 0, 4, 128),
            "attention.sliding_window": WINDOW_TOKENS,
            "expert_gating_func": 4,
            "rope.dimension_count": 16,
        },
    ),
    *kinds(
        "glm5-next",
        "index",
        EXPERTS,
        LATENT,
        {
            "attention.head_count_kv": (1, 0),
            "attention.key_length": HEAD_DIM,
            "attention.indexer.types": (1, 0),
            "rope.dimension_count": 0,
        },
    ),
    *kinds("qwen4exp", "index", EXPERTS, DELTA_NET, NGRAMS, {"rope.dimension_count": HEAD_DIM}),
    *kinds("grok", "flash", EXPERTS),
    *kinds("graniteswitch", "router"),
    # what cannot continue a text
    *kinds("bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v3 eurobert", "cache"),
    *kinds("jina-bert-v2", "cache", EQUAL_HEADS),
    *kinds("wavtokenizer-dec", "cache"),
    *kinds("llama-embed gemma-embedding gemma-embedding2", "ahead"),
    *kinds("t5 t5encoder", "encoder", EQUAL_HEADS),
    *kinds("eagle3", "encoder", {"target_layers": (0, 1, 1), "target_hidden_size": WIDTH}),
    *kinds("dflash", "encoder", {"target_layers": (0, 1), "target_hidden_size": WIDTH}),
    *kinds("dream llada", "diffusion"),
    *kinds("llada-moe rnd1", "diffusion", EXPERTS),
)

VARIANTS: Final[tuple[Kind, ...]] = (
    Kind("llama", "", {**SCALED, "rope.scaling.type": "yarn"}, "YaRN"),
    Kind("llama", "", {}, "frequency factors", ("rope_freqs.weight",)),
    Kind("stablelm", "", {"rope.dimension_count": 16}, "partial RoPE"),
    Kind(
        "phi3",
        "",
        {**SCALED, "rope.scaling.attn_factor": 1.2},
        "LongRoPE",
        ("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    Kind(
        "mistral3",
        "",
        {**SCALED, "rope.scaling.type": "yarn", "attention.temperature_scale": 0.1},
        "YaRN and attention temperature",
    ),
    Kind(
        "deci",
        "",
        {
            "block_count": 4,
            "attention.head_count": (HEADS, 0, HEADS, HEADS),
            "attention.head_count_kv": (KV_HEADS, 0, 0, 1),
            "feed_forward_length": (N_FF,) * 4,
        },
        "layers without attention",
    ),
    Kind(
        "openelm",
        "",
        {
            "attention.head_count": (4, 8),
            "attention.head_count_kv": (2, 4),
            "feed_forward_length": (64, 96),
        },
        "layers of other head counts",
    ),
    Kind("deepseek2", "", {**EXPERTS, **SHARED_ROPE}, "converted without MLA"),
    Kind(
        "hunyuan-dense",
        "",
        {
            **SCALED,
            "rope.scaling.type": "yarn",
            "attention.key_length": 64,
            "attention.value_length": 64,
        },
        "YaRN and wide heads",
    ),
    Kind(
        "minicpm3",
        "",
        {**SHARED_ROPE, "attention.key_length": 64},
        "wide heads",
    ),
    *(
        Kind(arch, "window", {**keys, **WINDOW}, "with a window")
        for arch, keys in (
            ("olmo2", {}), ("plamo3", {}), ("smallthinker", EXPERTS),
            ("laguna", EXPERTS), ("mellum", EXPERTS),
        )
    ),
    Kind("lfm2", "window", {**FIRST_HAS_KV, **WINDOW}, "with a window"),
    Kind("hy_v4", "mla", {**EXPERTS, **LATENT}, "without an index"),
    Kind("llama", "ahead", {"attention.causal": False}, "not causal"),
)  # fmt: skip

UNTRIED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "clip": "no language model: llama.cpp refuses the file",
        "gptj": "llama.cpp cannot load it",
        "gemma4-assistant": "a draft for gemma4: llama.cpp refuses it alone",
        "clef": "labels and no text; no tiny model of it yet",
        "chameleon": "no tiny model of it yet",
        "plm": "no tiny model of it yet",
        "qwen3tts": "speech; no tiny model of it yet",
        "rwkv6qwen2": "recurrent; no tiny model of it yet",
        "rwkv7": "recurrent; no tiny model of it yet",
        "arwkv7": "recurrent; no tiny model of it yet",
    }
)
"""Architectures without a tiny model, and what is known of them."""


def table() -> str:
    """The table of docs/models.md."""
    rows = {kind.name: kind.reason for kind in (*ARCHITECTURES, *VARIANTS)}
    lines = ["| with KV memory | models |", "|---|---|"]
    works = sorted(name for name, reason in rows.items() if not reason)
    lines.append(f"| yes | {'; '.join(works)} |")
    for key, reason in REASONS.items():
        names = sorted(name for name, found in rows.items() if found == key)
        plain = "" if reason.plain else ", also with `--no-kvmem`"
        lines.append(f"| refused{plain}: {reason.because} | {'; '.join(names)} |")
    untried = "; ".join(f"{name} ({why})" for name, why in sorted(UNTRIED.items()))
    lines.append(f"| not tried | {untried} |")
    return "\n".join(lines) + "\n"
