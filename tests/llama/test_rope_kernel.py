"""Un-rotation against ggml's own kernel, for every kind of rotation that a model may ask for."""

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic_kv import ROPE_SPECS, image_positions

import kvmem
from kvmem.kv.layout import RopeSpec
from kvmem.kv.rope import unrotate
from kvmem.llama.runtime import ensure_started

F32, I32, CPU = 0, 26, 0  # ggml.h and ggml-backend.h
HEADS, HEAD_DIM = 3, 64


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Ggml:
    """The calls of libggml that one ROPE node takes, on the CPU back end."""

    def __init__(self) -> None:
        ensure_started()
        lib = Path(kvmem.__file__).parent / "lib"
        self.base = ctypes.CDLL(str(lib / "libkvmem-ggml-base.so"))
        self.registry = ctypes.CDLL(str(lib / "libkvmem-ggml.so"))
        floats = [c_float] * 6
        function: Any
        arguments: Any
        for function, result, arguments in (
            (self.base.ggml_init, c_void_p, [InitParams]),
            (self.base.ggml_free, None, [c_void_p]),
            (self.base.ggml_new_tensor_1d, c_void_p, [c_void_p, c_int, c_int64]),
            (self.base.ggml_new_tensor_3d, c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
            (
                self.base.ggml_rope_ext,
                c_void_p,
                [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, *floats],
            ),
            (
                self.base.ggml_rope_multi,
                c_void_p,
                [*[c_void_p] * 4, c_int, POINTER(c_int), c_int, c_int, *floats],
            ),
            (self.base.ggml_new_graph, c_void_p, [c_void_p]),
            (self.base.ggml_build_forward_expand, None, [c_void_p, c_void_p]),
            (self.base.ggml_backend_alloc_ctx_tensors, c_void_p, [c_void_p, c_void_p]),
            (self.base.ggml_backend_buffer_free, None, [c_void_p]),
            (self.base.ggml_backend_tensor_set, None, [*[c_void_p] * 2, c_size_t, c_size_t]),
            (self.base.ggml_backend_tensor_get, None, [*[c_void_p] * 2, c_size_t, c_size_t]),
            (self.base.ggml_backend_graph_compute, c_int, [c_void_p, c_void_p]),
            (self.base.ggml_backend_free, None, [c_void_p]),
            (self.registry.ggml_backend_init_by_type, c_void_p, [c_int, c_char_p]),
        ):
            function.restype = result
            function.argtypes = arguments

    def rotate(
        self, rows: NDArray[np.float32], pos: NDArray[np.int32], spec: RopeSpec
    ) -> NDArray[np.float32]:
        """Rows [n_rows, heads, head_dim] after ggml's ROPE at pos [n_rows, 4]."""
        base = self.base
        backend = self.registry.ggml_backend_init_by_type(CPU, None)
        context = base.ggml_init(InitParams(1 << 20, None, True))
        has_sections = spec.mode in (8, 40)
        ids = np.ascontiguousarray(pos.T if has_sections else pos[:, 0])
        source = base.ggml_new_tensor_3d(context, F32, HEAD_DIM, HEADS, len(rows))
        places = base.ggml_new_tensor_1d(context, I32, ids.size)
        inputs = [(source, rows), (places, ids)]
        factors = None
        if spec.freq_factors is not None:
            values = np.array(spec.freq_factors, np.float32)
            factors = base.ggml_new_tensor_1d(context, F32, values.size)
            inputs.append((factors, values))
        floats = (
            spec.freq_base,
            spec.freq_scale,
            spec.ext_factor,
            spec.attn_factor,
            spec.beta_fast,
            spec.beta_slow,
        )
        head = (context, source, places, factors, spec.n_dims)
        if has_sections:
            sections = (c_int32 * 4)(*spec.sections)
            node = base.ggml_rope_multi(*head, sections, spec.mode, spec.n_ctx_orig, *floats)
        else:
            node = base.ggml_rope_ext(*head, spec.mode, spec.n_ctx_orig, *floats)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, node)
        buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
        for tensor, array in inputs:
            base.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        assert base.ggml_backend_graph_compute(backend, graph) == 0
        out = np.empty_like(rows)
        base.ggml_backend_tensor_get(node, out.ctypes.data, 0, out.nbytes)
        base.ggml_backend_buffer_free(buffer)
        base.ggml_free(context)
        base.ggml_backend_free(backend)
        return out


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml()


# ggml takes the angle in float, so it is itself off by up to position * 2^-24 radians and some.
@pytest.mark.parametrize(("first", "tolerance"), [(0, 2e-6), (4000, 2e-3), (199_980, 0.05)])
@pytest.mark.parametrize(
    "name", [name for name, spec in ROPE_SPECS.items() if spec is not None and spec.offset == 0]
)
def test_ggml_rotates_and_we_turn_back(ggml: Ggml, name: str, first: int, tolerance: float) -> None:
    spec = ROPE_SPECS[name]
    assert spec is not None
    pos = image_positions(first)
    before = np.random.default_rng(1).standard_normal((len(pos), HEADS, HEAD_DIM), np.float32)
    rows = ggml.rotate(before, pos, spec)
    assert np.abs(rows - before).max() > 0.1
    if spec.weights is not None:  # they come behind the rotation, and stay
        rows *= np.array(spec.weights, np.float32)
        before *= np.array(spec.weights, np.float32)
    unrotate(rows, pos, spec)
    assert np.abs(rows - before).max() < tolerance
