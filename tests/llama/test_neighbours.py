"""Another copy of llama.cpp in the same process: both are loaded, in both orders, and both decode.

Upstream's library names would bind the one that comes second to the first. Runs where one of the
other packages is installed; `docs/experiments.md` says how it was run.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OURS = """
from engines import ask, make_config, random_tokens
from kvmem.engine.engine import Engine
engine = Engine(make_config(PATH))
session = engine.session()
def ours():
    session.truncate(0)
    return ask(session, random_tokens(700), span=(660, 690), max_tokens=12).tokens
"""

OTHERS = {
    "llama_cpp": """
import llama_cpp
other = llama_cpp.Llama(PATH, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
def theirs():
    other.reset()
    return list(zip(range(12), other.generate(list(range(1, 60)), temp=0.0)))
""",
    "xllamacpp": """
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = PATH
params.n_ctx = 512
params.n_parallel = 1
params.warmup = False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
other = xllamacpp.Server(params)
def theirs():
    request = {"prompt": "the light of the tower", "max_tokens": 12, "temperature": 0,
               "ignore_eos": True, "cache_prompt": False}
    return [choice["text"] for choice in other.handle_completions(request)["choices"]]
""",
}

RUN = {
    "ours": [OURS, "print(ours())"],
    "theirs": ["{other}", "print(theirs())"],
    "ours first": [OURS, "{other}", "for _ in range(2): print(ours()); print(theirs())"],
    "theirs first": ["{other}", OURS, "for _ in range(2): print(theirs()); print(ours())"],
}


def run(order: str, other: str, path: Path, root: Path) -> list[str]:
    """The lines that a fresh process prints; whatever the other library prints goes elsewhere."""
    code = "\n".join([f"PATH = {str(path)!r}", *RUN[order]]).replace("{other}", OTHERS[other])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([str(root / "tests"), *sys.path]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [line for line in ran.stdout.splitlines() if line.startswith(("(", "["))]


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_both_decode_in_either_order(other: str, tiny_llama: Path, root: Path) -> None:
    if find_spec(other) is None:
        pytest.skip(f"the package {other} is not installed")
    (ours,) = run("ours", other, tiny_llama, root)
    (theirs,) = run("theirs", other, tiny_llama, root)
    assert run("ours first", other, tiny_llama, root) == [ours, theirs] * 2
    assert run("theirs first", other, tiny_llama, root) == [theirs, ours] * 2


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_our_libraries_are_our_own(other: str, tiny_llama: Path, root: Path) -> None:
    """The process maps our llama and ggml and those of the other package, side by side."""
    if find_spec(other) is None:
        pytest.skip(f"the package {other} is not installed")
    code = "print([l.split()[-1] for l in open('/proc/self/maps') if 'llama' in l or 'ggml' in l])"
    RUN["maps"] = ["{other}", OURS, code]
    (line,) = run("maps", other, tiny_llama, root)
    files = {Path(name).name for name in line.strip("[]").replace("'", "").split(", ")}
    own = {name for name in files if name.startswith("libkvmem-")}
    assert {"libkvmem-llama.so", "libkvmem-ggml.so", "libkvmem-ggml-base.so"} <= own
    assert [name for name in files - own if name.endswith(".so")]
