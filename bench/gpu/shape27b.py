"""Write a qwen35 model of the 27B's shape with random weights: its speed and its memory are those
of the real one. tests/tiny.py writes it, as it does the small models; here are its sizes and types.

python bench/gpu/shape27b.py model.gguf [--weights IQ4_XS] [--layers 64]
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import tiny
import tiny_vocab

N_VOCAB: Final = 248_320
SHAPE: Final = tiny.Shape(
    arch="qwen35",
    name="random-27b-shape",
    n_layers=64,
    attention_interval=4,
    mtp=True,
    width=5120,
    n_ff=17_408,
    n_heads=24,
    n_kv_heads=4,
    head_dim=256,
    ssm_state=128,
    n_ssm_keys=16,
    n_ssm_values=48,
    rope_base=1e7,
    rope_share=4,
    context_tokens=262_144,
    seed=7,
)
FILE_TYPES: Final = {
    Q.IQ4_XS: gguf.LlamaFileType.MOSTLY_IQ4_XS,
    Q.IQ3_S: gguf.LlamaFileType.MOSTLY_IQ3_S,
    Q.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}
OF_OWN_TYPE: Final = {"token_embd.weight": Q.Q4_0, "output.weight": Q.Q6_K}

# Where a group of this type keeps its scale, and the scale's divisor that makes random bits of unit
# variance. Found by dequantising random groups with gguf.quants.
SCALES: Final[dict[Q, tuple[int, float]]] = {
    Q.IQ4_XS: (0, 1500.0),
    Q.IQ3_S: (0, 150.0),
    Q.Q4_0: (0, 4.6),
    Q.Q6_K: (208, 1350.0),
}


class QuantisedTensors(tiny.Tensors):
    """Random bits for matrices, which need not be quantised then."""

    def __init__(self, writer: gguf.GGUFWriter, matrices: Q) -> None:
        super().__init__(writer, SHAPE.seed)
        self._matrices = matrices

    def matrix(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> None:
        kind = OF_OWN_TYPE.get(name, self._matrices)
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        at, divisor = SCALES[kind]
        n_groups = n_out * n_in // group
        packed = self._rng.integers(0, 256, size=(n_groups, group_bytes), dtype=np.uint8)
        factor = np.full(n_groups, gain * n_in**-0.5 / divisor, np.float16)
        packed[:, at : at + 2] = factor.view(np.uint8).reshape(n_groups, 2)
        self._writer.add_tensor(name, packed.reshape(n_out, -1), raw_dtype=kind)


class Sizes(QuantisedTensors):
    """Bytes of the tensors, which are not made. on_device: those that lie on a GPU."""

    def __init__(self, matrices: Q) -> None:
        self._matrices = matrices
        self._rng = np.random.default_rng(SHAPE.seed)
        self.all = self.on_device = 0

    def matrix(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> None:
        group, group_bytes = gguf.GGML_QUANT_SIZES[OF_OWN_TYPE.get(name, self._matrices)]
        self._add(name, n_out * n_in // group * group_bytes)

    def put(self, name: str, values: NDArray[np.floating]) -> None:
        self._add(name, 4 * values.size)

    def _add(self, name: str, n_bytes: int) -> None:
        self.all += n_bytes
        # llama.cpp leaves embeddings on the CPU
        self.on_device += n_bytes * (name != "token_embd.weight")


def sizes(matrices: Q, shape: tiny.Shape = SHAPE, n_vocab: int = N_VOCAB) -> Sizes:
    counted = Sizes(matrices)
    tiny.add_tensors(counted, shape, n_vocab)
    return counted


def write(path: Path, matrices: Q, shape: tiny.Shape = SHAPE, n_vocab: int = N_VOCAB) -> None:
    """Write the model, with `matrices` for all but embeddings (Q4_0) and output (Q6_K)."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    tiny.add_metadata(writer, replace(shape, file_type=FILE_TYPES[matrices]))
    tiny_vocab.add_vocabulary(writer, pre="qwen35", template=shape.template, n_tokens=n_vocab)
    writer.add_vocab_size(n_vocab)
    tiny.add_tensors(QuantisedTensors(writer, matrices), shape, n_vocab)
    tiny.finish(writer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--weights", default="IQ4_XS", choices=[kind.name for kind in FILE_TYPES])
    parser.add_argument("--layers", type=int, default=SHAPE.n_layers, help="a multiple of 4")
    arguments = parser.parse_args()
    write(arguments.path, Q[arguments.weights], replace(SHAPE, n_layers=arguments.layers))
