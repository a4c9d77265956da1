"""Copies that fail in the middle, on llama.cpp's own cache: no byte is ever wrong.

The rule is that of ArrayPort's tests (docs/memory.md): bytes before names. Here the rows are real
tensors, so the failing copy leaves real rubbish behind.
"""

from collections.abc import Callable
from pathlib import Path

import devices
import pytest
from block_story import BLOCK, CALLS, N_BLOCKS, story
from engines import log_records

from kvmem.errors import TransferError

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("name", CALLS)
def test_a_copy_that_fails_leaves_every_block_right(name: str, tiny: Callable[..., Path]) -> None:
    call, n_copies = CALLS[name]
    n_failed = 0
    while True:
        with story(tiny("llama_64")) as told:
            told.port.fail(n_failed + 1)
            try:
                call(told)
            except TransferError as error:
                assert "a test lets this copy fail" in str(error)
            else:
                break
            n_failed += 1
            told.check()
            call(told)  # the same call may be made again
            del told.contents[told.ws.n_blocks :]
            told.check()
            if told.ws.n_tokens % BLOCK == 0:
                told.read(BLOCK)
                told.check()
    assert n_failed == n_copies


def test_a_lost_device_closes_the_session_and_says_so(tiny: Callable[..., Path]) -> None:
    with story(tiny("llama_64")) as told:
        told.port.fail(2, loses_device=True)
        calls: list[Callable[[], object]] = [
            lambda: told.ws.apply([1, 2, 11]),
            lambda: told.ws.apply([11]),
            lambda: told.ws.prepare(1),
            lambda: told.ws.read(11),
        ]
        for call in calls:
            with pytest.raises(TransferError, match=r"device was lost .* load the model anew"):
                call()
        assert told.ws.n_tokens == (N_BLOCKS - 1) * BLOCK + 5


def test_records_beyond_the_pinned_limit_are_plain_and_right(tiny: Callable[..., Path]) -> None:
    """On a GPU this is the way through pinned buffers; on a CPU nothing is ever pinned."""
    on_gpu = devices.current().name == "gpu"
    with log_records("kvmem.llama") as records, story(tiny("llama_64"), pinned_bytes=0) as told:
        pinned, plain = told.port.host_bytes()
        assert (pinned, plain > 0) == (0, True)
        for wanted in ([0, 1, 2, 11], [3, 4, 5, 11], [6, 7, 8, 11], [0, 4, 8, 11]):
            told.ws.apply(wanted)
            told.check()
    said = [r.getMessage() for r in records if "plain memory" in r.getMessage()]
    assert len(said) == on_gpu


def test_host_memory_is_pinned_beside_a_gpu_alone(tiny: Callable[..., Path]) -> None:
    with story(tiny("llama_64")) as told:
        pinned, plain = told.port.host_bytes()
        on_gpu = devices.current().name == "gpu"
        assert (pinned > 0, plain > 0) == (on_gpu, not on_gpu)
        assert told.port.transfer == ("cuda" if on_gpu else "generic")


def test_layers_on_two_devices_go_each_by_its_own_way(tiny: Callable[..., Path]) -> None:
    """Two of three count from the end, the output among them: the first layer is on the CPU."""
    on_gpu = devices.current().name == "gpu"
    with story(tiny("llama_64"), n_gpu_layers=2 if on_gpu else 0) as told:
        assert told.port.transfer == ("cuda+generic" if on_gpu else "generic")
        for wanted in ([0, 1, 2, 11], [3, 4, 5, 11], [2, 6, 10, 11]):
            told.ws.apply(wanted)
            told.check()
        told.port.fail(2)
        with pytest.raises(TransferError):
            told.ws.apply([0, 1, 3, 11])
        told.check()


def test_the_plain_copy_has_a_rate(tiny: Callable[..., Path]) -> None:
    with story(tiny("llama_64")) as told:
        assert all(1e8 < rate < 1e13 for rate in told.port.copy_ceiling())
        told.check()
