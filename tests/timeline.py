"""What a hybrid model has really read: a record of decode calls without those that were taken back.

A recurrent state is right if it has seen every token of the history once, in order. So the calls
that remain after each return to a checkpoint must join without a gap, and a run that makes only
these, and never goes back, must give the same logits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines import Call, make_config
from stock import largest_difference, stock_context

from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory

__all__ = ["differs_from_stock", "differs_from_twin", "effective"]


def effective(calls: Sequence[Call]) -> list[Call]:
    """The calls that made the history as it is. Raises AssertionError where they leave a gap."""
    kept: list[Call] = []
    for call in calls:
        while kept and kept[-1].start >= call.start:
            kept.pop()
        n_read = sum(len(one.tokens) for one in kept)
        assert n_read == call.start, f"{call.start} follows {n_read} tokens"
        kept.append(call)
    return kept


def differs_from_stock(path: Path, calls: Sequence[Call], **settings: Any) -> float:
    """Largest difference of a logit to plain llama.cpp that reads everything again."""
    kept = effective(calls)
    rows = []
    with stock_context(path, **settings) as context:
        for call in kept:
            context.decode(call.tokens, call.pos, outputs=call.outputs)
            rows.append(None if call.logits is None else context.logits(-1))
    return largest_difference(kept, rows)


def differs_from_twin(path: Path, calls: Sequence[Call], **memory: object) -> float:
    """The same against an engine that reads everything again and is shown the same blocks."""
    kept = effective(calls)
    rows = []
    with Engine(make_config(path, **memory)) as engine:
        twin = engine.memory
        assert isinstance(twin, TieredMemory)
        for call in kept:
            assert call.visible is not None
            if call.visible:
                twin.seal()
                twin.working_set.apply(np.array(call.visible, np.int32))
            twin.decode(call.tokens, outputs=call.outputs, reply=True)
            rows.append(None if call.logits is None else twin.context.logits(-1))
        assert len(twin.checkpoints) == 0
    return largest_difference(kept, rows)
