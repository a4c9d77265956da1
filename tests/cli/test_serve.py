"""The server as a process: start, serve, notice that a client left, stop."""

import json
import re
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from live import WAIT_S, serving

from kvmem.cli.app import execute


def post(address: tuple[str, int], body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{address[0]}:{address[1]}/v1/chat/completions", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        result: dict[str, Any] = json.load(response)
    return result


ARGS = ("--port", "0", "-c", "8192", "-t", "1", "--kvmem-budget", "512",
        "--kvmem-block-tokens", "32", "--kvmem-gen-reserve", "128", "--temp", "0")  # fmt: skip


def send(address: tuple[str, int], body: dict[str, Any]) -> socket.socket:
    """An open connection on which a request was sent."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection(address, timeout=WAIT_S)
    client.sendall(head.encode() + data)
    return client


SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ENDLESS = {**SHORT, "max_tokens": 8000, "ignore_eos": True}


def test_it_serves_notices_who_leaves_and_stops(tiny_llama: Path) -> None:
    with serving("-m", str(tiny_llama), *ARGS, "--alias", "tiny", "--verbose") as server:
        address = server.address()
        assert any(re.match(r"device pool +640 +170.0 KiB", line) for line in server.seen)
        reply = post(address, SHORT)
        assert reply["model"] == "tiny"
        assert reply["usage"]["completion_tokens"] == 3

        with send(address, {**ENDLESS, "stream": True}) as client:
            received = b""
            while b'"content":"' not in received:
                received += client.recv(4096)
            assert b"text/event-stream" in received
        server.until("end=cancelled")
        assert post(address, SHORT)["choices"] == reply["choices"]

        with send(address, ENDLESS), send(address, {**SHORT, "stream": True}) as waiting:
            assert waiting.recv(1) == b"H"  # queued behind the endless one, which so has begun
        server.until("end=cancelled")
        assert post(address, SHORT)["choices"] == reply["choices"]
        assert server.stop() == 130


def test_a_termination_ends_it_in_the_middle_of_a_reply(tiny_llama: Path) -> None:
    with (
        serving("-m", str(tiny_llama), *ARGS) as server,
        send(server.address(), {**ENDLESS, "stream": True}) as client,
    ):
        assert client.recv(1) == b"H"
        assert server.stop(signal.SIGTERM) == -signal.SIGTERM


def test_a_file_that_is_no_model_ends_the_start(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with serving("-m", str(text), "--port", "0") as server:
        found = server.until("^error: .*")
        assert "is no GGUF file" in found[0]
        assert server.process.wait(WAIT_S) == 1


def test_a_port_in_use_ends_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert execute(["serve", "-m", "m.gguf", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: --port is {port}, but must be free on 127.0.0.1 (Address already in use); "
        "try another --port, or 0 for any that is free\n"
    )


def test_a_host_that_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["serve", "-m", "m.gguf", "--port", "0", "--host", "192.0.2.1"]) == 2
    assert "192.0.2.1" in capsys.readouterr().err
