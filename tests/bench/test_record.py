"""Raw results: strict JSON, one line a record, written whole."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmem.bench.record import environment, json_line, read_jsonl, record_file, write_jsonl


@dataclass(frozen=True)
class Sample:
    value: float
    path: Path


def test_lines_are_strict_json_without_nan() -> None:
    line = json_line(Sample(float("nan"), Path("a/b")))
    assert json.loads(line, parse_constant=lambda word: 1 / 0) == {
        "record": "Sample",
        "value": None,
        "path": "a/b",
    }


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "results" / "run.jsonl"
    write_jsonl(target, [{"a": 1}, Sample(0.5, Path("x"))])
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"a": 1},
        {"record": "Sample", "value": 0.5, "path": "x"},
    ]
    assert list(target.parent.iterdir()) == [target]


def test_the_environment_says_where_and_with_what(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    found = environment(model, {"budget_tokens": 512, "model": model}, "speed")
    assert found["model"] == "tiny.gguf"
    assert found["model_bytes"] == 4
    assert found["settings"] == {"budget_tokens": 512, "model": "tiny.gguf"}
    assert found["bench"] == "speed"
    assert found["cores"] >= 1
    json.loads(json_line(found))


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path) -> None:
    target = tmp_path / "results" / "run.jsonl"
    with suppress(KeyboardInterrupt), record_file(target, {"where": "here"}) as keep:
        keep(Sample(0.5, Path("x")), Sample(1.5, Path("y")))
        assert len(read_jsonl(target)) == 3
        keep({"a": 1})
        raise KeyboardInterrupt
    assert [line.get("value") for line in read_jsonl(target)] == [None, 0.5, 1.5, None]
    kept = target.read_bytes()
    with suppress(KeyboardInterrupt), record_file(target, {"where": "there"}):
        raise KeyboardInterrupt
    assert target.read_bytes() == kept  # it has measured nothing
    with record_file(None, {}) as keep:
        keep({"a": 1})
