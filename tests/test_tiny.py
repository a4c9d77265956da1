"""The tiny models are small, the same on every machine, and what their names say."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tiny import KINDS, Shape, write


def keys(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_small_and_name_their_architecture(kind: str, tiny: Callable[..., Path]) -> None:
    path = tiny(kind)
    assert path.stat().st_size < 3_000_000
    assert keys(path)["general.architecture"] == KINDS[kind].arch


def test_equal_shapes_give_equal_bytes_and_a_seed_changes_them(tmp_path: Path) -> None:
    first = write(tmp_path / "first.gguf", Shape(arch="qwen3"))
    second = write(tmp_path / "second.gguf", Shape(arch="qwen3"))
    other = write(tmp_path / "other.gguf", Shape(arch="qwen3", seed=1))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_a_shape_is_written_once_a_session(tiny: Callable[..., Path]) -> None:
    first = tiny("llama", n_layers=1)
    stamp = first.stat().st_mtime_ns
    assert tiny("llama", n_layers=1) == first
    assert first.stat().st_mtime_ns == stamp
    assert tiny("llama", n_layers=1, seed=5) != first


def test_the_hybrid_has_keys_only_in_its_attention_layers(tiny: Callable[..., Path]) -> None:
    names = {tensor.name for tensor in gguf.GGUFReader(tiny("qwen35_mtp")).tensors}
    with_keys = [layer for layer in range(5) if f"blk.{layer}.attn_k.weight" in names]
    with_state = [layer for layer in range(5) if f"blk.{layer}.ssm_out.weight" in names]
    assert with_keys == [1, 3, 4]
    assert with_state == [0, 2]
