"""The agent's tasks: in this process, against a server, and what is made of the records."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, get_type_hints

import pytest
from rich.console import Console

from kvmem.bench.agent import AgentRecord, AgentSpec, run_agent, summarise_agent
from kvmem.bench.client import run_remote
from kvmem.bench.record import environment, read_jsonl, write_jsonl
from kvmem.bench.report import round_table
from kvmem.bench.saved import load_run, run_files
from kvmem.bench.turns import TurnRecord
from kvmem.cli.app import execute
from kvmem.errors import ConfigError, EngineError

SMALL = {"n_tokens": 2048, "rounds": 4, "reply_tokens": 8, "budget_tokens": 256, "n_threads": 1}


@pytest.mark.parametrize("system", ["kvmem", "stock"])
def test_a_tool_task_only_grows(system: str, tiny_llama: Path) -> None:
    spec = AgentSpec(model=tiny_llama, system=system, **SMALL)  # type: ignore[arg-type]
    records = list(run_agent(spec))
    new = spec.new_tokens(1)
    assert [r.prompt_tokens for r in records] == [new + i * (new + 8) for i in range(4)]
    assert records[-1].prompt_tokens + 8 <= 2048
    for before, after in pairwise(records):
        # the last token of a reply was sampled, and never decoded
        assert after.cached_tokens == before.prompt_tokens + 7
    assert all(r.prompt_s > 0 and r.decode_s > 0 and r.reply_tokens == 8 for r in records)
    assert all(0 < (r.rss_bytes or 0) <= (r.rss_peak_bytes or 0) for r in records)
    for r in records:
        stored = (r.cached_tokens + r.read_tokens + 7) // 32 - r.cached_tokens // 32
        assert (r.bytes_stored or 0) > 0 if system == "kvmem" and stored else r.bytes_stored == 0
        for moved, rate, share in (
            (r.bytes_in, r.to_device_per_s, r.of_ceiling),
            (r.bytes_stored, r.to_host_per_s, r.to_host_of_ceiling),
        ):
            assert (rate is None) == (share is None) == (not moved)
            assert rate is None or (rate > 0 and 0 < (share or 0) < 2)
    decisions = {r.decision for r in records[1:]}
    assert decisions == {"off"} if system == "stock" else "cached_query" in decisions


def test_a_chat_asks_anew_each_round(tiny_llama: Path) -> None:
    spec = AgentSpec(model=tiny_llama, task="chat", **SMALL)  # type: ignore[arg-type]
    records = list(run_agent(spec))
    replies = [8, 8, 8, 32]  # the last is code
    assert [r.reply_tokens for r in records] == replies
    assert records[0].prompt_tokens == (2048 - sum(replies)) // 2
    assert records[-1].prompt_tokens + 32 == pytest.approx(2048, abs=8)
    assert "cached_query" not in {r.decision for r in records}
    (summary,) = summarise_agent(records)
    assert summary.replay_share is not None
    assert 0 < summary.replay_share < 0.5


def test_drafts_are_counted(handset: Path) -> None:
    spec = AgentSpec(model=handset, n_drafts=3, **SMALL)  # type: ignore[arg-type]
    records = list(run_agent(spec))
    for r in records:
        assert r.drafted_tokens is not None and r.accepted_tokens is not None
        # each of the 8 tokens but the first came from a step, as its own choice or as a draft
        assert 0 <= r.accepted_tokens <= min(r.drafted_tokens, 7)
    assert sum(r.drafted_tokens or 0 for r in records) > 0
    plain = list(run_agent(replace(spec, n_drafts=0)))
    assert [r.drafted_tokens for r in plain] == [0] * 4


def test_the_chat_task_is_whole_on_a_trained_hybrid(root: Path) -> None:
    """A long text, questions, code at the end: with drafts of its MTP block, and beside stock."""
    path = root / "bench" / "recall_model" / "recall-qwen35.gguf"
    spec = AgentSpec(model=path, task="chat", n_drafts=3, **{**SMALL, "n_tokens": 1536})  # type: ignore[arg-type]
    records = [*run_agent(spec), *run_agent(replace(spec, system="stock"))]
    own, stock = summarise_agent(records)
    assert own.n_tokens == stock.n_tokens
    for summary in (own, stock):
        assert summary.rounds == 4
        assert summary.initial_per_s > 0 and summary.overall_per_s > 0
        assert summary.decode_per_s > 0 and summary.decode_last_per_s > 0
        assert (summary.peak_rss_bytes or 0) > 0
    assert own.accepted_share is not None and 0 <= own.accepted_share <= 1
    assert own.replay_share is not None and stock.replay_share == 0
    assert stock.accepted_share is None


def record(turn: int, **fields: Any) -> AgentRecord:
    values: dict[str, Any] = {
        "task": "tools", "system": "kvmem", "round": turn, "prompt_tokens": 100 * (turn + 1),
        "cached_tokens": 100 * turn, "replayed_tokens": 25, "reply_tokens": 11, "prompt_s": 1.0,
        "decode_s": 2.0, "decision": "cached_query", "phases": None, "bytes_in": 10,
        "drafted_tokens": None, "accepted_tokens": None, "device_bytes": 1, "host_bytes": 2,
        "rss_bytes": 3 + turn, "gpu_bytes": 9 - turn,
    }  # fmt: skip
    return AgentRecord(**{**values, **fields})


def test_rates_and_shares_by_hand() -> None:
    records = [record(0), record(1, prompt_s=3.0, decode_s=5.0), record(2, decode_s=1.0)]
    (summary,) = summarise_agent(records)
    assert (summary.initial_per_s, summary.overall_per_s) == (100.0, 300 / 5)
    assert summary.overall_over_initial == pytest.approx(0.6)
    assert (summary.decode_per_s, summary.decode_last_per_s) == (5.0, 10.0)
    assert summary.replay_share == 75 / 375
    assert (summary.peak_rss_bytes, summary.peak_gpu_bytes) == (5, 9)
    assert summary.peak_gpu_used_bytes is None  # as in old records
    peaks = [record(0, rss_peak_bytes=8, gpu_used_bytes=20), record(1, gpu_used_bytes=19)]
    (peak,) = summarise_agent(peaks)
    assert (peak.peak_rss_bytes, peak.peak_gpu_used_bytes) == (8, 20)
    assert (summary.n_tokens, summary.rounds, summary.accepted_share) == (311, 3, None)
    assert math.isnan(summarise_agent([record(0, reply_tokens=1, decode_s=0.0)])[0].decode_per_s)
    drafted = [record(0, drafted_tokens=8, accepted_tokens=6)]
    assert summarise_agent(drafted)[0].accepted_share == 0.75
    (kept,) = summarise_agent([record(0, cached_tokens=100, replayed_tokens=0)])
    assert (kept.overall_per_s, kept.replay_share) == (0.0, None)
    assert math.isnan(kept.overall_over_initial)


def test_the_phases_of_rounds_add_up() -> None:
    records = [
        record(0, phases={"read_s": 0.5, "decode_s": 2.0}),
        record(1, phases={"read_s": 0.25, "score_s": 0.5, "decode_s": 2.0}),
        record(2, phases={"move_s": 0.125}),  # as older records have it
    ]
    console = Console(width=100, file=StringIO())
    console.print(round_table(records))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    rows = {line[:20].strip(): line[20:].split() for line in lines[2:]}
    assert rows["score"] == ["0.000", "0.000", "0.500"]
    assert rows["move blocks"] == ["0.000", "0.125", "0.125"]
    assert rows["all else"] == ["0.500", "2.875", "3.625"]
    assert rows["all"] == ["3.000", "3.000", "9.000"]


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"rounds": 1}, "rounds"), ({"reply_tokens": 1}, "reply_tokens"), ({"n_tokens": 99}, "n_tok")],
)
def test_wrong_settings_are_named(fields: dict[str, int], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        AgentSpec(model=None, **{**SMALL, **fields})  # type: ignore[arg-type]


class Server(ThreadingHTTPServer):
    """Streams three words, and counts a token for every four characters."""

    requests: list[dict[str, Any]]
    status = 200
    tells_usage = True


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.send_response(self.server.status)
        self.end_headers()
        n_prompt = sum(len(message["content"]) for message in body["messages"]) // 4
        usage = {"prompt_tokens": n_prompt, "completion_tokens": 3}
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": word}}]} for word in ("it ", "is ", "so")]
        events += [{"choices": [], "usage": usage}] if self.server.tells_usage else []
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.requests = []
    thread = Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_server_is_given_the_same_rounds(server: Server) -> None:
    spec = AgentSpec(model=None, system="server", **SMALL)  # type: ignore[arg-type]
    records = list(run_remote(spec, address(server)))
    assert [r.round for r in records] == [0, 1, 2, 3]
    assert records[-1].prompt_tokens == pytest.approx(2048, rel=0.05)
    assert all(r.prompt_s > 0 and r.decode_s >= 0 and r.reply_tokens == 3 for r in records)
    roles = [message["role"] for message in server.requests[-1]["messages"]]
    assert roles == ["system", "user"] + ["assistant", "tool"] * 3
    said = server.requests[-1]["messages"][2]
    assert (said["content"], said["tool_calls"][0]["id"]) == ("it is so", "call0")
    assert server.requests[-1]["messages"][3]["tool_call_id"] == "call0"
    # the first request only tells how long a token is
    assert server.requests[-1]["messages"][:2] == server.requests[1]["messages"]
    assert server.requests[0]["max_tokens"] == 1

    chat = replace(spec, task="chat")
    list(run_remote(chat, address(server)))
    roles = [message["role"] for message in server.requests[-1]["messages"]]
    assert roles == ["system", "user"] + ["assistant", "user"] * 3


def test_a_server_that_refuses_or_tells_nothing_is_an_error(server: Server) -> None:
    spec = AgentSpec(model=None, system="server", **SMALL)  # type: ignore[arg-type]
    server.tells_usage = False
    with pytest.raises(EngineError, match="told no usage"):
        list(run_remote(spec, address(server)))
    server.status = 503
    with pytest.raises(EngineError, match="answered 503"):
        list(run_remote(spec, address(server)))
    for wrong in ("http://127.0.0.1:1", "127.0.0.1:1", "nonsense"):
        with pytest.raises(EngineError, match="did not answer"):
            list(run_remote(spec, wrong))


def test_from_the_command_line_to_a_report(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", "2048", "--rounds", "4", "--reply", "8", "--kvmem-budget", "256"]
    target = tmp_path / "agent.jsonl"
    command = ["bench", "agent", "-m", str(tiny_llama), "-t", "1", "--stock", "--task", "tools"]
    assert execute([*command, *sizes, "-o", str(target)]) == 0
    table = capsys.readouterr().out
    assert "stock" in table
    assert "blocks that moved" in table
    where = read_jsonl(target)[0]["settings"]
    assert (where["task"], where["system"]) == (["tools"], ["kvmem", "stock"])
    write_jsonl(tmp_path / "other.jsonl", [environment(tiny_llama, {}), {"what": "else"}])
    drafts = {"record": "drafts", "what": "save a state", "ms": 15.3, "n": 9}  # an old line
    samples: dict[type, Any] = {int: 1, float: 0.5, bool: True, str: "code"}
    turn = {name: samples[hint] for name, hint in get_type_hints(TurnRecord).items()}
    turn["away"] = None
    write_jsonl(tmp_path / "turns.jsonl", [{"record": "TurnRecord", **turn}])
    write_jsonl(tmp_path / "old.jsonl", [drafts])
    experiment = {"experiment": "transfers", "what": "seal 1 block", "GB/s": 38.4, "n": 9}
    write_jsonl(tmp_path / "gpu.jsonl", [experiment])  # without a first line about the machine
    runs = [load_run(path) for path in run_files(tmp_path)]
    assert [(len(run.agents), run.n_others) for run in runs] == [
        *((8, 0), (0, 0), (0, 0), (0, 1), (0, 0))
    ]
    assert runs[0].environment["bench"] == "agent"
    assert execute(["bench", "report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "agent.jsonl: llama.gguf" in said
    assert "1 records that another tool has written" in said
    assert "seal 1 block  GB/s 38.4, n 9" in said
    assert execute(["bench", "report", str(tmp_path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert [row["system"] for row in first["agent"]] == ["kvmem", "stock"]


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "report", str(tmp_path)]) == 2
    assert "a folder with .jsonl files" in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_file_that_no_bench_wrote_is_named_and_hides_no_other(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("[]\n")
    write_jsonl(tmp_path / "b.jsonl", [environment(None, {}, "agent"), {"what": "else"}])
    (tmp_path / "c.jsonl").mkdir()
    assert execute(["bench", "report", str(tmp_path), *how]) == 1
    said = capsys.readouterr()
    assert "b.jsonl" in said.out and "a.jsonl" not in said.out
    first, second = said.err.splitlines()
    for name, why, line in (("a", "a line is no object", first), ("c", "Is a directory", second)):
        start = f"error: the file of a kept run is {tmp_path / name}.jsonl, but must be one that "
        assert line.startswith(start) and why in line


KEPT = Path(__file__).parents[2] / "bench/results"
AGENT, SPEED, TURNS, RECALL = (
    f"{name}-2026-11-30"
    for name in ("agent-chat-27b-h200", "speed-smollm2", "turns-smollm2", "recall-smollm2")
)


@pytest.mark.parametrize(
    ("kept", "name", "value"),
    [
        (AGENT, "prompt_tokens", None),
        (AGENT, "accepted_tokens", "x"),
        (AGENT, "phases", 3),
        (AGENT, "phases", {"read_s": "x"}),
        (AGENT, "decision", 1),
        (AGENT, "task", "Tools"),
        (AGENT, "prompt_s", 0),
        (AGENT, "round", True),
        (SPEED, "first_token_s", "x"),
        (SPEED, "of_ceiling", []),
        (TURNS, "answered", 1),
        (TURNS, "away", "0"),
        (RECALL, "policy", {}),
        (RECALL, "new_blocks", None),
    ],
)
def test_a_wrong_value_is_named_and_hides_no_other_file(
    kept: str, name: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *rest = read_jsonl(KEPT / f"{kept}.jsonl")
    assert name in second
    broken = tmp_path / "a.jsonl"
    write_jsonl(broken, [first, {**second, name: value}, *rest])
    write_jsonl(tmp_path / "b.jsonl", read_jsonl(KEPT / f"{SPEED}.jsonl"))
    assert execute(["bench", "report", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "b.jsonl" in said.out and "a.jsonl" not in said.out
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: the file of a kept run is {broken}, but must be one that ")
    assert f"(line 2: {name} is {json.dumps(value, separators=(',', ':'))})" in line


def test_a_run_that_was_killed_is_shown_as_far_as_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    kept = (KEPT / f"{AGENT}.jsonl").read_text()
    path.write_text(kept[:-30])
    assert execute(["bench", "report", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    n_lines = kept.count("\n")
    assert json.loads(said.out)["agent"][0]["rounds"] == n_lines - 2  # the first, and the cut one
    line = f"W kvmem.bench.record: {path}: line {n_lines}, the last, is not whole: left out"
    assert said.err.splitlines() == [line]
    path.write_text(kept.replace('"round":1,', '"round":,'))
    assert execute(["bench", "report", str(tmp_path)]) == 1
    assert "(line 3: Expecting value at column" in capsys.readouterr().err


def test_a_run_that_was_stopped_at_a_paraphrased_question_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = read_jsonl(KEPT / f"{RECALL}.jsonl")
    write_jsonl(tmp_path / "a.jsonl", [first, next(r for r in rest if not r["shares_word"])])
    assert execute(["bench", "report", str(tmp_path), "--json"]) == 0
    ((row,),) = json.loads(capsys.readouterr().out)["recall"].values()
    assert (row["n"], row["n_paraphrased"], row["kl_nats"]) == (0, 1, [None] * 3)
    assert execute(["bench", "report", str(tmp_path)]) == 0


def test_what_was_no_number_is_none_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a list of GPUs that is none is not shown, a name in brackets as it is."""
    where = {"record": "environment", "gpus": 5, "model": "[/x].gguf", "cpu": "[b]"}
    write_jsonl(tmp_path / "a.jsonl", [where, record(0)])
    known = record(0, prompt_s=math.nan, phases={"read_s": math.nan}, of_ceiling=None)
    write_jsonl(tmp_path / "b.jsonl", [known])
    (found,) = load_run(tmp_path / "b.jsonl").agents
    assert math.isnan(found.prompt_s) and found.of_ceiling is None
    assert found.phases is not None and math.isnan(found.phases["read_s"])
    assert execute(["bench", "report", str(tmp_path)]) == 0
    assert "a.jsonl: [/x].gguf, [b]\n" in capsys.readouterr().out


def test_runs_are_drawn_as_png_and_svg(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    sizes = ["--depth", "1024", "--depth", "1536", "--pool-tokens", "256", "--prefill", "64"]
    command = ["bench", "speed", "-m", str(tiny_llama), "-t", "1", "--repeats", "1", *sizes]
    assert execute([*command, "-o", str(tmp_path / "speed.jsonl"), "--decode", "4"]) == 0
    write_jsonl(tmp_path / "tools.jsonl", [environment(None, {}, "agent"), record(0), record(1)])
    assert execute(["bench", "report", str(tmp_path), "--plots"]) == 0
    for name in ("speed", "tools"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
