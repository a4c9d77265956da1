"""Stock llama.cpp as the reference: the same decode calls, on a cache that holds everything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import devices
import numpy as np
from engines import SIZES, Call
from numpy.typing import NDArray

from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

F32 = NDArray[np.float32]

VISIBLE, KEPT = 0, 1
"""Sequences of the masked reference: what attention sees, and everything."""

TIE = 0.02
"""Stock llama.cpp's logits of these models differ by up to 0.011 between batches of 128 and of 9,
as flash attention reads K and V as f16: two tokens closer than twice that may change places."""


@contextmanager
def stock_context(path: Path, n_seq_max: int = 1, **settings: object) -> Iterator[Context]:
    """Plain llama.cpp over a model, one thread, sizes as the engines of the tests have them."""
    sizes: dict[str, object] = {
        "n_ctx": SIZES["workspace_tokens"],
        "n_batch": SIZES["batch_tokens"],
        "n_ubatch": SIZES["batch_tokens"],
    }
    with (
        Model(path, n_gpu_layers=devices.n_gpu_layers(path)) as model,
        Context(model, n_seq_max=n_seq_max, **{**sizes, **settings}) as context,  # type: ignore[arg-type]
    ):
        yield context


def replay(context: Context, calls: Sequence[Call]) -> list[F32 | None]:
    """The same calls with all of the history visible; what they overwrite is removed first."""
    rows: list[F32 | None] = []
    for call in calls:
        if context.seq_pos_max(0) >= call.start:
            assert context.seq_rm(0, call.start, -1)
        context.decode(call.tokens, call.pos, outputs=call.outputs)
        rows.append(None if call.logits is None else context.logits(-1))
    return rows


def replay_masked(context: Context, calls: Sequence[Call], block_tokens: int) -> list[F32 | None]:
    """The same calls, each seeing only the blocks that it saw in the engine.

    Sequence KEPT holds all tokens as they were last computed; VISIBLE loses blocks by seq_rm and
    gets them back by seq_cp. Tokens are decoded in VISIBLE and shared with KEPT after that: which
    sequence decides for a token of two is llama.cpp's affair.
    """
    rows: list[F32 | None] = []
    seen: set[int] = set()
    for call in calls:
        assert call.visible is not None
        for seq in (VISIBLE, KEPT):
            if context.seq_pos_max(seq) >= call.start:
                assert context.seq_rm(seq, call.start, -1)
        n_blocks = -(-call.start // block_tokens)
        wanted = set(call.visible)
        assert max(wanted, default=-1) < n_blocks
        seen = {block for block in seen if block < n_blocks}
        for block in seen - wanted:
            assert context.seq_rm(VISIBLE, block * block_tokens, (block + 1) * block_tokens)
        for block in wanted - seen:
            stop = min((block + 1) * block_tokens, call.start)
            context.seq_cp(KEPT, VISIBLE, block * block_tokens, stop)
        context.decode(call.tokens, call.pos, outputs=call.outputs, seqs=(VISIBLE,))
        rows.append(None if call.logits is None else context.logits(-1))
        end = call.start + len(call.tokens)
        context.seq_cp(VISIBLE, KEPT, call.start, end)
        seen = wanted | set(range(call.start // block_tokens, -(-end // block_tokens)))
    return rows


def largest_difference(calls: Sequence[Call], rows: Sequence[F32 | None]) -> float:
    """The largest absolute difference of a logit over all calls that kept logits."""
    differences = []
    for call, row in zip(calls, rows, strict=True):
        assert (call.logits is None) == (row is None)
        if call.logits is not None and row is not None:
            differences.append(float(np.abs(call.logits - row).max()))
    assert differences, "no call kept logits: nothing was compared"
    return max(differences)


def count_said(context: Context, calls: Sequence[Call], rows: Sequence[F32 | None]) -> int:
    """Reply tokens in the calls. AssertionError for one that is not the reference's largest logit.

    Replies must have been asked for without end tokens.
    """
    vocab = Vocab(context.model)
    ends = [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]
    n_said = 0
    for row, call in zip(rows, calls[1:], strict=False):
        if len(call.tokens) == 1:
            assert row is not None
            allowed = row.copy()
            allowed[ends] = -np.inf
            assert call.tokens[0] == allowed.argmax()
            n_said += 1
    return n_said


def require_tie(
    path: Path, prompt: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """AssertionError unless the replies part where stock llama.cpp has two tokens side by side."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    tokens = np.array([*prompt, *one[:at]], np.int32)
    with stock_context(path, type_k="f32", type_v="f32") as context:
        for start in range(0, len(tokens), 128):
            chunk = tokens[start : start + 128]
            context.decode(chunk, np.arange(start, start + len(chunk), dtype=np.int32))
        logits = context.logits(-1)
    best = logits.max()
    assert best - logits[one[at]] < TIE and best - logits[other[at]] < TIE, f"token {at}"
