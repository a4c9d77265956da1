"""Other copies of llama.cpp in the same process: in any order of loading, each of them decodes.

Upstream's library names would bind the one that comes second to the first. Runs where one of the
other packages is installed; `docs/experiments.md` says how it was run.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import pytest

SPEAKERS = {
    "kvmem": """
from engines import ask, make_config, random_tokens
from kvmem.engine.engine import Engine
engine = Engine(make_config(PATH))
session = engine.session()
def speak():
    session.truncate(0)
    return ask(session, random_tokens(700), span=(660, 690), max_tokens=12).tokens
""",
    "llama_cpp": """
import llama_cpp
model = llama_cpp.Llama(PATH, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
def speak():
    model.reset()
    return list(zip(range(12), model.generate(list(range(1, 60)), temp=0.0)))
""",
    "xllamacpp": """
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = PATH
params.n_ctx = 512
params.n_parallel = 1
params.warmup = False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
def speak():
    request = {"prompt": "the light of the tower", "max_tokens": 12, "temperature": 0,
               "ignore_eos": True, "cache_prompt": False}
    return [choice["text"] for choice in server.handle_completions(request)["choices"]]
""",
}
OTHERS = [name for name in SPEAKERS if name != "kvmem"]
MAPS = "print([l.split()[-1] for l in open('/proc/self/maps') if 'llama' in l or 'ggml' in l])"


def run(
    order: Sequence[str], path: Path, root: Path, n_rounds: int = 2, last: str = ""
) -> list[str]:
    """What a fresh process prints that loads these and has them speak in turns.

    Whatever a library prints goes elsewhere.
    """
    code = [f"order = {list(order)!r}", "speakers = {name: {} for name in order}"]
    for name in order:
        part = f"PATH = {str(path)!r}" + SPEAKERS[name]
        code.append(f"exec({part!r}, speakers[{name!r}])")
    code += [f"for _ in range({n_rounds}):", "    for name in order:"]
    code += ["        print('>', name, speakers[name]['speak']())", last]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        env={"PYTHONPATH": ":".join([str(root / "tests"), *sys.path]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [line for line in ran.stdout.splitlines() if line.startswith((">", "["))]


def need(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("names", [*((name,) for name in OTHERS), OTHERS], ids="-".join)
def test_each_decodes_in_any_order(names: Sequence[str], tiny_llama: Path, root: Path) -> None:
    need(*names)
    everyone = ["kvmem", *names]
    alone = {name: run([name], tiny_llama, root, n_rounds=1) for name in everyone}
    for order in permutations(everyone):
        wanted = [line for name in order for line in alone[name]]
        assert len(wanted) == len(everyone)
        assert run(order, tiny_llama, root) == wanted * 2


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_our_libraries_are_our_own(other: str, tiny_llama: Path, root: Path) -> None:
    """The process maps our llama and ggml and those of the other package, side by side."""
    need(other)
    line = run([other, "kvmem"], tiny_llama, root, n_rounds=0, last=MAPS)[-1]
    files = {Path(name).name for name in line.strip("[]").replace("'", "").split(", ")}
    own = {name for name in files if name.startswith("libkvmem-")}
    assert {"libkvmem-llama.so", "libkvmem-ggml.so", "libkvmem-ggml-base.so"} <= own
    assert [name for name in files - own if name.endswith(".so")]
