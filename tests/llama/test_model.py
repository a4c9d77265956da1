"""Model and Vocab: what cannot be loaded says why, and a closed handle raises."""

import gc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from engines import make_config

from kvmem.engine.engine import Engine
from kvmem.errors import Cancelled, ModelError, RequestError, StateError
from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab


def test_a_model_says_what_it_is(tiny: Callable[..., Path]) -> None:
    path = tiny("qwen35_mtp")
    with Model(path, load_mtp=True) as model:
        assert (model.architecture, model.path) == ("qwen35", path)
        assert (model.n_embd, model.n_head, model.n_head_kv) == (128, 4, 2)
        assert (model.is_hybrid, model.is_recurrent, model.n_layer_nextn) == (True, False, 1)
        assert model.n_ctx_train == 131072
        assert 0 < model.size_bytes < path.stat().st_size
        assert model.metadata("general.name") == "tiny-qwen35"
        assert model.metadata("no.such.key") is None


def damaged(path: Path, folder: Path, kind: str) -> Path:
    data = path.read_bytes()
    cut = {
        "empty": b"",
        "text": b"version https://example",
        "magic alone": data[:4],
        "header cut": data[:200],
        "tensors cut": data[: len(data) // 2],
        "last byte cut": data[:-1000],
    }
    target = folder / f"{kind}.gguf"
    target.write_bytes(cut[kind])
    return target


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "is no GGUF file"),
        ("text", "is no GGUF file"),
        ("magic alone", "failed to read header"),
        ("header cut", "exceeds remaining file size"),
        ("tensors cut", "corrupted or incomplete"),
        ("last byte cut", "corrupted or incomplete"),
    ],
)
def test_damaged_files_are_named_with_the_reason(
    kind: str, reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    path = damaged(tiny_llama, tmp_path, kind)
    with pytest.raises(ModelError) as caught:
        Model(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf: No such file"):
        Model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        Model(tmp_path)


def test_an_unknown_architecture_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    data = tiny_llama.read_bytes()
    key = data.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    path = tmp_path / "strange.gguf"
    path.write_bytes(data[:key] + b"lloma" + data[key + 5 :])
    with pytest.raises(ModelError, match="unknown model architecture: 'lloma'"):
        Model(path)


def test_close_twice_and_use_after_close(tiny_llama: Path) -> None:
    model = Model(tiny_llama)
    vocab = Vocab(model)
    model.close()
    model.close()
    assert model.is_closed
    for use in (
        lambda: model.n_embd,
        lambda: model.metadata("general.name"),
        lambda: vocab.tokenize("a"),
        lambda: vocab.piece(1),
        lambda: vocab.is_eog(1),
        lambda: Vocab(model),
        lambda: Context(model, n_ctx=64),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_closed_model_stays_until_its_last_context_goes(tiny_llama: Path) -> None:
    token, pos = np.array([1], np.int32), np.array([0], np.int32)
    model = Model(tiny_llama)
    first, second = Context(model, n_ctx=64), Context(model, n_ctx=64)
    model.close()
    assert model.is_closed
    with pytest.raises(StateError, match="closed"):
        Context(model, n_ctx=64)
    first.close()
    second.decode(token, pos)  # its weights are still there
    assert np.isfinite(second.logits(0)).all()
    second.close()
    second.close()


def test_a_model_is_loaded_once(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model, pytest.raises(StateError, match="loaded once"):
        model.__init__(tiny_llama)  # type: ignore[misc]
    with pytest.raises(StateError, match="loaded once"):
        model.__init__(tiny_llama)  # type: ignore[misc]


def test_a_context_in_a_cycle_frees_its_model_last(tiny_llama: Path) -> None:
    # a collected cycle takes references away in any order; the context needs its model to the end
    context = Context(Model(tiny_llama), n_ctx=64)
    cycle: list[object] = [context]
    cycle.append(cycle)
    del context, cycle
    assert gc.collect() > 0


def test_progress_is_told_and_its_exception_ends_the_load(tiny_llama: Path) -> None:
    seen: list[float] = []
    Model(tiny_llama, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def refuse(done: float) -> None:
        raise Cancelled(f"at {done}")

    with pytest.raises(Cancelled, match="at 0"):
        Model(tiny_llama, progress=refuse)


@pytest.mark.parametrize("text", ["", "the light", "née 🙂 漢字\n", "\x00\x01", "a" * 3000])
def test_text_survives_the_vocabulary(text: str, tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = Vocab(model)
        tokens = vocab.tokenize(text)
        assert vocab.detokenize(tokens) == text
        assert b"".join(vocab.piece(token) for token in tokens) == text.encode()


def test_special_tokens_are_read_only_where_allowed(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = Vocab(model)
        (start,) = vocab.tokenize("<|im_start|>")
        assert vocab.is_control(start)
        assert len(vocab.tokenize("<|im_start|>", parse_special=False)) > 1
        assert vocab.piece(start) == b"<|im_start|>"
        assert vocab.piece(start, special=False) == b""
        assert [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]
        for token in (-1, vocab.n_tokens):
            with pytest.raises(RequestError, match="outside the vocabulary"):
                vocab.piece(token)


def test_a_model_without_a_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """llama.cpp ends the process over the first text that such a model is to read."""
    source = gguf.GGUFReader(tiny_llama)
    path = tmp_path / "silent.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, field in source.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("no_vocab")
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="has no tokenizer, so it reads and writes no text"):
        Engine(make_config(path))
