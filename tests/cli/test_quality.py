"""`kvmem bench quality` on a tiny model: cells, processes, what is kept, and plots."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvmem.bench.longmemeval import read_longmemeval
from kvmem.bench.recall import RecallSpec
from kvmem.bench.sweep import Task, parse_cell, sweep, tasks_of
from kvmem.cli.app import execute
from kvmem.engine.calibration import Calibration
from kvmem.engine.fingerprint import fingerprint
from kvmem.errors import ConfigError
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

CELLS = ("--cell", "harbor:6144:512:32:1", "--cell", "agent:8192:512:32:1")
POLICIES = ("lexical", "heads @first", "exact mass alone @ideal")
ONLY = (*(word for name in POLICIES for word in ("--policy", name)), "--no-stock", "-t", "1")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def kept(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "raw.jsonl"
    args = ["bench", "quality", "-m", str(tiny_llama), *CELLS, *ONLY, "-o", str(path)]
    assert execute([*args, "--jobs", "2", "--seed", "3"]) == 0
    return path


def test_every_cell_is_measured_and_kept(kept: Path) -> None:
    where, *records = lines(kept)
    assert (where["record"], where["bench"]) == ("environment", "quality")
    assert where["settings"]["cells"] == list(CELLS[1::2])
    assert "n_tokens" not in where["settings"]
    assert where["calibration"]["pairs"] is None
    assert where["calibration"]["source"].startswith("none: ")
    policies = {"full", "gold", *POLICIES, "recency"}
    assert {record["policy"] for record in records} == policies
    histories = {(record["cell"], record["seed"]) for record in records}
    assert histories == {(CELLS[1], 3), (CELLS[3], 3)}
    assert len(records) == 2 * 8 * len(policies)
    of = {name: [r for r in records if r["policy"] == name] for name in policies}
    assert {r["bytes_per_token"] for r in of["recency"]} == {0}
    assert len({r["bytes_per_token"] for r in of["heads @first"]}) == 1
    assert all(r["bytes_in"] % r["new_blocks"] == 0 for r in of["gold"] if r["new_blocks"])
    # of one question of each history
    errors = [r["twin_error"] for r in of["heads @first"] if r["twin_error"] is not None]
    assert len(errors) == 2
    assert 0 < max(errors) < 1e-3
    parts = {record["parts"] for record in records if record["cell"] == CELLS[3]}
    assert len(parts) > 1


def test_tables_and_plots_of_what_was_kept(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert execute(["bench", "quality", "--read", str(kept), "--plot", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    words = (
        "paired differences",
        "gold - full",
        "0-20 %",
        "paraphrase",
        "bytes a token",
        "(n = 1)",
    )
    for word in (*CELLS[1::2], *words):
        assert word in shown
    for name in ("recall.svg", "kle.svg", "depth.svg"):
        assert "<svg" in (tmp_path / name).read_text()
    assert not (tmp_path / "budget.svg").exists()
    text = kept.read_text()
    more = tmp_path / "more.jsonl"
    more.write_text(text + text.partition("\n")[2].replace(":512:", ":1024:"))
    assert execute(["bench", "quality", "--read", str(more), "--plot", str(tmp_path)]) == 0
    assert "<svg" in (tmp_path / "budget.svg").read_text()


def test_what_scored_is_kept_and_a_policy_of_any_cell_can_be_asked_for(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs of the file that was found stand in the first line, with its name alone."""
    monkeypatch.setenv("KVMEM_COMMIT", "0123456789ab")
    pairs = Calibration(
        fingerprint=fingerprint(tiny_llama),
        type_k="q8_0",
        type_v="q8_0",
        pairs=((0, 1), (1, 0)),
        slice_tokens=4,
    )
    pairs.save(tmp_path / "two.json")
    out = tmp_path / "raw.jsonl"
    args = ["bench", "quality", "-m", str(tiny_llama), "--cell", "harbor:6144:768:32:1"]
    args += ["--policy", "cosine @ideal", "--policy", "heads* @first", "--no-stock", "-t", "1"]
    args += ["--kvmem-calibration", str(tmp_path / "two.json")]
    assert execute([*args, "-o", str(out)]) == 0
    where, *records = lines(out)
    assert where["commit"] == "0123456789ab"
    assert where["calibration"] == {
        "source": "two.json", "pairs": [[0, 1], [1, 0]], "slice_tokens": 4,
    }  # fmt: skip
    policies = {record["policy"] for record in records}
    assert policies == {"full", "gold", "cosine @ideal", "heads* @first", "recency"}


