"""Raw results: strict JSON, one line a record, written whole."""

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

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


def test_a_last_line_that_is_cut_off_is_left_out_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    write_jsonl(path, [{"where": "here"}, {"a": 1}, {"a": "ü"}])
    whole = path.read_bytes()
    assert len(read_jsonl(path)) == 3
    assert caplog.messages == []
    for cut in (b'{"a"', b'{"a":"\xc3', b"{\n"):  # the second within a letter of two bytes
        path.write_bytes(whole + cut)
        assert len(read_jsonl(path)) == 3
        assert caplog.messages == [f"{path}: line 4, the last, is not whole: left out"]
        assert caplog.records[0].levelno == logging.WARNING
        caplog.clear()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1}\n{"a"\n{"a": 2}\n', "line 2: Expecting ':' delimiter at column 5"),
        (b'{"a": 1}\n\n{"a": 2}\n', "line 2: Expecting value at column 1"),
        (b'{"a": 1}\n{"a":"\xff"}\n{"a": 2}\n', "line 2: 'utf-8' codec can't decode byte 0xff"),
        (b'{"a": ', "line 1: Expecting value at column 7"),  # nothing stands before it
    ],
)
def test_another_broken_line_is_an_error_that_says_where(
    text: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=why):
        read_jsonl(path)
