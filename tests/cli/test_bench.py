"""`kvmem bench` and `kvmem demo` from the command line, on a tiny model."""

import json
from pathlib import Path

import pytest

from kvmem.bench.demo_model import SMOLLM2
from kvmem.cli import progress
from kvmem.cli.app import execute

RECALL = ("bench", "recall", "--prompts", "1", "-t", "1", "--kvmem-scorer", "lexical")


def test_recall_prints_a_table_and_writes_raw_records(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And tells a pipe how far it is."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    raw = tmp_path / "recall.jsonl"
    assert execute([*RECALL, "-m", str(tiny_llama), "-o", str(raw)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"questions: {done} of 8" for done in range(9)]
    for word in ("gold recall", "stock", "full", "gold", "lexical", "recency", "seeds 0..0"):
        assert word in captured.out
    where, *records = [json.loads(line) for line in raw.read_text().splitlines()]
    assert where["settings"]["budget_tokens"] == 512
    assert where["model"] == tiny_llama.name
    assert len(records) == (6 + 2) * 5
    assert {record["policy"] for record in records} == {
        "full", "stock", "gold", "lexical", "recency",
    }  # fmt: skip


def test_recall_as_json_is_one_object(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*RECALL, "-m", str(tiny_llama), "--json", "--shuffle"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in found["rows"]}
    assert rows["gold"]["gold_recall"] == [1.0, 1.0, 1.0]
    assert rows["lexical"]["gold_recall"][0] < 0.8
    assert found["settings"]["shuffle"] is True


@pytest.mark.slow
def test_a_random_model_misses_the_gates(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "recall", "--prompts", "1", "-t", "1", "--gate", "--shuffle"]
    assert execute([*arguments, "-m", str(tiny_llama)]) == 1
    assert "missed" in capsys.readouterr().out


def test_speed_prints_each_system_beside_the_others(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--depth", "1024", "--pool-tokens", "256", "--prefill", "64", "--decode", "4"]
    assert execute(["bench", "speed", "-m", str(tiny_llama), "-t", "1", *sizes]) == 0
    out = capsys.readouterr().out
    for word in ("kvmem", "stock", "window", "prefill", "decode", "5 rounds", "medians"):
        assert word in out


def test_a_floored_budget_is_warned_of(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompts", "1", "--turns", "2", "--reply", "2"]
    sizes += ["--kvmem-budget", "500", "--kvmem-block-tokens", "32"]
    assert execute(["bench", "turns", "-m", str(tiny_llama), "-t", "1", *sizes]) == 0
    line = "W kvmem.config: --kvmem-budget 500 is no multiple of --kvmem-block-tokens 32; using 480"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["recall", "--kvmem-scorer", "best"], "error: --kvmem-scorer is best, but must be one of"),
        (
            ["recall", "--kvmem-budget", "4096"],
            "error: --tokens is 3072, but must be above --kvmem-budget 4096",
        ),
        (["recall", "--gate", "--tokens", "4096"], "error: --gate is for 4096 tokens, budget 512"),
        (
            ["recall", "--gate", "--kvmem-scorer", "lexical"],
            "error: --gate is for lexical, recency, but must be for one with a bar: fused, heads",
        ),
        (
            ["recall", "--prompts", "1", "--tokens", "1300", "--kvmem-budget", "256"],
            "error: --tokens is 1300, but must be more: 3 statements found no place in the history",
        ),
        (["speed", "--depth", "512"], "at least pool_tokens=1024"),
        (["speed", "--repeats", "0"], "at least 1"),
        *(
            (
                [command, "-t", "-3"],
                "error: -t is -3, but must be at least 1, or 0 for all cores; try kvmem bench "
                f"{command} --help",
            )
            for command in ("recall", "quality", "speed", "agent", "turns")
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["bench", *arguments, "-m", str(tiny_llama)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1


def test_the_demo_fetches_nothing_when_a_model_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert execute(["demo", "-m", str(tmp_path / "no.gguf")]) == 1
    assert "no.gguf" in capsys.readouterr().err
    assert not (tmp_path / "kvmem" / SMOLLM2.file_name).exists()


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "recall", "--prompts", "1"),
        ("bench", "speed"),
        ("bench", "agent"),
        ("bench", "turns"),
        ("bench", "quality"),
        ("calibrate",),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_anything_runs(
    command: tuple[str, ...], tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x.jsonl", tmp_path):
        assert execute([*command, "-m", str(tiny_llama), "-o", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"error: --out is {out}, but must be a file that can be")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_name_the_flags_of_bench(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, start in (
        (["recall", "--prompts", "0", "-m", str(tiny_llama)], "error: --prompts is 0, but must"),
        (["agent", "--tokens", "100", "-m", str(tiny_llama)], "error: --tokens is 100, but must"),
        (["report", str(tmp_path)], f"error: the folder is {tmp_path}, but must"),
    ):
        assert execute(["bench", *arguments]) == 2
        assert capsys.readouterr().err.startswith(start)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: kvmem")
    assert captured.err == ""
