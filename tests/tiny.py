"""Tiny random models of real architectures, written at test time with the gguf package.

`write(path, Shape(...))` writes one; `tests/models.py` has a session fixture for each kind.
All weights are F32 and depend on the shape alone, so two writers give equal files. They are
scaled so that attention is far from uniform: which blocks are resident changes the logits.
bench/gpu/shape27b.py writes the 27B's shape with the same code, in quantised types.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import gguf
import numpy as np
import numpy.typing as npt
import tiny_vocab

Arch = Literal[
    "llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "gemma3", "qwen35", "qwen35moe",
    "qwen3next",
]  # fmt: skip

N_HEADS: Final = 4
N_KV_HEADS: Final = 2
N_EXPERTS: Final = 4
N_EXPERTS_USED: Final = 2
SWA_TOKENS: Final = 64
CONV_TAPS: Final = 4

HYBRID: Final = frozenset({"qwen35", "qwen35moe", "qwen3next"})
QK_NORM: Final = frozenset({"qwen3", "qwen3moe", "gemma3"}) | HYBRID
SHARED_EXPERT: Final = frozenset({"qwen35moe", "qwen3next"})
EXPERTS: Final = frozenset({"qwen3moe"}) | SHARED_EXPERT


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model looks like; tiny, where nothing else is said.

    head_dim: a multiple of 64 turns on llama.cpp's Hadamard rotation of quantised K and V.
    n_layers: trunk layers, without the MTP block.
    attention_interval: in hybrids every n-th trunk layer has full attention, the others are
    linear; in gemma3 every n-th sees everything, the others the last SWA_TOKENS.
    mtp: append a multi-token-prediction block (hybrids only).
    width: of a token's row; 0 for 128, or what the architecture ties it to.
    n_ssm_keys, n_ssm_values: heads of the linear attention, of ssm_state dimensions each.
    rope_share: hybrids turn 1 / rope_share of a head's dimensions.
    name: of the model; empty for tiny-ARCH. pre: how the tokenizer splits words; empty for the
    architecture's. extra_tokens: user-defined ones.
    """

    arch: Arch = "llama"
    n_layers: int = 2
    head_dim: int = 32
    attention_interval: int = 4
    mtp: bool = False
    width: int = 0
    n_ff: int = 64
    n_heads: int = N_HEADS
    n_kv_heads: int = N_KV_HEADS
    ssm_state: int = 32
    n_ssm_keys: int = 2
    n_ssm_values: int = 4
    rope_base: float = 10000.0
    rope_share: int = 2
    file_type: gguf.LlamaFileType = gguf.LlamaFileType.ALL_F32
    context_tokens: int = 131072
    seed: int = 0
    template: str = tiny_vocab.CHATML_TOOLS
    name: str = ""
    pre: str = ""
    extra_tokens: tuple[str, ...] = ()

    @property
    def n_embd(self) -> int:
        """Width; qwen2 wants it equal to all heads together."""
        return self.width or (self.n_heads * self.head_dim if self.arch == "qwen2" else 128)

    def has_attention_cache(self, layer: int) -> bool:
        """Whether a layer keeps K and V (the others are recurrent)."""
        if self.arch not in HYBRID or layer >= self.n_layers:
            return True
        return (layer + 1) % self.attention_interval == 0


class Tensors:
    """Draws weights in call order and hands them to the writer.

    A subclass may store matrices in another type: only `matrix` gives them.
    """

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> None:
        """f32 [n_out, n_in]: unit variance in gives a variance of gain**2 out."""
        self.normal(name, (n_out, n_in), gain / n_in**0.5)

    def normal(self, name: str, shape: tuple[int, ...], scale: float) -> None:
        self.put(name, self._rng.standard_normal(shape) * scale)

    def ones(self, name: str, n: int, value: float = 1.0) -> None:
        self.put(name, np.full(n, value))

    def decay(self, name: str, n: int) -> None:
        """The negative rates of a recurrent state, so that it forgets and never grows."""
        self.put(name, -0.1 - np.abs(self._rng.standard_normal(n)) * 0.05)

    def put(self, name: str, values: npt.NDArray[np.floating]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))


