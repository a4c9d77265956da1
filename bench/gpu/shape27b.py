"""Write a qwen35 model of the 27B's shape with random weights: its speed and its memory are those
of the real one.

python bench/gpu/shape27b.py model.gguf [--weights IQ4_XS] [--layers 64]
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

N_LAYERS = 64
ATTENTION_INTERVAL = 4  # every fourth layer has attention, the others are Gated DeltaNet
N_EMBD, N_FF, N_VOCAB = 5120, 17408, 248_320
N_HEADS, N_KV_HEADS, HEAD_DIM = 24, 4, 256
SSM_STATE, SSM_KEY_HEADS, SSM_VALUE_HEADS, CONV_TAPS = 128, 16, 48, 4
ROPE_DIMS, ROPE_SECTIONS = 64, [11, 11, 10, 0]
KEY_DIM, VALUE_DIM = SSM_STATE * SSM_KEY_HEADS, SSM_STATE * SSM_VALUE_HEADS

# Where a group of this type keeps its scale, and the scale's divisor that makes random bits of unit
# variance. Found by
# dequantising random groups with gguf.quants.
SCALES: dict[Q, tuple[int, float]] = {
    Q.IQ4_XS: (0, 1500.0),
    Q.IQ3_S: (0, 150.0),
    Q.Q4_0: (0, 4.6),
    Q.Q6_K: (208, 1350.0),
}


class Weights:
    """Random tensors, in the order in which they are asked for."""

    def __init__(self, writer: gguf.GGUFWriter, matrices: Q) -> None:
        self._writer = writer
        self._matrices = matrices
        self._rng = np.random.default_rng(7)

    def matrix(
        self, name: str, n_out: int, n_in: int, kind: Q | None = None, *, scale: float | None = None
    ) -> None:
        kind = kind or self._matrices
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        at, divisor = SCALES[kind]
        n_groups = n_out * n_in // group
        packed = self._rng.integers(0, 256, size=(n_groups, group_bytes), dtype=np.uint8)
        factor = np.full(n_groups, (scale or n_in**-0.5) / divisor, np.float16)
        packed[:, at : at + 2] = factor.view(np.uint8).reshape(n_groups, 2)
        self._writer.add_tensor(name, packed.reshape(n_out, -1), raw_dtype=kind)

    def small(self, name: str, *shape: int) -> None:
        self._put(name, self._rng.standard_normal(shape) * 0.05)

    def ones(self, name: str, n: int) -> None:
        self._put(name, np.ones(n))

    def decay(self, name: str, n: int) -> None:
        self._put(name, -0.1 - np.abs(self._rng.standard_normal(n)) * 0.05)

    def _put(self, name: str, values: NDArray[np.floating]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))


class Sizes(Weights):
    """Bytes of the tensors, which are not made. on_device: those that lie on a GPU."""

    def __init__(self, matrices: Q) -> None:
        self._matrices = matrices
        self._rng = np.random.default_rng(7)
        self.all = self.on_device = 0

    def matrix(
        self, name: str, n_out: int, n_in: int, kind: Q | None = None, *, scale: float | None = None
    ) -> None:
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind or self._matrices]
        self._add(name, n_out * n_in // group * group_bytes)

    def _put(self, name: str, values: NDArray[np.floating]) -> None:
        self._add(name, 4 * values.size)

    def _add(self, name: str, n_bytes: int) -> None:
        self.all += n_bytes
        # llama.cpp leaves embeddings on the CPU
        self.on_device += n_bytes * (name != "token_embd.weight")


def sizes(matrices: Q, n_layers: int = N_LAYERS) -> Sizes:
    counted = Sizes(matrices)
    _tensors(counted, n_layers)
    return counted


def write(path: Path, matrices: Q, context_tokens: int = 262_144, n_layers: int = N_LAYERS) -> None:
    """Write the model.

    64 layers or fewer, and one MTP block; `matrices` for all but embeddings (Q4_0) and output
    (Q6_K).
    """
    writer = gguf.GGUFWriter(str(path), "qwen35")
    writer.add_name("random-27b-shape")
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers + 1)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(ROPE_DIMS)
    writer.add_rope_dimension_sections(ROPE_SECTIONS)
    writer.add_ssm_conv_kernel(CONV_TAPS)
    writer.add_ssm_inner_size(VALUE_DIM)
    writer.add_ssm_state_size(SSM_STATE)
    writer.add_ssm_time_step_rank(SSM_VALUE_HEADS)
    writer.add_ssm_group_count(SSM_KEY_HEADS)
    writer.add_full_attention_interval(ATTENTION_INTERVAL)
    writer.add_nextn_predict_layers(1)
    writer.add_vocab_size(N_VOCAB)
    _vocabulary(writer)

    _tensors(Weights(writer, matrices), n_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(weights: Weights, n_layers: int) -> None:
    weights.matrix("token_embd.weight", N_VOCAB, N_EMBD, Q.Q4_0, scale=0.5)
    weights.ones("output_norm.weight", N_EMBD)
    weights.matrix("output.weight", N_VOCAB, N_EMBD, Q.Q6_K)
    for layer in range(n_layers + 1):
        _layer(
            weights,
            f"blk.{layer}.",
            is_mtp=layer == n_layers,
            attends=(layer + 1) % ATTENTION_INTERVAL == 0,
        )


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    """Bytes, ChatML's marks, and filler up to the real size: any text can be written."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    # how byte-level BPE writes each byte as a letter
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokens = [letters[byte] for byte in range(256)] + ["he"]
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fillers = [f"<filler{i}>" for i in range(N_VOCAB - len(tokens) - len(marks))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + marks + fillers)
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [normal] * len(tokens) + [control] * len(marks) + [unused] * len(fillers)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(tokens) + marks.index("<|im_end|>"))
    writer.add_chat_template(
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def _layer(weights: Weights, prefix: str, *, is_mtp: bool, attends: bool) -> None:
    weights.ones(prefix + "attn_norm.weight", N_EMBD)
    weights.ones(prefix + "post_attention_norm.weight", N_EMBD)
    if is_mtp or attends:
        weights.matrix(prefix + "attn_q.weight", 2 * HEAD_DIM * N_HEADS, N_EMBD)  # query and gate
        weights.matrix(prefix + "attn_k.weight", HEAD_DIM * N_KV_HEADS, N_EMBD)
        weights.matrix(prefix + "attn_v.weight", HEAD_DIM * N_KV_HEADS, N_EMBD)
        weights.matrix(prefix + "attn_output.weight", N_EMBD, HEAD_DIM * N_HEADS)
        weights.ones(prefix + "attn_q_norm.weight", HEAD_DIM)
        weights.ones(prefix + "attn_k_norm.weight", HEAD_DIM)
    else:
        weights.matrix(prefix + "attn_qkv.weight", 2 * KEY_DIM + VALUE_DIM, N_EMBD)
        weights.matrix(prefix + "attn_gate.weight", VALUE_DIM, N_EMBD)
        weights.small(prefix + "ssm_conv1d.weight", 2 * KEY_DIM + VALUE_DIM, CONV_TAPS)
        weights.small(prefix + "ssm_dt.bias", SSM_VALUE_HEADS)
        weights.decay(prefix + "ssm_a", SSM_VALUE_HEADS)
        weights.matrix(prefix + "ssm_beta.weight", SSM_VALUE_HEADS, N_EMBD)
        weights.matrix(prefix + "ssm_alpha.weight", SSM_VALUE_HEADS, N_EMBD)
        weights.ones(prefix + "ssm_norm.weight", SSM_STATE)
        weights.matrix(prefix + "ssm_out.weight", N_EMBD, VALUE_DIM)
    weights.matrix(prefix + "ffn_gate.weight", N_FF, N_EMBD)
    weights.matrix(prefix + "ffn_up.weight", N_FF, N_EMBD)
    weights.matrix(prefix + "ffn_down.weight", N_EMBD, N_FF)
    if is_mtp:
        weights.matrix(prefix + "nextn.eh_proj.weight", N_EMBD, 2 * N_EMBD)
        weights.ones(prefix + "nextn.enorm.weight", N_EMBD)
        weights.ones(prefix + "nextn.hnorm.weight", N_EMBD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--weights", default="IQ4_XS", choices=["IQ4_XS", "IQ3_S", "Q4_0"])
    parser.add_argument("--layers", type=int, default=N_LAYERS, help="a multiple of 4")
    arguments = parser.parse_args()
    write(arguments.path, Q[arguments.weights], n_layers=arguments.layers)
