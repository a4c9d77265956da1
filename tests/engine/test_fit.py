"""A start copes where a pool does not fit after all, and a GPU takes what it needs at once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import ask, log_records, make_config, random_tokens, record

from kvmem.engine import engine as engine_module
from kvmem.engine.engine import Engine
from kvmem.engine.fit import advice, make_fitting, run_largest
from kvmem.engine.memory import Memory
from kvmem.errors import CapacityError, DecodeError
from kvmem.llama.context import Context, Share
from kvmem.sizes import PoolSizes


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama_64", {}), ("qwen35_64", {"ordered": True}), ("qwen35_mtp", {"n_drafts": 3})],
)
def test_the_largest_batch_leaves_nothing_behind(
    kind: str, settings: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    tokens = random_tokens(700)
    replies = []
    for is_run in (False, True):
        with record(tiny(kind), **settings) as recorded:
            memory = recorded.memory
            if is_run:
                recorded.calls.clear()
                run_largest(memory)
                assert [len(call.tokens) for call in recorded.calls] == [128, 1]
                assert memory.port.n_cells_used == 0
                assert memory.drafter is None or memory.drafter.seconds == 0
                memory.check()
            replies.append(ask(recorded.session, tokens, max_tokens=20).tokens)
            memory.check()
    assert replies[0] == replies[1]


def test_layers_are_advised_where_there_is_a_gpu(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        engine = recorded.engine
        config = replace(engine.config, model=replace(engine.config.model, n_gpu_layers=-1))
        host = engine.facts.devices
        gpu = replace(host[0], name="CUDA0")
        said = advice(engine.model, config, engine.facts, engine.sizes)
        assert said == "budget_tokens=192 or ubatch_tokens=64"
        facts = replace(engine.facts, devices=(*host, gpu))
        said = advice(engine.model, config, facts, engine.sizes)
        assert said == "budget_tokens=192, ubatch_tokens=64 or n_gpu_layers=2"
        config = replace(config, model=replace(config.model, n_gpu_layers=0))
        said = advice(engine.model, config, facts, engine.sizes)
        assert said == "budget_tokens=192 or ubatch_tokens=64"


def test_an_error_advises_nothing_where_all_is_as_small_as_can_be(tiny_llama: Path) -> None:
    def make(sizes: PoolSizes) -> Memory:
        raise CapacityError(f"no context of {sizes.pool_tokens} cells")

    settings = {"budget_tokens": 64, "reserve_tokens": 32, "batch_tokens": 32}
    with record(tiny_llama, **settings) as recorded:
        engine = recorded.engine
        with pytest.raises(CapacityError, match=r"^no context of 96 cells$"):
            make_fitting(engine.model, engine.config, engine.facts, make)


@pytest.mark.parametrize(
    ("free_bytes", "said"),
    [
        (63 << 20, "^GPU0 has 63 MiB left beside the pool, and needs 64 to run"),
        (64 << 20, "^no room to run beside the pool: no memory for the compute buffers"),
    ],
)
def test_a_pool_that_nothing_runs_beside_becomes_smaller(
    free_bytes: int, said: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the end the start says so, with what to ask for, and leaves nothing open."""
    made: list[Context] = []

    class Starved(Context):
        """Says that it is on a GPU, and has no memory left for a batch."""

        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            made.append(self)

        def shares(self) -> list[Share]:
            return [Share("GPU0", free_bytes, 1 << 30, 0, 0, 0, 0)]

        def decode(self, *args: Any, **others: Any) -> None:
            raise DecodeError("no memory for the compute buffers")

    monkeypatch.setattr(engine_module, "Context", Starved)
    config = make_config(tiny_llama, workspace_tokens=512, budget_tokens=None)
    with log_records("kvmem.engine.fit") as records, pytest.raises(CapacityError, match=said):
        Engine(config)
    pools = [int(record.getMessage().split()[3]) for record in records]
    assert len(pools) >= 3
    assert pools == sorted(set(pools), reverse=True)
    assert len(made) == len(pools) + 1
    assert all(context.is_closed for context in made)


