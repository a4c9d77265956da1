"""Calibration files: which one holds for a model, what is refused, and what scores afterwards."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import ask, log_records, make_config, random_tokens, record

from kvmem.config import EngineConfig
from kvmem.engine.calibration import Calibration, Found, file_names, find, scoring
from kvmem.engine.engine import Engine
from kvmem.engine.fingerprint import fingerprint
from kvmem.errors import ConfigError, StateError
from kvmem.llama import gguf

PAIRS = ((1, 1), (0, 0))


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a folder of its own, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copy(tiny_llama, tmp_path / "model.gguf"))


def made_for(model: Path, **fields: object) -> Calibration:
    plain = Calibration(
        fingerprint=fingerprint(model), type_k="q8_0", type_v="q8_0", pairs=PAIRS, slice_tokens=4
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def config_for(model: Path, **memory: object) -> EngineConfig:
    return make_config(model, type_k="q8_0", type_v="q8_0", **memory)


def beside(model: Path) -> Path:
    return file_names(model, config_for(model).memory, fingerprint(model))[0]


def test_a_fingerprint_is_of_the_bytes_not_of_the_name(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(model, tmp_path / "other.gguf"))
    assert fingerprint(other) == fingerprint(model)
    assert gguf.split_files(model) == [model]
    offset, size = gguf.data_offset(model), model.stat().st_size
    for at in (8, offset - 1, offset, size - 1):
        data = bytearray(model.read_bytes())
        # the version and counts of the header must stay readable: change what is a name or a weight
        at = data.index(b"general.architecture") + 8 if at == 8 else at
        data[at] ^= 1
        other.write_bytes(data)
        try:
            found = fingerprint(other)
        except Exception as error:
            found = str(error)
        assert found != fingerprint(model), at


def test_a_found_file_decides_what_scores(model: Path) -> None:
    path = beside(model)
    made_for(model, slice_tokens=8).save(path)
    with Engine(config_for(model)) as engine:
        assert engine.calibration.source == str(path)
        memory = engine.tiered
        il = [memory.layout.layers[pair.layer].il for pair in memory.summaries.pairs]
        heads = [pair.kv_head for pair in memory.summaries.pairs]
        assert tuple(zip(il, heads, strict=True)) == PAIRS
        assert memory.summaries.slice_tokens == 8
        reply = ask(engine.session(), random_tokens(600), span=(580, 600), max_tokens=1)
        assert reply.stats.memory.scoring == "2 pairs (calibrated), slices of 8"
        small = engine.facts.host_bytes_per_token
    with Engine(config_for(model, calibration="off")) as engine:
        assert engine.calibration == Found(None, "off")
        assert "uncalibrated" in str(engine.tiered.scoring)
        assert engine.facts.host_bytes_per_token > small


def test_the_cache_is_looked_at_behind_the_models_folder(model: Path) -> None:
    config = config_for(model)
    path = file_names(model, config.memory, fingerprint(model))[1]
    made_for(model).save(path)
    assert find(config) == Found(made_for(model), str(path))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fingerprint": "0" * 64}, "made for this model file"),
        ({"type_k": "f16", "type_v": "f16"}, "made for K q8_0 and V q8_0"),
        ({"pairs": ()}, "with pairs"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_all_pairs_score(
    model: Path, fields: dict[str, object], why: str
) -> None:
    path = beside(model)
    made_for(model, **fields).save(path)
    with log_records("kvmem.engine.calibration") as records:
        found = find(config_for(model))
    assert found == Found(None, f"none: {path} was refused")
    (said,) = [record.getMessage() for record in records]
    assert str(path) in said and why in said and "uncalibrated default" in said
    with pytest.raises(ConfigError, match=why):  # the same file, asked for by name
        find(config_for(model, calibration=str(path)))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "kvmem calibration 1"}', "null"])
def test_a_damaged_file_is_refused(model: Path, text: str) -> None:
    path = beside(model)
    path.write_text(text)
    assert find(config_for(model)).source == f"none: {path} was refused"


def test_scores_that_need_all_pairs_get_them(model: Path) -> None:
    made_for(model).save(beside(model))
    assert find(config_for(model, scorer="cosine")).calibration is None
    assert find(config_for(model, scorer="heads")).calibration == made_for(model)
    with record(model, scorer="mass") as recorded:
        recorded.engine.use_calibration(Found(made_for(model), "a test"))
        memory = recorded.memory
        assert memory.summaries.pairs == memory.layout.pairs()
        assert (
            str(memory.scoring) == f"{len(memory.layout.pairs())} pairs (uncalibrated), slices of 8"
        )


def test_pairs_that_the_model_has_not_are_named(model: Path) -> None:
    with record(model) as recorded:
        layout = recorded.memory.layout
        for fields, why in (
            ({"pairs": ((99, 0),)}, r"\(99, 0\)"),
            ({"pairs": ((0, 77),)}, r"\(0, 77\)"),
            ({"slice_tokens": 5}, "divide block_tokens"),
        ):
            with pytest.raises(ConfigError, match=why):
                scoring(layout, made_for(model, **fields))


def test_a_running_session_changes_its_pairs_without_reading(model: Path) -> None:
    tokens = random_tokens(700)
    with record(model) as recorded:
        ask(recorded.session, tokens, span=(660, 680), max_tokens=1)
        n_calls = len(recorded.calls)
        used = recorded.memory.host.used
        recorded.engine.use_calibration(Found(made_for(model), "a test"))
        assert len(recorded.calls) == n_calls
        assert recorded.memory.host.used < used
        recorded.memory.check()
        changed = [recorded.memory.summaries.keys(i) for i in range(2)]
        # the question's Q is of other layers, perhaps: it is asked anew, and the session goes on
        more = (*tokens, *random_tokens(40, 1))
        reply = ask(recorded.session, more, span=(660, 680), max_tokens=1)
        assert reply.stats.memory.scoring.startswith("2 pairs")
        with pytest.raises(ConfigError):
            recorded.engine.use_calibration(Found(made_for(model, pairs=((99, 0),)), "a test"))
        recorded.memory.check()
    made_for(model).save(beside(model))
    with record(model) as recorded:
        ask(recorded.session, tokens, span=(660, 680), max_tokens=1)
        recorded.memory.index.flush()
        fresh = [recorded.memory.summaries.keys(i) for i in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(changed, fresh, strict=True))


def test_plain_memory_has_no_pairs(model: Path) -> None:
    with Engine(make_config(model, enabled=False)) as engine:
        assert engine.calibration.calibration is None
        with pytest.raises(StateError, match="off"):
            engine.use_calibration(Found(None, "a test"))


def test_a_file_is_what_was_saved(model: Path, tmp_path: Path) -> None:
    made = made_for(model, report={"questions": 64})
    path = tmp_path / "deep" / "file.json"
    made.save(path)
    assert Calibration.load(path) == made
    assert json.loads(path.read_text())["format"] == "kvmem calibration 1"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]
