"""Raw results: strict JSON, one line a record, written whole."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvmem.bench.record import environment, json_line, write_jsonl


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
