"""Public fault reports of such systems, tried on a server that runs: the whole kind of each.

REF is plain llama.cpp behind the same server (memory off), TWIN a second, fresh one with the same
settings that gets the same requests. tests/engine/test_reports.py has the same faults in terms of
tokens and logits.
"""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest
import tiny_vocab
from live import WAIT_S, Server, serving
from server_fake import until
from serving import Message, letters, said, user
from starlette.testclient import TestClient

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend

CHAT = "/v1/chat/completions"
ENOUGH, LITTLE = 4096, 512
"""Budgets: the whole workspace, and what the cases are tried with."""

FIRST_CONTROL = 256 + len(tiny_vocab.MERGES)
ENDS = {
    str(FIRST_CONTROL + tiny_vocab.CONTROL.index(text)): -100
    for text in ("<|endoftext|>", "<|im_end|>")
}


@contextmanager
def client_of(path: Path, **memory: Any) -> Iterator[TestClient]:
    """The server over the real engine. F16: then the order of cells is the only rounding."""
    sizes: dict[str, Any] = {
        "workspace_tokens": 4096, "budget_tokens": LITTLE, "reserve_tokens": 128,
        "block_tokens": 32, "type_k": "f16", "type_v": "f16",
    }  # fmt: skip
    config = EngineConfig(
        model=ModelConfig(path=path, n_threads=1), memory=MemoryConfig(**{**sizes, **memory})
    )
    app = create_app(
        lambda progress: EngineBackend(config, progress=progress), ServerConfig(alias="tiny")
    )
    with TestClient(app) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


def chat(client: TestClient, *messages: Message, **fields: Any) -> dict[str, Any]:
    """A reply as a whole; streamed ones are put together as a client does."""
    body = {"messages": list(messages), "temperature": 0, "enable_thinking": False, **fields}
    if fields.get("stream"):
        body["stream_options"] = {"include_usage": True}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        whole: dict[str, Any] = response.json()
        choice = whole["choices"][0]
        return {
            "text": choice["message"]["content"], "end": choice["finish_reason"],
            "usage": whole["usage"],
        }  # fmt: skip
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.split("\n\n")
        if line.startswith("data: {")
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "end": next(filter(None, (choice["finish_reason"] for choice in choices))),
        "usage": chunks[-1]["usage"],
    }


ENDLESS: dict[str, dict[str, Any]] = {
    "ignored": {"ignore_eos": True},
    "biased": {"logit_bias": ENDS},
}


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_reply_longer_than_the_reserve(kind: str, tiny: Any) -> None:
    """Case R01: streamed and not, with end tokens ignored or biased; then a short chat."""
    path = tiny(kind)
    with client_of(path, enabled=False) as client:
        ref = chat(client, user(letters(600)), max_tokens=500, ignore_eos=True)
        short_ref = chat(client, user("hello"), max_tokens=20)
    texts = set()
    for fields in ({}, {"stream": True}):
        for ending in ENDLESS.values():
            with client_of(path, reserve_tokens=64) as client:
                reply = chat(client, user(letters(600)), max_tokens=500, **ending, **fields)
                assert (reply["end"], reply["usage"]["completion_tokens"]) == ("length", 500)
                texts.add(reply["text"])
                assert chat(client, user("hello"), max_tokens=20)["text"] == short_ref["text"]
    assert len(texts) == 1  # each a TWIN of the others
    if kind != "llama":  # checkpoints split its reading, so REF would round elsewhere
        return
    with client_of(path, budget_tokens=ENOUGH, reserve_tokens=64) as client:
        reply = chat(client, user(letters(600)), max_tokens=500, ignore_eos=True)
        assert reply["text"] == ref["text"]
        assert chat(client, user("hello"), max_tokens=20)["text"] == short_ref["text"]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_new_text_wider_than_the_budget(kind: str, tiny: Any) -> None:
    """Case R02, as plain user turns: the same request three times."""
    path = tiny(kind)

    def talk(client: TestClient) -> list[dict[str, Any]]:
        start = user(letters(300, 1))
        first = chat(client, start, max_tokens=8)
        grown = (start, said(first["text"]), user(letters(2000, 2)))
        return [first, *(chat(client, *grown, max_tokens=8) for _ in range(3))]

    with client_of(path) as client:
        replies = talk(client)
    with client_of(path) as client:
        assert talk(client) == replies  # TWIN
    with client_of(path, enabled=False) as client:
        ref = talk(client)
    with client_of(path, budget_tokens=ENOUGH) as client:
        enough = talk(client)
    for talked in (replies, enough):
        assert len({reply["text"] for reply in talked[1:]}) == 1
        usage = talked[3]["usage"]
        assert usage["prompt_tokens"] > 2100
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 32
    if kind == "llama":
        assert [reply["text"] for reply in enough] == [reply["text"] for reply in ref]


# The cases below look at a process from outside.

SETTINGS = ("--port", "0", "-c", "4096", "-t", "1", "--kvmem-budget", "512",
            "--kvmem-gen-reserve", "128", "--kvmem-block-tokens", "32", "--temp", "0")  # fmt: skip
