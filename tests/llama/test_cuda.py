"""What copies meet on real GPUs: calls to CUDA that fail one by one, and two GPUs.

The flag of a block copy cannot reach pinned buffers that are half full when a copy ends, buffers
that cannot be had, and a device that breaks for good.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import devices
import pytest
from block_story import CALLS, N_SLOTS, story
from engines import log_records

from kvmem.errors import TransferError
from kvmem.llama.memory import fail_cuda

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.gpu]

FIRST_STAGING_CALL = 10
"""Of the calls that make a transfer: behind the table of pieces and two lanes."""


@pytest.mark.parametrize(
    ("name", "pinned_bytes"),
    [("apply", None), ("apply", 0), ("seal", 0), ("truncate", 0)],
)
def test_a_call_that_fails_leaves_every_block_right(
    name: str, pinned_bytes: int | None, tiny: Callable[..., Path]
) -> None:
    """pinned_bytes = 0: all records go through the pinned buffers."""
    call, n_copies = CALLS[name]
    n_failed = n_raised = 0
    while True:
        with story(tiny("llama_64"), pinned_bytes) as told:
            fail_cuda(n_failed + 1)
            try:
                call(told)
            except TransferError as error:
                assert "out of memory" in str(error)
                n_raised += 1
            if fail_cuda(0):
                break
            n_failed += 1
            del told.contents[told.ws.n_blocks :]
            told.check()
            call(told)  # the same call may be made again
            del told.contents[told.ws.n_blocks :]
            told.check()
    assert n_raised > 3 * n_copies, "slot numbers, the kernel and two streams for each direction"


def test_whatever_the_buffers_lack_blocks_are_right(tiny: Callable[..., Path]) -> None:
    """Each call that makes the buffers fails once: smaller ones, none that are pinned, or ggml."""
    n_failed = 0
    ways = []
    with log_records("kvmem.llama") as records:
        while True:
            with story(tiny("llama_64"), 0, lacking=(n_failed + 1, 1)) as told:
                if not told.has_lacked:
                    break
                n_failed += 1
                ways.append(told.port.transfer)
                for wanted in ([0, 1, 2, 11], [3, 4, 5, 11]):
                    told.ws.apply(wanted)
                    told.check()
    assert ways == ["generic"] * (FIRST_STAGING_CALL - 1) + ["cuda"] * 10
    said = "\n".join(record.getMessage() for record in records)
    assert said.count(f"staging buffers of {N_SLOTS // 2} blocks in place of {N_SLOTS}") == 2
    assert said.count("no pinned memory for staging; plain memory is copied by the driver") == 8
    assert said.count("blocks are copied by ggml") == FIRST_STAGING_CALL - 1


@pytest.mark.parametrize(
    ("n_lacking", "way"), [(1, "of 3 blocks"), (2, "of 1 blocks"), (3, "staging buffers: out of")]
)
def test_staging_that_does_not_fit_is_halved_and_then_left_out(
    n_lacking: int, way: str, tiny: Callable[..., Path]
) -> None:
    with (
        log_records("kvmem.llama") as records,
        story(tiny("llama_64"), lacking=(FIRST_STAGING_CALL, n_lacking)) as told,
    ):
        assert told.has_lacked
        assert told.port.transfer == ("cuda" if n_lacking < 3 else "generic")
        for wanted in ([0, 1, 2, 11], [3, 4, 5, 11], [6, 7, 8, 11]):
            told.ws.apply(wanted)
            told.check()
    assert sum(way in record.getMessage() for record in records) == 1


# A process of its own: no call to CUDA succeeds in it after that.
LOSE = """
import os
from pathlib import Path
import devices, pytest
from block_story import story
from kvmem.errors import TransferError
from kvmem.llama.memory import fail_cuda
with devices.running_on("gpu"):
    opened = story(Path({path!r}))
    told = opened.__enter__()
    fail_cuda({n}, loses_device=True)
    for call in (lambda: told.ws.apply([1, 2, 11]), lambda: told.ws.prepare(1),
                 lambda: told.ws.read(11)):
        with pytest.raises(TransferError, match="device was lost .* load the model anew"):
            call()
    print("lost", flush=True)
    os._exit(0)  # llama.cpp cannot free anything now
"""


@pytest.mark.parametrize("n", [1, 3, 9])
def test_a_device_that_breaks_is_told_from_a_copy_that_fails(
    n: int, tiny: Callable[..., Path], root: Path
) -> None:
    code = LOSE.format(path=str(tiny("llama_64")), n=n)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "tests"), *sys.path])}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "lost\n"), ran.stderr


def test_two_gpus_share_the_layers_and_the_blocks(tiny: Callable[..., Path]) -> None:
    if devices.n_gpus() < 2:
        pytest.skip("there are no two GPUs")
    with story(tiny("qwen35_64")) as told:
        holders = [share.device for share in told.context.shares() if share.cells]
        assert len(holders) == 2
        assert "" not in holders
        assert told.port.transfer == "cuda"
        for wanted in ([0, 1, 2, 11], [3, 4, 5, 11], [6, 7, 8, 11]):
            told.ws.apply(wanted)
            told.check()
