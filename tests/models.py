"""Session fixtures with tiny models: `tiny(kind, **changes)`, and `tiny_llama` and the others.

Each file is written once per process of a test session, when its first test asks for it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from handset import write_handset
from tiny import KINDS, make_writer

from kvmem.bench.demo_model import SMOLLM2
from kvmem.paths import cache_folder

TinyWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWriter:
    """Write (or reuse) a tiny model: `tiny("llama", head_dim=64, seed=3)` gives its path."""
    return make_writer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", params=list(KINDS))
def tiny_any(request: pytest.FixtureRequest, tiny: TinyWriter) -> Path:
    """Every kind in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def tiny_llama(tiny: TinyWriter) -> Path:
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: TinyWriter) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny: TinyWriter) -> Path:
    return tiny("qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3moe(tiny: TinyWriter) -> Path:
    return tiny("qwen3moe")


@pytest.fixture(scope="session")
def tiny_smollm3(tiny: TinyWriter) -> Path:
    """No rotation in every fourth layer."""
    return tiny("smollm3")


@pytest.fixture(scope="session")
def tiny_qwen3next_mtp(tiny: TinyWriter) -> Path:
    """The other family of gated delta nets that can draft."""
    return tiny("qwen3next_mtp")


@pytest.fixture(scope="session")
def tiny_gemma3(tiny: TinyWriter) -> Path:
    """Every second layer has a sliding window."""
    return tiny("gemma3")


@pytest.fixture(scope="session")
def tiny_qwen35(tiny: TinyWriter) -> Path:
    """Hybrid: layers 1 and 3 have attention, 0 and 2 a recurrent state."""
    return tiny("qwen35")


@pytest.fixture(scope="session")
def tiny_qwen35_mtp(tiny: TinyWriter) -> Path:
    """The hybrid with its multi-token-prediction block."""
    return tiny("qwen35_mtp")


@pytest.fixture(scope="session")
def handset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hand-set hybrid: plays a script, and recalls a fact exactly or not at all."""
    return write_handset(tmp_path_factory.mktemp("handset") / "handset.gguf", wrong_drafts=(5, 9))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, where `kvmem demo-model` or KVMEM_DEMO_MODEL has put it.

    Tests skip without it, but fail where KVMEM_TEST_NEEDS_MODEL is set, as `make ci` does.
    """
    path = Path(os.environ.get("KVMEM_DEMO_MODEL") or cache_folder() / SMOLLM2.file_name)
    if not path.exists():
        missing = f"the demo model is not at {path}; `kvmem demo-model` fetches it"
        if os.environ.get("KVMEM_TEST_NEEDS_MODEL"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