MIB = 1 << 20


def status_bytes(server: Server, field: str) -> int:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def open_files(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def post(address: tuple[str, int], *messages: Message, **fields: Any) -> str:
    body = {"messages": messages, "enable_thinking": False, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"http://{address[0]}:{address[1]}{CHAT}", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=4 * WAIT_S) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
def test_three_hundred_requests_leave_a_server_flat(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R06: 20 conversations that grow, replies of 64 tokens, 16 clients at once.

    One after the other, they are in tests/engine/test_reports.py.
    """
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    limit_gib = 0.125
    args = (*SETTINGS, "--kvmem-host-gb", str(limit_gib))
    with serving("-m", str(tiny_llama), *args) as server:
        address = server.address()
        idle, n_files = status_bytes(server, "VmRSS"), open_files(server)
        talks: list[list[Message]] = [[user(letters(150 + 10 * i, i))] for i in range(20)]
        sizes, numbers = [], count()

        def turn(i: int) -> None:
            talk = talks[i % 20]
            text = post(address, *talk, max_tokens=64)
            if i < 260:
                talk += [said(text), user(letters(10, i))]
            if next(numbers) % 10 == 9:
                sizes.append(status_bytes(server, "VmRSS"))

        for first in range(0, 300, 20):  # a conversation's turns follow each other
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(turn, range(first, first + 20)))
        assert len(sizes) == 30
        warm = sizes[10:]
        slope = linear_regression(range(0, 10 * len(warm), 10), warm).slope
        print(f"{slope / 1024:.1f} KiB a request")
        assert slope < 50 * 1024
        until(lambda: open_files(server) <= n_files)  # a closed connection may take a moment
        # the estimate: what the idle server has, and the host store up to its limit
        assert status_bytes(server, "VmHWM") < idle + limit_gib * (1 << 30)
        assert server.stop() == 130


@pytest.mark.slow
def test_a_host_limit_is_no_allocation(tiny_llama: Path) -> None:
    """Case R18: the size when /health turns ok does not depend on the limit, and 0 is explained."""
    idle, committed, used = [], [], []
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    for limit in (0, 1, min(16, machine)):  # the report's: 16 GiB on a machine of 24
        with serving("-m", str(tiny_llama), *SETTINGS, "--kvmem-host-gb", str(limit)) as server:
            address = server.address()
            idle.append(status_bytes(server, "VmRSS"))
            committed.append(status_bytes(server, "VmData"))
            for i in range(50):
                post(address, user(letters(300, i)), max_tokens=4)
            used.append(status_bytes(server, "VmRSS"))
            assert server.stop() == 130
    assert max(idle) < min(idle) + 16 * MIB
    assert max(committed) < min(committed) + 64 * MIB
    assert max(used) < min(used) + 32 * MIB


def test_zero_is_explained_and_more_than_the_machine_is_refused(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R18."""
    from kvmem.cli.app import execute

    assert execute(["serve", "--help"]) == 0
    said_of_it = re.sub(r"[\s│|]+", " ", capsys.readouterr().out)
    assert "never passed. 0 for half of the free RAM" in said_of_it
    with serving("-m", str(tiny_llama), *SETTINGS, "--kvmem-host-gb", "9000") as server:
        found = server.until("^error: .*")
        assert "--kvmem-host-gb is 9000 GiB, but must be" in found[0]
        assert "machine" in found[0]
        assert server.process.wait(WAIT_S) == 2


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (("--kvmem-sink-tokens", "512"), ("--kvmem-sink-tokens is 512", "--kvmem-budget 512")),
        (("--kvmem-sink-tokens", "600"), ("--kvmem-sink-tokens is 600", "--kvmem-budget 512")),
        (("--kvmem-budget", "16"), ("--kvmem-budget is 16", "--kvmem-block-tokens 32")),
        (("--kvmem-gen-reserve", "0"), ("--kvmem-gen-reserve is 0", "--kvmem-block-tokens 32")),
    ],
    ids=str,
)
def test_what_would_fail_each_request_ends_the_start(
    settings: tuple[str, ...], names: tuple[str, str], tiny_llama: Path
) -> None:
    """Case R17: both settings and their values are named."""
    with serving("-m", str(tiny_llama), *SETTINGS, *settings) as server:
        line = server.until("^error: .*")[0]
        assert all(name in line for name in names)
        assert server.process.wait(WAIT_S) == 2


def test_an_uneven_budget_serves_long_requests(tiny_llama: Path) -> None:
    """Case R17: lowered with a warning, and then no request fails for it."""
    args = (*SETTINGS, "--kvmem-budget", "300", "--kvmem-sink-tokens", "256")
    with serving("-m", str(tiny_llama), *args) as server:
        server.until("300.*288")
        address = server.address()
        for seed in range(3):
            assert post(address, user(letters(1500, seed)), max_tokens=8)
        assert server.stop(signal.SIGINT) == 130
