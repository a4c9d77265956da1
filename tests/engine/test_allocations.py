"""After warm-up, a decode step and a new selection ask for no heap memory of our own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import devices
import pytest

# A process of its own, as it counts from its start on. What llama.cpp allocates in a step is in the
# same library as our adapter: the same steps with plain llama.cpp say how much that is.
MEASURE = """
import ctypes, json
from collections import Counter
from pathlib import Path
from dataclasses import replace
import devices
import numpy as np
from engines import N_PLAIN_TOKENS, make_config
from kvmem.engine.engine import Engine
from kvmem.engine.memory import TieredMemory
from kvmem.engine.room import make_reply_room

counter = ctypes.CDLL(None)

def counted(action):
    counter.allocations_start()
    action()
    n = counter.allocations_stop({log!r}.encode())
    lines = [line.split(" ", 1) for line in Path({log!r}).read_text().splitlines()]
    assert len(lines) == n
    ours = [Path(who).name for _, who in lines if "/kvmem/" in who]
    # numpy keeps what is smaller; the arrays of a step are, unless they grow with the pool
    arrays = ["numpy" for n, who in lines if "_multiarray_umath" in who and int(n) >= 1024]
    return Counter(ours + arrays)

def n_left(memory):
    return memory.working_set.counters.blocks_out if isinstance(memory, TieredMemory) else 0

def decode(memory, n, start):
    step = np.empty(1, np.int32)
    first = memory.n_blocks_of(start) if isinstance(memory, TieredMemory) else 0
    for i in range(n):
        step[0] = i % N_PLAIN_TOKENS
        if isinstance(memory, TieredMemory):
            make_reply_room(memory, first)
            memory.decode(step, reply=True)
        else:
            memory.decode(step)

def selections(memory, rng):
    last = memory.working_set.n_blocks - 1
    for _ in range(8):
        chosen = rng.choice(last, 5, replace=False)
        yield np.unique(np.append(chosen, last)).astype(np.int32)

def measure(name):
    # 331 slots: an array with a number for each of them is above what numpy keeps
    config = make_config(
        Path({path!r}), workspace_tokens=8192, block_tokens=8, budget_tokens=2400,
        reserve_tokens=240,
    )
    if name == "plain":
        memory = replace(config.memory, enabled=False, budget_tokens=None, reserve_tokens=None)
        config = replace(config, memory=memory)
    with Engine(config) as engine:
        session = engine.session()
        rng = np.random.default_rng(0)
        session.read(rng.integers(0, N_PLAIN_TOKENS, 2800).astype(np.int32))
        memory = session.memory
        start = memory.n_tokens
        decode(memory, 300, start)  # longer than the reserve: then blocks leave for each that comes
        before = n_left(memory)
        results[name] = counted(lambda: decode(memory, 20, start))
        assert name == "plain" or n_left(memory) > before
        if name == "kvmem":
            memory.seal()
            wanted = list(selections(memory, rng))
            for selection in wanted + wanted:
                session.apply(selection)
            found = counted(lambda: [session.apply(one) for one in wanted])
            results["apply"] = {{who: n for who, n in found.items() if who != "numpy"}}

results = {{}}
with devices.running_on({device!r}):
    measure("kvmem")
    measure("plain")
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("a C compiler is needed to count allocations")
    target = tmp_path_factory.mktemp("counter") / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return target


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["llama_64", "qwen35"])
def test_a_step_and_a_selection_allocate_nothing(
    kind: str, tiny: Callable[..., Path], counter: Path, root: Path, tmp_path: Path
) -> None:
    names = {"path": str(tiny(kind)), "log": str(tmp_path / "log.txt")}
    code = MEASURE.format(**names, device=devices.current().name)
    env = {**os.environ, "LD_PRELOAD": str(counter)}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "tests"), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    plain = found["plain"]
    assert plain, "llama.cpp allocates in a step: it must have been counted"
    assert all(n <= plain.get(name, 0) for name, n in found["kvmem"].items()), found
    assert found["apply"] == {}
