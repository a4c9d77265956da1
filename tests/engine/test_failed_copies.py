"""A copy between device and host fails in the middle of a request: the error is told, and the next
request is answered as if nothing had been.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engines import ask, random_tokens, record

from kvmem.errors import TransferError
from kvmem.llama.state import restore_state, save_state, state_bytes

EXACT = {"ordered": True, "type_k": "f16", "type_v": "f16"}
HISTORY = random_tokens(900, seed=2)
SPAN = (860, 890)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_the_request_after_is_right(kind: str, tiny: Callable[..., Path]) -> None:
    path = tiny(kind)
    with record(path, **EXACT) as recorded:
        whole = ask(recorded.session, HISTORY, span=SPAN)
        assert whole.stats.memory.decision == "query_replay"
    n_failed = 0
    for n in (1, 9, 18, 26, 28, 30, 31, 32, 33, 34, 36):
        with record(path, **EXACT) as recorded:
            recorded.memory.port.fail(n)
            try:
                ask(recorded.session, HISTORY, span=SPAN)
            except TransferError as error:
                assert "a test lets this copy fail" in str(error)
                n_failed += 1
            recorded.memory.port.fail(0)
            recorded.memory.check()
            again = ask(recorded.session, HISTORY, span=SPAN)
            recorded.memory.check()
            assert again.tokens == whole.tokens, f"after copy {n} failed"
    assert n_failed >= 6


@pytest.mark.parametrize("kind", ["llama", "qwen35", "qwen35_mtp"])
def test_a_lost_device_answers_nothing_more(kind: str, tiny: Callable[..., Path]) -> None:
    """Nothing reaches it any more, a recurrent state and the rows of a draft head neither."""
    drafts = {"n_drafts": 3} if kind == "qwen35_mtp" else {}
    with record(tiny(kind), **EXACT, **drafts) as recorded:
        ask(recorded.session, HISTORY[:100], span=(60, 90))
        recorded.memory.port.fail(3, loses_device=True)
        for history in (HISTORY, HISTORY, HISTORY[:50]):
            with pytest.raises(TransferError, match="load the model anew"):
                ask(recorded.session, history, span=(len(history) - 40, len(history) - 10))
        context, memory = recorded.memory.context, recorded.memory
        if memory.is_hybrid:
            state = np.zeros(state_bytes(context), np.uint8)
            for touch in (save_state, partial(restore_state, n_tokens=0)):
                with pytest.raises(TransferError, match="load the model anew"):
                    touch(context, state)
