"""`kvmem bench quality` on a tiny model: cells, processes, what is kept, and plots."""

import json
from pathlib import Path

import pytest

from kvmem.bench.recall import RecallSpec
from kvmem.bench.sweep import parse_cell, sweep
from kvmem.cli.app import execute
from kvmem.errors import ConfigError

CELLS = ("--cell", "harbor:6144:512:32:1", "--cell", "agent:8192:512:32:1")
ONLY = ("--policy", "lexical", "--policy", "exact mass alone @ideal", "--no-stock", "-t", "1")


@pytest.fixture(scope="module")
def kept(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "raw.jsonl"
    args = ["bench", "quality", "-m", str(tiny_llama), *CELLS, *ONLY, "-o", str(path)]
    assert execute([*args, "--jobs", "2", "--seed", "3"]) == 0
    return path


def test_every_cell_is_measured_and_kept(kept: Path) -> None:
    where, *records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert where["record"] == "environment"
    policies = {"full", "gold", "lexical", "exact mass alone @ideal", "recency"}
    assert {record["policy"] for record in records} == policies
    histories = {(record["cell"], record["seed"]) for record in records}
    assert histories == {(CELLS[1], 3), (CELLS[3], 3)}
    assert len(records) == 2 * 8 * len(policies)
    parts = {record["parts"] for record in records if record["cell"] == CELLS[3]}
    assert len(parts) > 1


def test_tables_and_plots_of_what_was_kept(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert execute(["bench", "quality", "--read", str(kept), "--plot", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in (*CELLS[1::2], "paired differences", "gold - full", "0-20 %", "paraphrase"):
        assert word in shown
    for name in ("recall.svg", "kle.svg", "depth.svg"):
        assert "<svg" in (tmp_path / name).read_text()


def test_wrong_cells_policies_and_files_are_named(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["bench", "quality", "-m", str(tiny_llama)]
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"cell": "x", "policy": 1}\n')
    for args, word in (
        ([*model, "--cell", "harbor:3072"], "harbor:3072"),
        ([*model, "--cell", "poems:3072:512:32:1"], "poems"),
        ([*model, "--policy", "fused* @first"], "fused* @first"),  # no calibration
        (["bench", "quality", "--read", str(wrong)], "wrong.jsonl"),
        (["bench", "quality"], "model"),
    ):
        assert execute(args) != 0
        assert word in capsys.readouterr().err


def test_a_sweep_takes_the_longest_first(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = RecallSpec(model=tiny_llama)
    cells = [parse_cell(f"harbor:{n}:512:32:2", base) for n in (2048, 4096)]
    asked: list[tuple[int, int]] = []

    def measure(spec: RecallSpec) -> list[object]:
        asked.append((spec.n_tokens, spec.first_seed))
        return []

    monkeypatch.setattr("kvmem.bench.sweep._measure", measure)
    assert [name for name, _ in sweep(cells, 1)] == [cells[1].name] * 2 + [cells[0].name] * 2
    assert asked == [(4096, 0), (4096, 1), (2048, 0), (2048, 1)]
    with pytest.raises(ConfigError, match="cell"):
        parse_cell("harbor:a:b:c:d", base)
