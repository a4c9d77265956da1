"""The client side of the benches against real servers: kvmem's, and llama-server itself, out of the
`xllamacpp` wheel of the extra `test`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from live import WAIT_S, serving

from kvmem.bench.agent import AgentSpec, Task, summarise_agent
from kvmem.bench.client import run_remote
from kvmem.bench.remote_speed import RemoteSpec, remote_rows, run_remote_speed
from kvmem.cli.app import execute

GENUINE = Path(__file__).parents[1] / "conformance" / "genuine.py"


@contextmanager
def kvmem_server(model: Path, folder: Path, n_ctx: int) -> Iterator[str]:
    args = ("-m", str(model), "--port", "0", "-c", str(n_ctx), "-t", "1", "-b", "512")
    sizes = ("--kvmem-budget", "512", "--kvmem-gen-reserve", "128", "--kvmem-block-tokens", "32")
    with serving(*args, *sizes) as server:
        yield "http://{}:{}".format(*server.address())


@contextmanager
def llama_server(model: Path, folder: Path, n_ctx: int) -> Iterator[str]:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp, which has llama-server in it, is not installed")
    (folder / "stories.gguf").symlink_to(model)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ("--hf-repo", "ggml-org/test-model-stories260K", "--port", str(port), "--seed", "1")
    process = subprocess.Popen(
        [sys.executable, GENUINE, *flags, "--ctx-size", str(n_ctx), "--batch-size", "512"],
        env={
            **os.environ,
            "CONFORMANCE_MODELS": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 2 * WAIT_S
        while not is_ready(url):
            assert process.poll() is None, "llama-server has ended"
            assert time.monotonic() < deadline, "llama-server does not answer"
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


SERVERS = {"kvmem": kvmem_server, "llama-server": llama_server}


def check_tasks(url: str) -> None:
    tasks: tuple[Task, ...] = ("tools", "chat")
    for task in tasks:
        spec = AgentSpec(
            model=None, system="server", task=task, n_tokens=2048, rounds=4, reply_tokens=8
        )
        records = list(run_remote(spec, url))
        # the server's own counts: replies are whole, and all but their ends was kept
        assert [r.reply_tokens for r in records] == [spec.reply_of(turn) for turn in range(4)]
        assert records[-1].prompt_tokens + 8 == pytest.approx(2048, rel=0.15)
        for before, after in pairwise(records):
            assert after.cached_tokens >= before.prompt_tokens - 64
            assert after.read_tokens < spec.new_tokens(after.round) * 1.3 + 64
        assert all(r.prompt_s > 0 and r.decode_s > 0 for r in records)
        (summary,) = summarise_agent(records)
        assert summary.decode_per_s > 0
        assert summary.replay_share is None


def check_speed(url: str) -> None:
    spec = RemoteSpec(depths=(768, 1536), question_tokens=64, reply_tokens=8, repeats=2)
    records = list(run_remote_speed(spec, url))
    kinds = [(r.depth_tokens, r.kind) for r in records]
    assert kinds == [(depth, kind) for depth in (768, 1536) for kind in ("cold", "warm", "warm")]
    for record in records:
        n_new = record.prompt_tokens - record.cached_tokens
        if record.kind == "cold":
            assert record.prompt_tokens == pytest.approx(record.depth_tokens, rel=0.15)
            assert record.cached_tokens < 64
        else:
            assert 32 < n_new < 256
        assert record.reply_tokens == 8
        # a client waits at least as long as the server says that it worked
        assert record.own_prefill_per_s is not None and record.own_decode_per_s is not None
        assert 0 < record.prefill_per_s <= 1.1 * record.own_prefill_per_s
        assert record.decode_per_s > 0
    rows = remote_rows(records)
    assert [(row.kind, row.n) for row in rows] == [("cold", 1), ("warm", 2)] * 2


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_is_measured_by_the_same_client(
    server: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with SERVERS[server](tiny_llama, tmp_path, 4096) as url:
        check_tasks(url)
        check_speed(url)


def test_speed_of_a_server_from_the_command_line(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "runs" / "speed.jsonl"
    sizes = ["--depth", "512", "--prefill", "64", "--decode", "4", "--repeats", "2"]
    with kvmem_server(tiny_llama, tmp_path, 4096) as url:
        command = ["bench", "speed", "--url", url, *sizes]
        assert execute([*command, "-o", str(target)]) == 0
        table = capsys.readouterr().out
        assert execute([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert execute([*command, "-m", str(tiny_llama)]) == 2
        assert "without --model" in capsys.readouterr().err
    assert all(word in table for word in ("cold", "warm", "first token"))
    assert [row["kind"] for row in found["rows"]] == ["cold", "warm"]
    assert execute(["bench", "report", str(target.parent)]) == 0
    assert "warm" in capsys.readouterr().out
