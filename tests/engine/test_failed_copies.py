"""A copy between device and host fails in the middle of a request: the error is told, and the next
request is answered as if nothing had been.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import ask, random_tokens, record

from kvmem.errors import TransferError

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


def test_a_lost_device_answers_nothing_more(tiny: Callable[..., Path]) -> None:
    with record(tiny("llama"), **EXACT) as recorded:
        recorded.memory.port.fail(9, loses_device=True)
        for _ in range(2):
            with pytest.raises(TransferError, match="load the model anew"):
                ask(recorded.session, HISTORY, span=SPAN)