# A process of its own, which may have little more memory than it has. A megabyte is 512 tokens.
STARVE = """
import json, logging, resource
from pathlib import Path
from engines import log_records, make_config
from kvmem.cli.faults import describe
from kvmem.engine.engine import Engine
from kvmem.errors import KvmemError

settings = dict(workspace_tokens=400_000, batch_tokens=64, type_k="f32", type_v="f32",
                block_tokens=128, budget_tokens={budget}, reserve_tokens=None)
status = Path("/proc/self/status").read_text()
n_bytes = int(status.split("VmSize:")[1].split()[0]) * 1024
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (n_bytes + (550 << 20), before[1]))
found = dict(error=None, pool=0)
with log_records("kvmem.engine.fit") as records:
    try:
        with Engine(make_config(Path({path!r}), **settings)) as engine:
            found["pool"] = engine.sizes.pool_tokens
            found["source"] = engine.sizes.sources["budget_tokens"]
            resource.setrlimit(resource.RLIMIT_AS, before)  # threads have stacks
            engine.session().read(tuple(range(200)))
    except KvmemError as error:
        found["error"] = describe(error, command="serve")[0]
found["said"] = [record.getMessage() for record in records]
print(json.dumps(found))
"""


def starve(path: Path, root: Path, budget: int | None) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "tests"), *sys.path])}
    code = STARVE.format(path=str(path), budget=budget)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_an_automatic_pool_that_does_not_fit_becomes_smaller(
    tiny: Callable[..., Path], root: Path
) -> None:
    found = starve(tiny("llama_64"), root, None)
    assert found["error"] is None
    assert 0 < found["pool"] < 270_000
    assert found["source"] == "auto: a larger pool did not fit"
    said = found["said"]
    assert len(said) >= 2
    assert all("did not fit after all, so it is" in line for line in said)
    assert f"so it is {found['pool']}: no context of" in said[-1]


def test_a_given_pool_that_does_not_fit_names_what_to_ask_for(
    tiny: Callable[..., Path], root: Path
) -> None:
    found = starve(tiny("llama_64"), root, 384_000)
    assert found["said"] == []
    assert found["error"].startswith("error: no context of 400384 cells in batches of 64: ")
    assert found["error"].endswith("; try --kvmem-budget 288000 or -ub 32")


# Until nothing is refused any more: what the start with so many buffers came to.
REFUSE = """
import ctypes, json
from pathlib import Path
import numpy as np
from kvmem.errors import CapacityError, DecodeError
from kvmem.llama.context import Context
from kvmem.llama.draft import DraftContext
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

def run(model):
    sizes = dict(n_ctx=1024, n_cells=1024, block_tokens=32, n_batch=128, n_ubatch=128)
    with Context(model, n_rs_seq=3, **sizes) as context:
        head = DraftContext(context)
        tokens, pos = np.zeros(128, np.int32), np.arange(128, dtype=np.int32)
        LlamaPort(context).place_cells(pos)
        context.decode(tokens, pos)
        head.follow(pos, tokens, pos, np.zeros(head.n_embd, np.float32))
        head.close()

refusals = ctypes.CDLL(None)
said = []
with Model(Path({path!r}), n_gpu_layers=0, load_mtp=True) as model:
    while not said or said[-1]:
        refusals.refusals_start(len(said))
        try:
            run(model)
            said.append("")
        except (CapacityError, DecodeError) as error:
            said.append(str(error))
refusals.refusals_start(-1)
print(json.dumps(said))
"""


def test_a_start_with_drafts_says_so_whichever_buffer_it_is_refused(
    tiny: Callable[..., Path], root: Path, tmp_path: Path
) -> None:
    """A process that ends instead has no last line."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("a C compiler is needed to refuse buffers")
    target, source = tmp_path / "refusals.so", Path(__file__).with_name("refusals.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source], check=True)
    env = {**os.environ, "LD_PRELOAD": str(target), "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "tests"), *sys.path])
    code = REFUSE.format(path=str(tiny("qwen35_mtp")))
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said: list[str] = json.loads(ran.stdout)
    assert said[0].startswith("no context of 1024 cells in batches of 128: ")
    reserved = "no context for drafts: failed to allocate compute pp buffers"
    assert sum(line.startswith(reserved) for line in said) == 2  # the leader's and the head's own
    assert said[-1] == ""
