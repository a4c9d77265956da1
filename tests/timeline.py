"""What a hybrid model has really read: a record of decode calls without those that were taken back.

A recurrent state is right if it has seen every token of the history once, in order. So the calls
that remain after each return to a checkpoint must join without a gap, and a run that makes only
these, and never goes back, must give the same logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
from devices import bound
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
        if kept and kept[-1].outputs == "all":  # proposals, of which the rest was rejected
            kept[-1] = replace(kept[-1], n_stays=call.start - kept[-1].start)
        n_read = sum(len(one.tokens) if one.n_stays is None else one.n_stays for one in kept)
        assert n_read == call.start, f"{call.start} follows {n_read} tokens"
        kept.append(call)
    return kept


ROUNDING: Final = {"cpu": 1e-4, "gpu": 0.25}
"""Of the logits of a prompt that has drafts behind it: differs_from_stock says why. Where all rows
of a layer are multiplied instead of one, a GPU takes another kernel, on other quantised inputs.
"""


def differs_from_stock(
    path: Path, calls: Sequence[Call], *, n_drafts: int = 0, **settings: Any
) -> float:
    """Largest difference of a logit to plain llama.cpp that reads everything again.

    n_drafts: with them, llama.cpp removes what was rejected of a batch in its own way, from a state
    for each of the last tokens. A draft head wants the hidden rows of all tokens of a prompt, for
    which the last layer runs over all of them and not over the last alone; that rounds otherwise.
    So a prompt's own logits are held to ROUNDING, and all that replies come from counts as it is.
    """
    kept = effective(calls)
    rows = []
    with stock_context(path, n_rs_seq=n_drafts, **settings) as context:
        for call in kept:
            context.decode(call.tokens, call.pos, outputs=call.outputs)
            rows.append(None if call.logits is None else context.logits(-1))
            if call.n_stays not in (None, len(call.tokens)):
                assert context.seq_rm(0, call.start + call.n_stays, -1)
    if not n_drafts:
        return largest_difference(kept, rows)
    difference = largest_difference(kept, rows)
    assert difference < bound(**ROUNDING), difference
    of_reply = [len(call.tokens) == 1 or call.outputs == "all" for call in kept]
    return largest_difference(list(compress(kept, of_reply)), list(compress(rows, of_reply)))


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
