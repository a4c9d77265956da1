"""The conformance run's own parts, and the run itself where its packages are installed."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from flags import parse_flags
from ours import kvmem_flags
from pinned_tree import read_pin
from stories import write_stories

from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGES = ("openai", "requests", "wget", "filelock")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("stories") / "stories.gguf")


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [
        ("I believe the meaning of life is", 18),
        ("Write a joke about AI from a very long prompt which will not be truncated", 46),
        ("Hi how are you", 8),
        (" Hello 3" * 43, 43 * 5 + 2),
    ],
)
def test_prompts_have_the_lengths_that_the_tests_expect(
    stories: Path, prompt: str, n_tokens: int
) -> None:
    with Model(stories) as model:
        tokens = Vocab(model).tokenize(prompt, add_special=True)
    assert tokens[0] == 1
    assert len(tokens) == n_tokens


def test_the_window_of_a_slot_is_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFORMANCE_MODELS", "models")
    given = ["--hf-repo", "ggml-org/test-model-stories260K", "--ctx-size", "512", "--parallel", "2"]
    words = kvmem_flags(parse_flags(given))
    assert words[words.index("--ctx-size") + 1] == "256"
    shared = kvmem_flags(parse_flags([*given, "--kv-unified"]))
    assert shared[shared.index("--ctx-size") + 1] == "512"


def test_most_of_what_llama_server_passes_applies() -> None:
    frozen = (HERE / "genuine.txt").read_text(encoding="utf-8").splitlines()
    scope = tomllib.loads((HERE / "scope.toml").read_text(encoding="utf-8"))
    asked = [name for name in frozen if not is_left_out(name, scope)]
    assert max(Counter(frozen).values()) == 1
    assert len(asked) > 0.8 * len(frozen)
    assert all(reason for reason in scope.values())


def test_the_page_is_of_the_scope_and_of_a_commit() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    results = page.partition("<!-- results: written by scripts/conformance -->\n")[2]
    assert re.match(r"Of commit [0-9a-f]{10,}, 20\d\d-\d\d-\d\d\.\n", results)
    frozen = (HERE / "genuine.txt").read_text(encoding="utf-8").splitlines()
    scope = tomllib.loads((HERE / "scope.toml").read_text(encoding="utf-8"))
    told = re.findall(r"^\| `(test_.+)` \| \d+ \| .+ \| (.+) \|$", results, re.MULTILINE)
    assert dict(told[-len(scope) :]) == scope
    asked = [name for name in frozen if not is_left_out(name, scope)]
    assert re.search(rf"^\| all \| \d+ \| \d+ \| {len(asked)} \| \d+ \|$", results, re.MULTILINE)


def is_left_out(name: str, scope: dict[str, str]) -> bool:
    return any(part in scope for part in (name, name.partition("[")[0], name.partition("::")[0]))


def test_the_llama_server_of_comparison_is_that_of_the_pin() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pin = read_pin()
    group = settings["project"]["optional-dependencies"]["conformance"]
    assert f"{pin.name}=={pin.version}" in group


@pytest.mark.slow
@pytest.mark.skipif(
    "CONFORMANCE" not in os.environ, reason="CONFORMANCE=1 runs llama.cpp's server tests"
)
def test_kvmem_passes_what_llama_server_passes() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    assert not missing, "pip install -e '.[conformance]'"
    subprocess.run([sys.executable, ROOT / "scripts" / "conformance"], check=True)
