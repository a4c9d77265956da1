"""What a context takes is known before it is made, with the model's weights and without them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
from engines import random_tokens, record

from kvmem.errors import ModelError
from kvmem.llama.context import Share, shares_of
from kvmem.llama.model import Model

DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "snapshots": {"n_drafts": 3, "mtp_state": "snapshots"},
    "replay": {"n_drafts": 3, "mtp_state": "replay"},
}
KINDS = [
    ("llama_64", "none"), ("qwen3moe", "none"), ("qwen35_64", "none"), ("qwen35_mtp", "none"),
    ("qwen35_mtp", "snapshots"), ("qwen35_mtp", "replay"),
]  # fmt: skip


def taken(shares: list[Share]) -> dict[str, tuple[int, ...]]:
    return {
        share.device: (share.weights, share.cells, share.states, share.compute) for share in shares
    }


@pytest.mark.part
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_what_it_would_take_is_what_it_takes(
    kind: str, drafts: str, tiny: Callable[..., Path]
) -> None:
    """From the model with and without its weights; and reading takes no more."""
    path = tiny(kind)
    with record(path, **DRAFTS[drafts]) as recorded:
        config, context = recorded.engine.config, recorded.context
        settings: dict[str, Any] = {
            "n_ctx": context.n_ctx, "n_batch": context.n_batch, "n_ubatch": context.n_ubatch,
            "n_cells": recorded.memory.port.n_slots * context.block_tokens,
            "type_k": config.memory.type_k, "type_v": config.memory.type_v,
            "n_rs_seq": config.draft.n_rollback, "replay": config.draft.replays,
            "draft_types": ("f16", "f16") if config.draft.enabled else None,
        }  # fmt: skip
        would = taken(shares_of(recorded.engine.model, **settings))
        layers = config.model.n_gpu_layers
        with Model(path, n_gpu_layers=layers, load_mtp=config.draft.enabled, dry=True) as dry:
            planned = taken(shares_of(dry, **settings))
        if devices.current().name == "part":
            # mapped from the first tensor of the host to the last, those of a GPU between them too
            weights, *others = planned[""]
            assert weights < would[""][0] < path.stat().st_size
            assert others == list(would[""][1:])
            planned[""] = would[""]
        assert planned == would
        recorded.session.read(random_tokens(700))
        assert taken(context.shares()) == would
        assert all(sum(row) for row in would.values())
        assert "" in would
        assert (len(would) > 1) == (devices.current().name != "cpu")


def test_what_cannot_be_tiered_is_not_short_of_memory(tiny_gemma3: Path) -> None:
    with (
        Model(tiny_gemma3) as model,
        pytest.raises(ModelError, match=r"gemma3 models .* sliding-window layers"),
    ):
        shares_of(model, n_ctx=512, n_cells=64, n_batch=32, n_ubatch=32, type_k="f16", type_v="f16")