def write(path: Path, shape: Shape) -> Path:
    """Write a model of this shape to `path`, which is returned."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    add_metadata(writer, shape)
    pre = shape.pre or ("qwen35" if shape.arch in HYBRID else "qwen2")
    ids = tiny_vocab.add_vocabulary(
        writer, pre=pre, template=shape.template, extra=shape.extra_tokens
    )
    writer.add_vocab_size(len(ids))
    add_tensors(Tensors(writer, shape.seed), shape, len(ids))
    finish(writer)
    return path


def add_tensors(tensors: Tensors, shape: Shape, n_vocab: int) -> None:
    """All weights of a model."""
    # gemma3 multiplies embeddings by sqrt(n_embd): start small, or no layer would matter.
    embedding = 1.0 if shape.arch == "gemma3" else shape.n_embd**0.5
    tensors.matrix("token_embd.weight", n_vocab, shape.n_embd, gain=embedding)
    tensors.ones("output_norm.weight", shape.n_embd)
    tensors.matrix("output.weight", n_vocab, shape.n_embd, gain=2.0)
    for layer in range(shape.n_layers):
        _add_layer(tensors, shape, layer)
    if shape.mtp:
        _add_mtp_block(tensors, shape)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Architecture, sizes and rotation, as llama.cpp reads them."""
    writer.add_name(shape.name or f"tiny-{shape.arch}")
    writer.add_file_type(shape.file_type)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers + shape.mtp)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.arch in HYBRID:
        # Some dimensions turn, in three interleaved sections (time, height, width).
        turned = shape.head_dim // shape.rope_share
        section = -(-turned // 6)
        writer.add_rope_dimension_count(turned)
        if shape.arch != "qwen3next":
            writer.add_rope_dimension_sections([section, section, turned // 2 - 2 * section, 0])
        writer.add_ssm_conv_kernel(CONV_TAPS)
        writer.add_ssm_state_size(shape.ssm_state)
        writer.add_ssm_group_count(shape.n_ssm_keys)
        writer.add_ssm_time_step_rank(shape.n_ssm_values)
        writer.add_ssm_inner_size(shape.n_ssm_values * shape.ssm_state)
        writer.add_full_attention_interval(shape.attention_interval)
        if shape.mtp:
            writer.add_nextn_predict_layers(1)
    else:
        writer.add_rope_dimension_count(shape.head_dim)
    if shape.arch in EXPERTS:
        writer.add_expert_count(N_EXPERTS)
        writer.add_expert_used_count(N_EXPERTS_USED)
        writer.add_expert_feed_forward_length(shape.n_ff)
    if shape.arch in SHARED_EXPERT:
        writer.add_expert_shared_feed_forward_length(shape.n_ff)
    if shape.arch == "gemma3":
        writer.add_sliding_window(SWA_TOKENS)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", shape.attention_interval)


def _add_layer(tensors: Tensors, shape: Shape, layer: int) -> None:
    prefix = f"blk.{layer}."
    tensors.ones(prefix + "attn_norm.weight", shape.n_embd)
    if shape.has_attention_cache(layer):
        _add_attention(tensors, shape, prefix)
    else:
        add_linear_attention(tensors, shape, prefix)
    after = "post_attention_norm" if shape.arch in HYBRID else "ffn_norm"
    tensors.ones(prefix + after + ".weight", shape.n_embd)
    if shape.arch == "gemma3":
        tensors.ones(prefix + "post_attention_norm.weight", shape.n_embd)
        tensors.ones(prefix + "post_ffw_norm.weight", shape.n_embd)
    if shape.arch in EXPERTS:
        _add_experts(tensors, shape, prefix)
    else:
        _add_feed_forward(tensors, shape, prefix)


def _add_attention(tensors: Tensors, shape: Shape, prefix: str) -> None:
    n_query = shape.n_heads * shape.head_dim
    n_kv = shape.n_kv_heads * shape.head_dim
    gated = 2 if shape.arch in HYBRID else 1  # they keep an output gate beside each query
    tensors.matrix(prefix + "attn_q.weight", gated * n_query, shape.n_embd, gain=1.5)
    tensors.matrix(prefix + "attn_k.weight", n_kv, shape.n_embd, gain=1.5)
    tensors.matrix(prefix + "attn_v.weight", n_kv, shape.n_embd)
    tensors.matrix(prefix + "attn_output.weight", shape.n_embd, n_query, gain=2.0)
    if shape.arch == "qwen2":
        for name, n in (("attn_q", n_query), ("attn_k", n_kv), ("attn_v", n_kv)):
            tensors.normal(f"{prefix}{name}.bias", (n,), 0.5)
    if shape.arch in QK_NORM:
        tensors.ones(prefix + "attn_q_norm.weight", shape.head_dim, 1.5)
        tensors.ones(prefix + "attn_k_norm.weight", shape.head_dim, 1.5)


def add_linear_attention(
    tensors: Tensors, shape: Shape, prefix: str, *, output_gain: float = 1.0
) -> None:
    """A Gated DeltaNet layer: it has a recurrent state and no K or V."""
    keys = shape.ssm_state * shape.n_ssm_keys
    values = shape.ssm_state * shape.n_ssm_values
    mixed = 2 * keys + values
    tensors.matrix(prefix + "attn_qkv.weight", mixed, shape.n_embd)
    tensors.matrix(prefix + "attn_gate.weight", values, shape.n_embd)
    tensors.normal(prefix + "ssm_conv1d.weight", (mixed, CONV_TAPS), 0.5)
    tensors.normal(prefix + "ssm_dt.bias", (shape.n_ssm_values,), 0.05)
    tensors.decay(prefix + "ssm_a", shape.n_ssm_values)
    if shape.arch == "qwen3next":  # both, key head by key head
        tensors.matrix(prefix + "ssm_ba.weight", 2 * shape.n_ssm_values, shape.n_embd)
    else:
        tensors.matrix(prefix + "ssm_beta.weight", shape.n_ssm_values, shape.n_embd)
        tensors.matrix(prefix + "ssm_alpha.weight", shape.n_ssm_values, shape.n_embd)
    tensors.ones(prefix + "ssm_norm.weight", shape.ssm_state)
    tensors.matrix(prefix + "ssm_out.weight", shape.n_embd, values, gain=output_gain)


def _add_feed_forward(tensors: Tensors, shape: Shape, prefix: str) -> None:
    tensors.matrix(prefix + "ffn_gate.weight", shape.n_ff, shape.n_embd)
    tensors.matrix(prefix + "ffn_up.weight", shape.n_ff, shape.n_embd)
    tensors.matrix(prefix + "ffn_down.weight", shape.n_embd, shape.n_ff)


def _add_experts(tensors: Tensors, shape: Shape, prefix: str) -> None:
    wide, narrow = shape.n_embd, shape.n_ff
    tensors.matrix(prefix + "ffn_gate_inp.weight", N_EXPERTS, wide)
    tensors.normal(prefix + "ffn_gate_exps.weight", (N_EXPERTS, narrow, wide), wide**-0.5)
    tensors.normal(prefix + "ffn_up_exps.weight", (N_EXPERTS, narrow, wide), wide**-0.5)
    tensors.normal(prefix + "ffn_down_exps.weight", (N_EXPERTS, wide, narrow), narrow**-0.5)
    if shape.arch in SHARED_EXPERT:  # one more that every token goes through, behind a gate
        tensors.normal(prefix + "ffn_gate_inp_shexp.weight", (wide,), wide**-0.5)
        tensors.matrix(prefix + "ffn_gate_shexp.weight", narrow, wide)
        tensors.matrix(prefix + "ffn_up_shexp.weight", narrow, wide)
        tensors.matrix(prefix + "ffn_down_shexp.weight", wide, narrow)


def _add_mtp_block(tensors: Tensors, shape: Shape) -> None:
    """One attention layer that reads (embedding, hidden row) and drafts the token after next."""
    _add_layer(tensors, shape, shape.n_layers)
    prefix = f"blk.{shape.n_layers}.nextn."
    tensors.matrix(prefix + "eh_proj.weight", shape.n_embd, 2 * shape.n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors.ones(f"{prefix}{name}.weight", shape.n_embd)


KINDS: Final[dict[str, Shape]] = {
    "llama": Shape(),
    "llama_64": Shape(head_dim=64),
    "qwen2": Shape(arch="qwen2"),
    "qwen3": Shape(arch="qwen3"),
    "qwen3_64": Shape(arch="qwen3", head_dim=64),
    "qwen3moe": Shape(arch="qwen3moe"),
    "smollm3": Shape(arch="smollm3", n_layers=4),
    "gemma3": Shape(arch="gemma3", n_layers=2, attention_interval=2),
    "qwen35": Shape(arch="qwen35", n_layers=4, attention_interval=2),
    "qwen35moe": Shape(arch="qwen35moe", n_layers=2, attention_interval=2),
    "qwen3next_mtp": Shape(arch="qwen3next", n_layers=2, attention_interval=2, mtp=True),
    "qwen35_mtp": Shape(arch="qwen35", n_layers=4, attention_interval=2, mtp=True),
    "qwen35_64": Shape(arch="qwen35", n_layers=2, attention_interval=2, head_dim=64, mtp=True),
}
"""The models that have a fixture: `tiny_NAME` in tests/models.py."""


def make_writer(folder: Path) -> Callable[..., Path]:
    """A function `model(kind, **changes)` that writes each wanted shape once into `folder`.

    `changes` are fields of Shape, such as head_dim, n_layers or seed.
    """

    def model(kind: str, **changes: object) -> Path:
        shape = replace(KINDS[kind], **changes)  # type: ignore[arg-type]
        label = "-".join([kind, *(f"{k}={v}" for k, v in changes.items() if k != "template")])
        if "template" in changes:
            label += f"-template={abs(hash(shape.template)):x}"
        path = folder / f"{label}.gguf"
        return path if path.exists() else write(path, shape)

    return model
