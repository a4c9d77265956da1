"""A session of many questions: what an oracle brings back, what recency does not, and the table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem.bench import metrics
from kvmem.bench.history import position_scores
from kvmem.bench.turns import Play, TurnRecord, TurnSpec, run_turns, summarise_turns
from kvmem.bench.workload import Question
from kvmem.cli.app import execute
from kvmem.engine import retrieve
from kvmem.errors import ConfigError
from kvmem.kv.scorers import Scores

BLOCK = 32


def spec_for(model: Path, **fields: Any) -> TurnSpec:
    settings: dict[str, Any] = {"n_tokens": 6144, "n_prompts": 1, "n_threads": 1, **fields}
    return TurnSpec(model=model, **settings)


def play_knowing(spec: TurnSpec, monkeypatch: pytest.MonkeyPatch) -> list[TurnRecord]:
    """A session whose scorer likes the blocks of the question's evidence best, and then old ones:
    the newest, which recency would have, come last."""
    asked: list[Question] = []
    plain = Play.ask

    def ask(play: Play, turn: int, question: Question, **others: Any) -> TurnRecord:
        asked.append(question)
        return plain(play, turn, question, **others)

    def score(memory: Any, *others: Any, **more: Any) -> Scores:
        memory.index.flush()
        n_blocks = memory.summaries.n_blocks
        gold = metrics.gold_blocks(asked[-1].gold, BLOCK)
        scores = position_scores(n_blocks, first=gold)
        scores.blocks[np.setdiff1d(np.arange(n_blocks), gold)] *= -1
        return scores

    with monkeypatch.context() as patched:
        patched.setattr(Play, "ask", ask)
        patched.setattr(retrieve, "score", score)
        return list(run_turns(spec))


def test_what_is_wanted_again_comes_back_and_is_counted(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = play_knowing(spec_for(tiny_llama, n_turns=11), monkeypatch)
    assert [r.turn for r in records] == list(range(11))
    assert [r.is_repeated for r in records] == [False] * 8 + [True] * 3
    assert all(r.gold_recall == 1.0 for r in records)
    again = records[8:]
    assert [r.kind for r in again] == [r.kind for r in records[:3]]
    assert any(r.away > 0 for r in again)
    for record in records:
        if record.away > 0:
            assert record.resurrected == 1.0
            assert record.new_blocks > 0
            assert record.bytes_in > 0
        else:
            assert np.isnan(record.resurrected)
        assert 0 <= record.returned_blocks <= record.new_blocks < record.blocks
        assert record.churn == record.new_blocks / record.blocks
    assert records[0].returned_blocks == 0  # nothing had been in sight before
    assert any(r.returned_blocks for r in again)
    rows = {row.name: row for row in summarise_turns(records)}
    assert [rows[name].n for name in ("all turns", "asked first", "asked again")] == [11, 8, 3]
    assert rows["all turns"].gold_recall.mean == rows["all turns"].resurrected.mean == 1.0
    assert rows["all turns"].bytes_in == pytest.approx(np.mean([r.bytes_in for r in records]))
    assert rows["asked again"].returned > rows["asked first"].returned


def test_the_newest_blocks_bring_nothing_back(tiny_llama: Path) -> None:
    records = list(run_turns(spec_for(tiny_llama, n_turns=9, scorer="recency")))
    assert {r.decision for r in records} == {"recency"}
    row = summarise_turns(records)[0]
    assert row.n_away == 9
    assert row.gold_recall.mean == row.resurrected.mean == row.returned == 0.0


def test_from_the_command_line(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "turns.jsonl"
    command = ["bench", "turns", "-m", str(tiny_llama), "--tokens", "6144", "-t", "1"]
    sizes = ["--prompts", "1", "--turns", "2", "-o", str(out)]
    assert execute([*command, *sizes]) == 0
    shown = capsys.readouterr().out
    for word in ("resurrected", "churn", "MB in a turn", "asked first"):
        assert word in shown
    where, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert where["bench"] == "turns"
    assert [record["record"] for record in records] == ["TurnRecord"] * 2


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"n_turns": 1}, "n_turns"),
        ({"n_prompts": 0}, "n_prompts"),
        ({"generator": "poems"}, "generator"),
        ({"budget_tokens": 6144}, "budget_tokens"),
        ({"n_tokens": 600}, "n_tokens"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting):
        spec_for(tmp_path, **fields)
