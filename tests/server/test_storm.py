"""A server in rough weather: bodies of any kind, and clients that leave in the middle."""

import http.client
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bodies import BODIES, COMPLETIONS, DETOKENIZE, LIMITS, TOKENIZE, some_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import WAIT_S, Server, serving
from server_fake import until

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
# KVMEM_TEST_BODIES=10000 for a long run
N_BODIES = int(os.environ.get("KVMEM_TEST_BODIES", "400"))
CONTROL_EVERY = 100
MOST = 3  # tokens of a reply, as LIMITS has it

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


def post(address: Address, body: Any, path: str = CHAT) -> tuple[int, str]:
    """Status and text of the whole answer; a hang is a TimeoutError."""
    with closing(http.client.HTTPConnection(*address, timeout=WAIT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
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


CHATS = some_of(BODIES, messages=[{"role": "user", "content": "hi"}])
TEXTS = some_of(COMPLETIONS, prompt="hi")
ROUTES: dict[str, st.SearchStrategy[Any]] = {
    CHAT: CHATS,
    COMPLETION: TEXTS,
    "/v1/completions": TEXTS,
    "/tokenize": some_of(TOKENIZE, content="hi"),
    "/detokenize": some_of(DETOKENIZE),
    "/apply-template": CHATS,
    "/v1/chat/completions/input_tokens": CHATS,
}
GENERATE = (CHAT, COMPLETION, "/v1/completions")
REQUESTS = st.sampled_from([CHAT, CHAT, CHAT, *ROUTES]).flatmap(
    lambda path: st.tuples(st.just(path), ROUTES[path])
)


def require_whole(path: str, text: str) -> None:
    """An answer with the status 200 ends as it should, and has no more tokens than were wanted."""
    if text.startswith((":", "data: ")):
        *_, last = [line for line in text.splitlines() if line.startswith("data: ")]
        assert json.loads(last[6:])["stop"] if path == COMPLETION else last == "data: [DONE]", text
        return
    whole = json.loads(text)
    if path == COMPLETION:
        replies = whole if isinstance(whole, list) else [whole]
        assert all(reply.get("tokens_predicted", 0) <= MOST for reply in replies), text
    elif path in GENERATE:
        assert whole["usage"]["completion_tokens"] <= MOST * len(whole["choices"]), text


def test_any_body_is_answered_and_loses_nothing(server: Server, address: Address) -> None:
    """Each is served or refused by name, and a conversation beside them stays what it was."""
    expected = control(address)
    seen: Counter[tuple[str, int]] = Counter()

    @settings(
        max_examples=N_BODIES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(request=REQUESTS, limit=LIMITS, is_stream=st.booleans())
    def send(request: tuple[str, Any], limit: dict[str, Any], is_stream: bool) -> None:
        path, body = request
        if path in GENERATE:
            body = {**body, **limit, "stream": is_stream}
        status, text = post(address, body, path)
        seen[path, status] += 1
        if status == 200:
            require_whole(path, text)
        else:
            assert 400 <= status < 500, (status, text, path, body)
            assert json.loads(text)["error"]["message"]
        if seen.total() % CONTROL_EVERY == 0:
            assert control(address) == expected

    send()
    print(f"answers by route and status: {dict(sorted(seen.items()))}")
    assert server.process.poll() is None
    for path in ROUTES:
        assert seen[path, 200] and seen[path, 400], path
    for status in (200, 400):
        assert sum(seen[path, status] for path in ROUTES) > seen.total() // 5
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
