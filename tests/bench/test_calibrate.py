"""`kvmem calibrate` on tiny models: it reads, picks, stores, and goes on after an interrupt."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvmem.bench.calibrate import CalibrationSpec, calibrate, store
from kvmem.bench.generators.office import Office
from kvmem.bench.history import EngineHistory
from kvmem.bench.twin import scored_slices
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.cli.app import execute
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.calibration import find
from kvmem.engine.engine import Engine
from kvmem.errors import ConfigError
from kvmem.kv.score import score_blocks


@pytest.fixture
def model(tiny_qwen35: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random hybrid in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copy(tiny_qwen35, tmp_path / "model.gguf"))


def spec_for(model: Path, **fields: object) -> CalibrationSpec:
    settings: dict[str, object] = {
        "model": ModelConfig(path=model, n_gpu_layers=0, n_threads=1),
        "memory": MemoryConfig(),
        "n_tokens": 6144,
        "n_prompts": 2,
        **fields,
    }
    return CalibrationSpec(**settings)  # type: ignore[arg-type]


def test_a_second_run_goes_on_where_the_first_one_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(model)
    read: list[int] = []
    plain = EngineHistory.read

    def stop_at_second(engine: Engine, tokens: tuple[int, ...]) -> EngineHistory:
        read.append(len(tokens))
        if len(read) == 2:
            raise KeyboardInterrupt
        return plain(engine, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(EngineHistory, "read", stop_at_second)
        with pytest.raises(KeyboardInterrupt):
            calibrate(spec)
        found = calibrate(spec)
    assert len(read) == 3  # the first history once, the second one twice
    assert calibrate(spec).calibration == found.calibration  # from what was kept alone
    assert 1 <= len(found.calibration.pairs) <= 8
    assert found.bytes_per_token <= found.bytes_per_token_whole * 2
    path = store(spec, found.calibration)
    assert path.parent == model.parent
    assert find(EngineConfig(model=spec.model)).calibration == found.calibration
    assert not list((model.parent / "cache" / "kvmem" / "calibration").glob("*.part"))


def test_the_twin_and_the_scorer_say_the_same(model: Path) -> None:
    spec = spec_for(model)
    with Engine(spec.engine()) as engine:
        prompt = make_prompt(Office(), engine.vocab, WorkloadSpec(n_tokens=6144), 1)
        history = EngineHistory.read(engine, prompt.history)
        query = history.ask(prompt.questions[0])
        fine = history.summaries(slice_tokens=4)
        blocks, edges = score_blocks(query, fine, head_slices=2, tail_slices=4)
        wanted = scored_slices(query, fine).sum(axis=0).reshape(len(blocks), -1)
    assert np.allclose(blocks, wanted.sum(axis=1), rtol=1e-4)
    assert np.allclose(edges[:, 0], wanted[:, :2].sum(axis=1), rtol=1e-4)
    assert np.allclose(edges[:, 1], wanted[:, -4:].sum(axis=1), rtol=1e-4)


def test_the_command_says_what_it_found(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["calibrate", "-m", str(model), "-t", "1", "-ngl", "0"]
    code = execute([*args, "--prompts", "2", "--tokens", "6144"])
    said = capsys.readouterr()
    assert "gold recall, held out" in said.out and "all, uncalibrated" in said.out
    stored = model.with_name("model.gguf.q8_0.kvmem.json").exists()
    assert stored == (code == 0)
    assert ("stored in" if stored else "not stored") in said.err


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"n_prompts": 1}, "n_prompts"), ({"n_tokens": 512}, "budget_tokens")],
)
def test_wrong_settings_are_named(fields: dict[str, object], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting):
        spec_for(tmp_path, **fields)
