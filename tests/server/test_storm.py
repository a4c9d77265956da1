"""A server in rough weather: bodies of any kind, and clients that leave in the middle."""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bodies import BODIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import WAIT_S, Server, serving
from server_fake import until

CHAT = "/v1/chat/completions"
# KVMEM_TEST_BODIES=10000 for a long run
N_BODIES = int(os.environ.get("KVMEM_TEST_BODIES", "400"))
CONTROL_EVERY = 100

Address = tuple[str, int]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    with serving(
        "-m", str(tiny_llama), "--port", "0", "-c", "2048", "-t", "1", "--kvmem-budget", "512",
        "--kvmem-block-tokens", "32", "--kvmem-gen-reserve", "64", "--kvmem-conversations", "4",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def address(server: Server) -> Address:
    return server.address()


def post(address: Address, body: Any) -> tuple[int, str]:
    """Status and text of the whole answer; a hang is a TimeoutError."""
    with closing(http.client.HTTPConnection(*address, timeout=WAIT_S)) as connection:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def control(address: Address) -> str:
    """What a conversation that nothing has changed is told."""
    turns = [
        {"role": "user", "content": "the tower on the hill"},
        {"role": "assistant", "content": "is old"},
        {"role": "user", "content": "how old?"},
    ]
    status, text = post(address, {"messages": turns, "temperature": 0, "max_tokens": 12})
    assert status == 200, text
    content: str = json.loads(text)["choices"][0]["message"]["content"]
    return content


def open_files(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_any_body_is_answered_and_loses_nothing(server: Server, address: Address) -> None:
    """Each is served or refused by name, and a conversation beside them stays what it was."""
    expected = control(address)
    seen: dict[int, int] = {}

    @settings(
        max_examples=N_BODIES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        fields=BODIES.map(lambda body: list(body.items())),
        n_fields=st.integers(0, 12),  # few of them more often do as they should
        is_stream=st.booleans(),
    )
    def send(fields: list[tuple[str, Any]], n_fields: int, is_stream: bool) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], **dict(fields[:n_fields])}
        status, text = post(address, {**body, "max_tokens": 3, "stream": is_stream})
        seen[status] = seen.get(status, 0) + 1
        if status == 200 and is_stream:
            assert text.rstrip().endswith("data: [DONE]"), text
        elif status == 200:
            assert json.loads(text)["usage"]["completion_tokens"] <= 3
        else:
            assert 400 <= status < 500, (status, text, body)
            assert json.loads(text)["error"]["message"]
        if sum(seen.values()) % CONTROL_EVERY == 0:
            assert control(address) == expected

    send()
    print(f"answers by status: {seen}")
    assert server.process.poll() is None
    assert seen[200] > N_BODIES // 10 and seen[400] > N_BODIES // 10
    assert control(address) == expected


def leave_or_stay(address: Address, number: int) -> str:
    """Read a stream; every other client hangs up behind its first token."""
    messages = [{"role": "user", "content": f"client {number} asks " * (1 + number % 7)}]
    body = {"messages": messages, "max_tokens": 24, "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "temperature": 0}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
    received = b""
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        while piece := connection.recv(65536):
            received += piece
            if number % 2 and b'"content":' in received:
                return ""
    return received.decode()


def test_half_of_fifty_streams_are_dropped_midway(server: Server, address: Address) -> None:
    expected = control(address)
    files = open_files(server)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: leave_or_stay(address, number), range(50)))
    for number, reply in enumerate(replies):
        assert "data: [DONE]" in reply or number % 2
    until(lambda: open_files(server) <= files + 1)
    assert control(address) == expected
