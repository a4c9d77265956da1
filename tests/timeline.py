"""What a hybrid model has really read: a record of decode calls without those that were taken back.

A recurrent state is right if it has seen every token of the history once, in order. So the calls
that remain after each return to a checkpoint must join without a gap, and a run that makes only
these, and never goes back, must give the same logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engines import Call, make_config
from stock import F32, largest_difference, stock_context

from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import positions_behind
from kvmem.llama.state import roll_back_state

__all__ = ["differs_from_stock", "differs_from_twin", "effective"]


def effective(calls: Sequence[Call]) -> list[Call]:
    """The calls that made the history as it is. Raises AssertionError where they leave a gap."""
    kept: list[Call] = []
    for call in calls:
        while kept and kept[-1].start >= call.start:
            kept.pop()
        if kept and kept[-1].outputs == "all":  # proposals, of which the rest was rejected
            kept[-1] = replace(kept[-1], n_stays=call.start - kept[-1].start)
        n_read = sum(len(one.tokens) if one.n_stays is None else one.n_stays for one in kept)
        assert n_read == call.start, f"{call.start} follows {n_read} tokens"
        kept.append(call)
    return kept


def differs_from_stock(
    path: Path, calls: Sequence[Call], *, n_drafts: int = 0, **settings: Any
) -> float:
    """Largest difference of a logit to plain llama.cpp that reads everything again.

    n_drafts: with them, llama.cpp removes what was rejected of a batch in its own way, from a state
    for each of the last tokens. And it runs the last layer over all tokens of a prompt, whose rows
    a draft head wants, not over the last alone, which rounds otherwise: on a GPU it takes another
    kernel, and a mixture of experts may take another expert.
    """
    kept = effective(calls)
    rows: list[F32 | None] = []
    with stock_context(path, n_rs_seq=n_drafts, **settings) as context:
        if n_drafts:
            context.keep_hidden_rows()
        for call in kept:
            context.decode(call.tokens, call.pos, outputs=call.outputs)
            rows.append(None if call.logits is None else context.logits(-1))
            if call.n_stays not in (None, len(call.tokens)):
                assert context.seq_rm(0, call.start + call.n_stays, -1)
    print_differences(kept, rows)
    return largest_difference(kept, rows)


def print_differences(calls: Sequence[Call], rows: Sequence[F32 | None], n_shown: int = 20) -> None:
    """Which calls differ and by how much, as pytest shows it below a failure."""
    lines = []
    for i, (call, row) in enumerate(zip(calls, rows, strict=True)):
        if call.logits is None or row is None or (call.logits == row).all():
            continue
        stays = "" if call.n_stays is None else f", {call.n_stays} of them stay"
        difference = np.abs(call.logits - row)
        second, best = np.partition(row, -2)[-2:]
        lines.append(
            f"call {i}: {len(call.tokens)} tokens at {call.start}, rows kept: {call.outputs}"
            f"{stays}; differs by {difference.max():.3g}, on average by {difference.mean():.3g}; "
            f"best {call.logits.argmax()} and {row.argmax()}, by {best - second:.3g}"
        )
    if lines:
        print(f"{len(lines)} of {len(calls)} calls differ from the reference")
        print(*lines[:n_shown], sep="\n")


def differs_from_twin(path: Path, calls: Sequence[Call], **memory: object) -> float:
    """The same against an engine that reads everything again and is shown the same blocks.

    With drafts it is told the proposals and how many of them stay.
    """
    kept = effective(calls)
    rows: list[F32 | None] = []
    with Engine(make_config(path, **memory)) as engine:
        twin = engine.memory
        assert isinstance(twin, TieredMemory)
        for call in kept:
            assert call.visible is not None
            if call.visible:
                twin.seal()
                twin.working_set.apply(np.array(call.visible, np.int32))
            if call.outputs == "all":
                decode_proposals(twin, call)
            else:
                twin.decode(call.tokens, outputs=call.outputs, reply=True)
            rows.append(None if call.logits is None else twin.context.logits(-1))
        assert len(twin.checkpoints) == 0
    print_differences(kept, rows)
    return largest_difference(kept, rows)


def decode_proposals(memory: TieredMemory, call: Call) -> None:
    """One batch, of which the beginning stays: what engine.verify does, without the head's part."""
    n_stays = len(call.tokens) if call.n_stays is None else call.n_stays
    working_set, drafter = memory.working_set, memory.drafter
    assert drafter is not None
    pos = positions_behind(working_set.pos, len(call.tokens))
    cells = working_set.prepare(len(call.tokens), reply=True)
    memory.context.decode(call.tokens, call.pos, outputs="all")
    roll_back_state(memory.context, len(call.tokens) - n_stays)
    tokens = call.tokens[:n_stays]
    drafter.follow(cells[:n_stays], tokens, call.pos[:n_stays])
    working_set.commit(tokens, pos[:n_stays])
