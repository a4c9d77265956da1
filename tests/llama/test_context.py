"""Context: batches at their borders, refusals, cancel, and what a closed one does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_vocab
from engines import random_tokens

from kvmem.errors import Cancelled, ConfigError, DecodeError, ModelError, StateError
from kvmem.llama import log
from kvmem.llama.context import CancelToken, Context
from kvmem.llama.model import Model


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


def batch(n: int, start: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.array(random_tokens(n, seed), np.int32), np.arange(start, start + n, dtype=np.int32)


def test_rows_of_logits_are_those_asked_for(model: Model) -> None:
    with Context(model, n_ctx=256, n_batch=64) as context:
        tokens, pos = batch(40)
        context.decode(tokens, pos, outputs="all")
        rows = np.stack([context.logits(i) for i in range(40)])
        assert rows.shape == (40, context.n_vocab)
        assert np.isfinite(rows).all()
        for outputs in ([3, 17], "last"):
            context.clear()
            context.decode(tokens, pos, outputs=outputs)
            wanted = [39] if outputs == "last" else [3, 17]
            assert context.n_outputs == len(wanted)
            for i in wanted:
                np.testing.assert_allclose(context.logits(i), rows[i], atol=1e-5)
            np.testing.assert_array_equal(context.logits(-1), context.logits(wanted[-1]))
            with pytest.raises(StateError, match="no logits for token 5"):
                context.logits(5)
        context.clear()
        context.decode(tokens, pos, outputs="none")
        with pytest.raises(StateError, match="no logits"):
            context.logits()


@pytest.mark.parametrize(
    ("tokens", "pos", "reason"),
    [
        ([], [], "1 to 64"),
        ([1] * 65, list(range(65)), "1 to 64"),
        ([1, 2], [0], "2 tokens and 1 positions"),
        ([1, 9999], [0, 1], "token 9999 is outside"),
        ([1, -1], [0, 1], "token -1 is outside"),
        ([1, 2], [5, 5], "could not decode"),
        ([1, 2], [-4, -3], "could not decode"),
    ],
)
def test_impossible_batches_are_refused_and_change_nothing(
    tokens: list[int], pos: list[int], reason: str, model: Model
) -> None:
    with Context(model, n_ctx=256, n_batch=64) as context:
        good = batch(10)
        context.decode(*good)
        with pytest.raises(DecodeError, match=reason):
            context.decode(np.array(tokens, np.int32), np.array(pos, np.int32))
        assert context.seq_pos_max(0) == 9
        context.decode(*batch(1, start=10))
        after = context.logits()
        context.clear()
        context.decode(*good)
        context.decode(*batch(1, start=10))
        np.testing.assert_array_equal(context.logits(), after)


def test_outputs_outside_the_batch_are_refused(model: Model) -> None:
    with Context(model, n_ctx=64) as context, pytest.raises(DecodeError, match="no token 4"):
        context.decode(*batch(4), outputs=[4])


def test_more_tokens_than_cells_is_an_error_with_a_reason(model: Model) -> None:
    with Context(model, n_ctx=256, n_batch=256) as context:
        context.decode(*batch(250))
        with pytest.raises(DecodeError, match="no free cells"):
            context.decode(*batch(20, start=250))
        context.decode(*batch(6, start=250))


@pytest.mark.parametrize(
    "setting",
    [
        {"n_ctx": 0},
        {"n_ctx": -5},
        {"n_batch": 0},
        {"n_ubatch": 0},
        {"n_threads": 0},
        {"n_threads_batch": -1},
        {"n_seq_max": 0},
        {"n_cells": -1},
        {"n_cells": 16, "block_tokens": 32},
        {"n_cells": 64},
        {"type_k": "q9"},
        {"type_v": ""},
        {"flash_attn": "maybe"},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(setting: dict[str, Any], model: Model) -> None:
    # llama.cpp itself ends the process over some of them
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Context(model, **{"n_ctx": 128, **setting})


def write_mamba(path: Path) -> Path:
    """A model without attention: one layer with a recurrent state, weights of one half."""
    n_embd, n_inner, n_state, n_rank, n_conv = 32, 64, 16, 2, 4
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(256)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    n_vocab = len(tiny_vocab.add_vocabulary(writer))
    shapes = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.ssm_in.weight": (2 * n_inner, n_embd),
        "blk.0.ssm_conv1d.weight": (n_inner, n_conv),
        "blk.0.ssm_conv1d.bias": (n_inner,),
        "blk.0.ssm_x.weight": (n_rank + 2 * n_state, n_inner),
        "blk.0.ssm_dt.weight": (n_inner, n_rank),
        "blk.0.ssm_dt.bias": (n_inner,),
        "blk.0.ssm_a": (n_inner, n_state),
        "blk.0.ssm_d": (n_inner,),
        "blk.0.ssm_out.weight": (n_embd, n_inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.full(shape, -0.5 if name == "blk.0.ssm_a" else 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma3", "gemma3 models .* sliding-window layers keep a second cache"),
        ("mamba", "mamba models .* a purely recurrent model has no KV blocks"),
    ],
)
def test_caches_that_cannot_be_tiered_are_refused_by_name(
    kind: str, reason: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_mamba(tmp_path / "mamba.gguf") if kind == "mamba" else tiny(kind)
    with Model(path) as model:
        for _ in range(3):  # the refused cache is freed, once
            with pytest.raises(ModelError, match=reason + ".*--no-kvmem"):
                Context(model, n_ctx=256, n_cells=128, block_tokens=32)
        with Context(model, n_ctx=256) as context:  # and plain llama.cpp still runs it
            context.decode(*batch(20))
            assert np.isfinite(context.logits()).all()


def test_without_flash_attention_there_are_no_tiers(model: Model) -> None:
    with pytest.raises(ModelError, match="flash attention is off"):
        Context(model, n_ctx=256, n_cells=128, block_tokens=32, flash_attn="off")


def test_close_twice_and_use_after_close(model: Model) -> None:
    context = Context(model, n_ctx=64)
    context.close()
    context.close()
    assert context.is_closed
    for use in (
        lambda: context.decode(*batch(1)),
        lambda: context.logits(),
        lambda: context.clear(),
        lambda: context.seq_rm(0, 0, -1),
        lambda: context.seq_cp(0, 1, 0, -1),
        lambda: context.seq_pos_max(0),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_an_interrupt_while_it_is_made_leaves_the_model_whole(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes out where Python runs again: behind llama.cpp's work, among its log lines."""

    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    model = Model(tiny_llama)
    with Context(model, n_ctx=64) as other:
        with monkeypatch.context() as patched:
            patched.setattr(log, "drain", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Context(model, n_ctx=64)
        model.close()
        other.decode(*batch(1))  # the weights are there as long as a context is


def test_sequences_that_a_cache_does_not_have_are_refused(model: Model) -> None:
    with Context(model, n_ctx=64, n_seq_max=2) as context:
        context.decode(*batch(1), seqs=(0, 1))
        for seqs in ((), (0, 1, 0)):
            with pytest.raises(DecodeError, match="this context at most 2"):
                context.decode(*batch(1, start=1), seqs=seqs)
    with (
        Context(model, n_ctx=64, n_cells=64, block_tokens=16, n_seq_max=2) as context,
        pytest.raises(DecodeError, match="a tiered cache has the first alone"),
    ):
        context.decode(*batch(1), seqs=(1,))


def test_a_set_token_cancels_before_the_batch(model: Model) -> None:
    cancel = CancelToken()
    cancel.set()
    with Context(model, n_ctx=64) as context:
        with pytest.raises(Cancelled):
            context.decode(*batch(4), cancel=cancel)
        assert context.seq_pos_max(0) == -1
        cancel.clear()
        context.decode(*batch(4), cancel=cancel)
        assert context.seq_pos_max(0) == 3


def test_a_token_set_meanwhile_cancels_during_the_batch(model: Model) -> None:
    with Context(model, n_ctx=16384, n_batch=16384, n_ubatch=512) as context:
        cancel = CancelToken()
        caught: list[BaseException] = []

        def work() -> None:
            try:
                context.decode(*batch(16000), cancel=cancel)
            except BaseException as error:
                caught.append(error)

        thread = Thread(target=work)
        thread.start()
        cancel.set()
        thread.join()
        assert [type(error) for error in caught] == [Cancelled]
        assert context.seq_pos_max(0) < 15999
        context.clear()
        context.decode(*batch(4))  # the next batch knows nothing of it
        assert np.isfinite(context.logits()).all()


def test_what_is_done_meanwhile_is_done_once_and_its_error_comes_out(model: Model) -> None:
    calls: list[int] = []

    def fail() -> None:
        raise RuntimeError("meanwhile")

    with Context(model, n_ctx=64) as context:
        context.decode(*batch(4), meanwhile=lambda: calls.append(context.seq_pos_max(0)))
        assert calls == [3]
        with pytest.raises(RuntimeError, match="meanwhile"):
            context.decode(*batch(4, start=4), meanwhile=fail)
        assert context.seq_pos_max(0) == 7, "the batch itself has run to its end"
        context.decode(*batch(4, start=8), meanwhile=lambda: calls.append(0))
        assert calls == [3, 0]