def test_questions_of_a_file_are_asked_as_far_as_there_are_any(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.json"
    unknown = {**made_item(3), "question_id": "q3_abs"}  # what it asks was never told
    path.write_text(json.dumps([*map(made_item, range(3)), unknown]))
    with Model(tiny_llama) as model:
        n_tokens = max(len(prompt.history) for prompt in read_longmemeval(path, Vocab(model)))
    out = tmp_path / "raw.jsonl"
    args = ["bench", "quality", "-m", str(tiny_llama), "--questions", str(path), "-t", "1"]
    args += ["--policy", "lexical", "--no-stock", "--shuffle", "-o", str(out)]
    cell = f"harbor:{n_tokens}:512:16"
    assert execute([*args, "--cell", f"{cell}:5", "--seed", "1"]) == 0
    records = lines(out)[1:]
    histories = {(record["generator"], record["seed"]) for record in records}
    assert histories == {("longmemeval", 1), ("longmemeval", 2)}
    shown = capsys.readouterr().out
    assert "gold sessions" in shown and "single-session-user" in shown
    of = {record["policy"]: record for record in records}
    assert of["gold"]["gold_recall"] == 1 > of["gold"]["session_recall"] > 0
    assert of["full"]["session_recall"] == 1
    out.unlink()
    assert execute([*args, "--cell", f"{cell}:1", "--seed", "3"]) == 2
    assert "--seed is 3, but must be below 3" in capsys.readouterr().err
    assert execute([*args, "--cell", f"harbor:{4 * n_tokens}:512:16:1"]) == 2
    assert "a file with a history of" in capsys.readouterr().err
    assert not out.exists()


def test_conversations_of_ones_own(root: Path, tmp_path: Path) -> None:
    """The recall model is asked about its two first held-out conversations of this length."""
    folder, out = root / "bench/recall_model", tmp_path / "raw.jsonl"
    args = ["bench", "quality", "-m", str(folder / "recall-qwen35.gguf"), "-t", "1"]
    args += ["--questions", str(folder / "heldout.jsonl"), "--cell", "harbor:1024:256:16:2"]
    assert execute([*args, "--policy", "fused @first", "--no-stock", "-o", str(out)]) == 0
    where, *records = lines(out)
    assert where["settings"]["questions"] == "heldout.jsonl"
    assert {record["kind"] for record in records} >= {"fact", "hop"}
    assert len({record["seed"] for record in records}) == 2
    right = {
        name: fmean(record["forced"] for record in records if record["policy"] == name)
        for name in ("full", "fused @first", "recency")
    }
    assert right["full"] >= 0.8
    assert right["fused @first"] >= 0.8
    assert right["recency"] <= 0.5


def made_item(number: int) -> dict[str, Any]:
    """An item of LongMemEval's format, of three sessions."""
    talk = "The weather was fine and we spoke of this and that, as one does. " * 8
    told = f"I left bicycle number {number} behind the bakery."
    texts = ([talk], [talk, told], [talk, talk])
    return {
        "question_id": f"q{number}",
        "question_type": "single-session-user",
        "question": f"Where did I leave bicycle number {number}?",
        "answer": "behind the bakery",
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_dates": [f"2023/05/{day:02} (Mon) 09:00" for day in (1, 8, 15)],
        "haystack_session_ids": ["s1", "answer_s2", "s3"],
        "haystack_sessions": [
            [{"role": "user", "content": text, "has_answer": text is told} for text in session]
            for session in texts
        ],
        "answer_session_ids": ["answer_s2"],
    }


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

    def measure(task: Task) -> list[object]:
        asked.append((task.spec.n_tokens, task.spec.first_seed))
        return []

    monkeypatch.setattr("kvmem.bench.sweep._measure", measure)
    names = [name for name, _ in sweep(tasks_of(cells), 1)]
    assert names == [cells[1].name] * 2 + [cells[0].name] * 2
    assert asked == [(4096, 0), (4096, 1), (2048, 0), (2048, 1)]
    with pytest.raises(ConfigError, match="cell"):
        parse_cell("harbor:a:b:c:d", base)
