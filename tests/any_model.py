"""A tiny random model of any architecture that llama.cpp knows, from its metadata alone.

tests/tiny.py writes a few architectures by hand, with weights made for a purpose. Here llama.cpp is
asked for the names and shapes: it makes a model out of metadata with random weights
(llama_model_init_from_user), names each missing key, and hands every tensor to a callback. What it
would load is then written as a GGUF file like any other.
"""

import ctypes
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, cast

import gguf
import numpy as np
import numpy.typing as npt
import tiny_vocab

import kvmem
from kvmem.llama import log, runtime

Value = bool | int | float | str | tuple[int, ...] | npt.NDArray[np.uint64]
Keys = Mapping[str, Value]
Shape = tuple[int, ...]

LIBRARIES: Final = Path(kvmem.__file__).parent / "lib"
MISSING: Final = re.compile(r"key not found in model: (\S+?);")
EXTRAS: Final = re.compile(r"\.(scale|input_scale)$|^rope_(freqs|factors)")
"""Optional tensors that few models have; those of one layer are asked for with all the others."""


class OpaqueParams(ctypes.Structure):
    """llama_model_params, handed on as it came. Larger than it is, which calls by value allow."""

    _fields_ = [("words", ctypes.c_uint64 * 64)]


class GgufParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


class TensorHead(ctypes.Structure):
    """The first members of ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
    ]  # fmt: skip


OnTensor = ctypes.CFUNCTYPE(None, ctypes.POINTER(TensorHead), ctypes.c_void_p)


class MissingKeyError(Exception):
    """llama.cpp wants a key: its name without the architecture."""


def write_any(
    path: Path, arch: str, keys: Keys, defaults: Keys, extras: Iterable[str] = ()
) -> Path:
    """Write a model of `arch` to `path`, which is returned.

    defaults: values of the keys that llama.cpp misses in `keys`. extras: names of tensors of the
    kinds in EXTRAS that the model has.
    """
    asked = dict(keys)
    while True:
        write_file(path, arch, asked, {})
        try:
            shapes = list_tensors(path)
            break
        except MissingKeyError as missing:
            name = str(missing).removeprefix(f"{arch}.")
            if name in asked or name not in defaults:
                raise
            asked[name] = defaults[name]
    kept = {n: s for n, s in shapes.items() if not EXTRAS.search(n) or n in set(extras)}
    return write_file(path, arch, asked, kept)


def write_file(path: Path, arch: str, keys: Keys, tensors: Mapping[str, Shape]) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_token_type_count(2)
    tiny_vocab.add_vocabulary(writer)
    for name, value in keys.items():
        add_key(writer, name if name.startswith("xielu.") else f"{arch}.{name}", value)
    for name, shape in tensors.items():
        writer.add_tensor(name, draw(name, shape, arch).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, name: str, value: Value) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, np.ndarray):
        writer.add_key_value(name, value.tolist(), kinds.ARRAY, sub_type=kinds.UINT64)
    elif isinstance(value, tuple):
        writer.add_key_value(name, list(value), kinds.ARRAY, sub_type=kinds.UINT32)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_float32(name, value)


def list_tensors(path: Path) -> dict[str, Shape]:
    """What llama.cpp would load of a file with this metadata, slowest dimension first."""
    runtime.ensure_started()
    base = ctypes.CDLL(str(LIBRARIES / "libkvmem-ggml-base.so"))
    llama = ctypes.CDLL(str(LIBRARIES / "libkvmem-llama.so"))
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, GgufParams]
    base.gguf_free.argtypes = [ctypes.c_void_p]
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.POINTER(TensorHead)]
    llama.llama_model_default_params.restype = OpaqueParams
    llama.llama_model_init_from_user.restype = ctypes.c_void_p
    llama.llama_model_init_from_user.argtypes = [
        ctypes.c_void_p, OnTensor, ctypes.c_void_p, OpaqueParams,
    ]  # fmt: skip
    llama.llama_model_free.argtypes = [ctypes.c_void_p]

    shapes: dict[str, Shape] = {}

    def on_tensor(tensor: "ctypes._Pointer[TensorHead]", _: object) -> None:
        dims = list(tensor.contents.ne)
        while len(dims) > 1 and dims[-1] == 1:
            dims.pop()
        shapes[cast(bytes, base.ggml_get_name(tensor)).decode()] = tuple(reversed(dims))

    metadata = base.gguf_init_from_file(str(path).encode(), GgufParams(no_alloc=True, ctx=None))
    assert metadata
    model = llama.llama_model_init_from_user(
        metadata, OnTensor(on_tensor), None, llama.llama_model_default_params()
    )
    base.gguf_free(metadata)
    errors = "; ".join(log.drain())
    if not model:
        missing = MISSING.search(errors)
        raise MissingKeyError(missing[1]) if missing else ValueError(errors)
    llama.llama_model_free(model)
    return shapes


def draw(name: str, shape: Shape, arch: str) -> npt.NDArray[np.float64]:
    """Random weights that keep the variance of what they multiply, more for attention."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if ".ssm_a" in name and "alpha" not in name:
        return -0.1 - np.abs(values) * 0.05  # a state that forgets
    if name.endswith("norm.weight"):
        if re.search(r"attn_[qk]_norm", name):
            return 1.5 + 0.3 * np.clip(values, -3, 3)
        return np.ones(shape)
    if name.startswith("rope_"):
        return 1 + np.abs(values)
    if name.startswith("token_embd"):
        return values * (shape[-1] ** -0.5 if arch.startswith("gemma") else 1)
    if len(shape) == 1:
        return values * 0.1
    gain = 1.5 if re.search(r"attn_(q|k|qkv)\b", name) else 1
    if name.startswith("output") or "attn_output" in name:
        gain = 2
    return cast(npt.NDArray[np.float64], values * gain * shape[-1] ** -0.5)
