"""The recall model as GGUF: into PyTorch and back. The vocabulary is copied from file to file."""

from pathlib import Path
from typing import Final, Literal

import gguf
import torch
from gguf import GGMLQuantizationType, LlamaFileType
from recall_qwen35 import Qwen35, Shape

ARCH: Final = "qwen35"
WeightType = Literal["F32", "F16", "Q8_0"]

# Parameters under another name or in another form than in the file: its ssm_a is -e^ssm_a_log, and
# the kernel of a convolution stays in F32, as llama.cpp wants it.
DECAY: Final = "ssm_a"
LOG_DECAY: Final = "ssm_a_log"
ALWAYS_F32: Final = "ssm_conv1d"


def load(path: Path) -> Qwen35:
    """A model with the weights of a file, in float32; quantised ones are what they stand for."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> int | float:
        value: int | float = reader.fields[f"{ARCH}.{key}"].contents()
        return value

    shape = Shape(
        n_vocab=int(field("vocab_size")),
        n_embd=int(field("embedding_length")),
        n_layers=int(field("block_count")) - 1,
        attention_interval=int(field("full_attention_interval")),
        n_ff=int(field("feed_forward_length")),
        n_heads=int(field("attention.head_count")),
        n_kv_heads=int(field("attention.head_count_kv")),
        head_dim=int(field("attention.key_length")),
        n_rotated=int(field("rope.dimension_count")),
        rope_base=float(field("rope.freq_base")),
        delta_heads=int(field("ssm.time_step_rank")),
        delta_dim=int(field("ssm.state_size")),
        conv_taps=int(field("ssm.conv_kernel")),
        # F32 in the file: 1e-6 is not one
        eps=round(float(field("attention.layer_norm_rms_epsilon")), 12),
        context_tokens=int(field("context_length")),
    )
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(DECAY):
            weights[tensor.name.replace(DECAY, LOG_DECAY)] = torch.log(-values)
        else:
            weights[tensor.name] = values
    model = Qwen35(shape)
    model.load_state_dict(weights)
    return model


def save(model: Qwen35, path: Path, vocabulary: Path, weight_type: WeightType = "Q8_0") -> None:
    """Write a model that llama.cpp runs. Norms and other vectors are F32 in each type.

    vocabulary: a GGUF file whose tokens and chat template it gets.
    """
    writer = gguf.GGUFWriter(path, ARCH)
    writer.add_name("recall-qwen35")
    file_type = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}[weight_type]
    writer.add_file_type(LlamaFileType[file_type])
    _add_shape(writer, model.shape)
    _copy_vocabulary(writer, vocabulary)
    for name, values in model.state_dict().items():
        array = values.detach().float().cpu()
        if name.endswith(LOG_DECAY):
            name, array = name.replace(LOG_DECAY, DECAY), -array.exp()
        is_matrix = array.ndim == 2 and ALWAYS_F32 not in name
        kind = GGMLQuantizationType[weight_type if is_matrix else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_full_attention_interval(shape.attention_interval)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_rotated)
    pairs = shape.n_rotated // 2
    third = pairs // 3
    writer.add_rope_dimension_sections([pairs - 2 * third, third, third, 0])
    writer.add_ssm_conv_kernel(shape.conv_taps)
    writer.add_ssm_state_size(shape.delta_dim)
    writer.add_ssm_group_count(shape.delta_heads)
    writer.add_ssm_time_step_rank(shape.delta_heads)
    writer.add_ssm_inner_size(shape.delta_heads * shape.delta_dim)


def _copy_vocabulary(writer: gguf.GGUFWriter, source: Path) -> None:
    for key, field in gguf.GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
