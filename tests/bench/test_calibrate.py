"""`kvmem calibrate` on tiny models: it reads, picks, stores, and goes on after an interrupt."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem.bench.asking import read_in_pieces
from kvmem.bench.calibrate import Calibrated, CalibrationSpec, calibrate, discard, store
from kvmem.bench.generators.office import Office
from kvmem.bench.history import EngineHistory
from kvmem.bench.pairs import Picked
from kvmem.bench.progress import Report
from kvmem.bench.twin import scored_slices
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.cli import logs
from kvmem.cli.app import execute
from kvmem.cli.calibrate import calibrate_missing
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine.calibration import Calibration, find
from kvmem.engine.engine import Engine
from kvmem.engine.fingerprint import fingerprint
from kvmem.engine.session import Session
from kvmem.errors import ConfigError
from kvmem.kv.score import score_blocks
from kvmem.kv.scorers import HEADS_CENTRING


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


def kept_parts(model: Path) -> list[Path]:
    return list((model.parent / "cache" / "kvmem" / "calibration").glob("*.part"))


def test_a_second_run_goes_on_where_the_first_one_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(model)
    read: list[int] = []
    told: list[int] = []

    def stop_at_second(
        session: Session, tokens: tuple[int, ...], *args: Any, **fields: Any
    ) -> float:
        read.append(len(tokens))
        if len(read) == 2:
            raise KeyboardInterrupt
        return read_in_pieces(session, tokens, *args, **fields)

    with monkeypatch.context() as patched:
        patched.setattr("kvmem.bench.calibrate.read_in_pieces", stop_at_second)
        with pytest.raises(KeyboardInterrupt):
            calibrate(spec)
        found = calibrate(spec, report=lambda what, done, total: told.append(done))
    assert len(told) > 4 * spec.n_prompts and told == sorted(told), "it moves within a history"
    assert len(read) == 3  # the first history once, the second one twice
    assert calibrate(spec).calibration == found.calibration  # from what was kept alone
    assert 1 <= len(found.calibration.pairs) <= 8
    assert found.bytes_per_token <= found.bytes_per_token_whole * 2
    path = store(spec, found.calibration)
    assert path.parent == model.parent
    assert find(EngineConfig(model=spec.model)).calibration == found.calibration
    assert kept_parts(model)
    discard(spec, found.calibration)
    assert not kept_parts(model)


def test_the_twin_and_the_scorer_say_the_same(model: Path) -> None:
    spec = spec_for(model)
    with Engine(spec.engine()) as engine:
        prompt = make_prompt(Office(), engine.vocab, WorkloadSpec(n_tokens=6144), 1)
        history = EngineHistory.read(engine, prompt.history)
        query = history.ask(prompt.questions[0])
        fine = history.summaries(slice_tokens=4)
        blocks, edges = score_blocks(
            query, fine, head_slices=2, tail_slices=4, centring=HEADS_CENTRING
        )
        wanted = scored_slices(query, fine).sum(axis=0).reshape(len(blocks), -1)
    assert np.allclose(blocks, wanted.sum(axis=1), rtol=1e-4)
    assert np.allclose(edges[:, 0], wanted[:, :2].sum(axis=1), rtol=1e-4)
    assert np.allclose(edges[:, 1], wanted[:, -4:].sum(axis=1), rtol=1e-4)


def test_the_command_says_what_it_found(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["calibrate", "-m", str(model), "-t", "1", "-ngl", "0"]
    code = execute([*args, "--prompts", "2", "--tokens", "6144"])
    said = capsys.readouterr()
    assert "gold recall, held out" in said.out and "uncalibrated" in said.out
    assert "paraphrased" in said.out and "22 questions, 2 histories" in said.out
    stored = model.with_name("model.gguf.q8_0.kvmem.json").exists()
    assert stored == (code == 0)
    assert ("stored in" if stored else "not stored") in said.err
    assert not kept_parts(model)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"n_prompts": 1}, "n_prompts"), ({"n_tokens": 512}, "budget_tokens")],
)
def test_wrong_settings_are_named(fields: dict[str, object], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting):
        spec_for(tmp_path, **fields)


def test_a_start_can_calibrate_first(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `kvmem serve --kvmem-calibrate` does where nothing is found."""
    logs.set_up(verbose=False)
    config = EngineConfig(model=ModelConfig(path=model, n_threads=1))
    found = Calibrated(
        calibration=Calibration(
            fingerprint=fingerprint(model),
            type_k="q8_0",
            type_v="q8_0",
            pairs=((3, 0), (3, 1)),
            slice_tokens=4,
        ),
        picked=Picked(
            pairs=(0, 1),
            recall=0.9,
            recall_whole=0.5,
            by_count=(0.8, 0.9),
            paraphrased=0.8,
            paraphrased_whole=0.4,
            n_questions=16,
            n_groups=2,
        ),
        bytes_per_token=33.0,
        bytes_per_token_whole=33.0,
    )
    asked: list[CalibrationSpec] = []
    shares: list[float] = []

    def calibrate_at_once(spec: CalibrationSpec, *, report: Report) -> Calibrated:
        asked.append(spec)
        report("tokens", 1, 8)
        return found

    monkeypatch.setattr("kvmem.cli.calibrate.calibrate", calibrate_at_once)
    calibrate_missing(config, shares.append)
    said = capsys.readouterr()
    assert said.out == "" and "0.900" in said.err and "stored in" in said.err
    assert asked[0].model == config.model
    assert shares == [0, 1 / 8]
    assert find(config).calibration == found.calibration

    worse = replace(found, picked=replace(found.picked, recall=0.4))
    path = model.with_name("model.gguf.q8_0.kvmem.json")
    path.unlink()
    monkeypatch.setattr("kvmem.cli.calibrate.calibrate", lambda spec, report: worse)
    calibrate_missing(config, shares.append)
    assert "not stored" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (MemoryConfig(enabled=False), "none: KV memory is off"),
        (MemoryConfig(calibration="off"), "off"),
        (MemoryConfig(scorer="lexical"), "none: the scorer lexical has no use for it"),
    ],
)
def test_nothing_is_calibrated_that_would_not_be_used(
    model: Path, memory: MemoryConfig, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(verbose=False)
    config = EngineConfig(model=ModelConfig(path=model), memory=memory)
    calibrate_missing(config, lambda share: None)
    said = capsys.readouterr().err
    assert said == f"not calibrated, as it would not be used: calibration {why}\n"
    assert not kept_parts(model)


def test_a_trained_hybrid_is_calibrated_on_questions_and_a_later_start_uses_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, on eight of its held-out conversations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = root / "bench/recall_model"
    model = Path(shutil.copy(folder / "recall-qwen35.gguf", tmp_path))
    questions = tmp_path / "eight.jsonl"
    lines = (folder / "heldout.jsonl").read_text().splitlines(keepends=True)
    questions.write_text("".join(lines[8:16]))
    args = ["calibrate", "-m", str(model), "--questions", str(questions), "-t", "1", "-ngl", "0"]
    assert execute(args) == 0
    with Engine(EngineConfig(model=ModelConfig(path=model, n_threads=1))) as engine:
        found, source = engine.calibration
        assert found is not None
        assert source == str(model.with_name("recall-qwen35.gguf.q8_0.kvmem.json"))
        assert found.report["read"] == "eight.jsonl"
        assert found.report["histories"] == 8
        scoring = engine.tiered.scoring
        layers = [layer.il for layer in engine.tiered.layout.layers]
        assert scoring.is_calibrated
        pairs = tuple((layers[pair.layer], pair.kv_head) for pair in scoring.pairs)
        assert pairs == found.pairs
