"""Several agents at one server: whose history a reply sees, and what one that left has read."""

import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from live import WAIT_S, Server, serving
from openai import OpenAI, Timeout
from server_fake import until
from starlette.testclient import TestClient

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend

CHAT = "/v1/chat/completions"
MEMORY: dict[str, Any] = {
    "workspace_tokens": 4096, "budget_tokens": 4096, "reserve_tokens": 64, "block_tokens": 32,
    "conversations": 4, "type_k": "f32", "type_v": "f32",
}  # fmt: skip


def make_client(path: Path, **memory: Any) -> TestClient:
    config = EngineConfig(
        model=ModelConfig(path=path, n_threads=1), memory=MemoryConfig(**{**MEMORY, **memory})
    )
    return TestClient(
        create_app(lambda progress: EngineBackend(config, progress=progress),
                   ServerConfig(alias="tiny", show_metrics=True))
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[TestClient]:
    with make_client(tiny_llama) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


class Agent:
    """Resends its whole history each turn, as agents do."""

    def __init__(self, system: str) -> None:
        self.messages = [{"role": "system", "content": system}]

    def ask(self, client: TestClient, text: str, **fields: Any) -> dict[str, Any]:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "temperature": 0, "max_tokens": 6, "kvmem": True}
        response = client.post(CHAT, json={**body, **fields})
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        self.messages.append(
            {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        )
        return reply


def test_a_title_request_costs_the_session_nothing(client: TestClient) -> None:
    agent = Agent("You help. " * 40)
    first = agent.ask(client, "Tell me of the long voyage. " * 30)
    title = Agent("You help. " * 40).ask(client, "Give a title.", max_tokens=3)
    assert title["kvmem"]["conversation_use"] == "branched"
    assert title["usage"]["prompt_cache_hit_tokens"] > 300
    second = agent.ask(client, "And then?")
    read = first["usage"]["prompt_tokens"]
    assert second["kvmem"]["conversation_use"] == "switched"
    assert second["usage"]["prompt_cache_hit_tokens"] >= read - 32


def test_a_prompt_that_is_to_be_read_anew(tiny_llama: Path) -> None:
    """`cache_prompt: false`: it takes its own conversation's place, and costs no other anything."""
    with make_client(tiny_llama) as client:
        until(lambda: client.get("/health").status_code == 200)
        system = "You help. " * 40
        agent, other = Agent(system), Agent("Another one. " * 40)
        first = agent.ask(client, "Tell me of the long voyage. " * 10)
        other.ask(client, "question")
        uses = []
        for _ in range(3):
            title = Agent(system).ask(client, "Give a title.", max_tokens=3, cache_prompt=False)
            assert title["usage"]["prompt_cache_hit_tokens"] == 0
            assert title["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert title["timings"]["prompt_n"] == title["usage"]["prompt_tokens"]
            uses.append((title["kvmem"]["conversation_use"], title["kvmem"]["n_conversations"]))
        assert uses == [("new", 3), ("same", 3), ("same", 3)]
        agent.ask(client, "And then?")
        anew = Agent(system)
        anew.messages = list(agent.messages)
        again = anew.ask(client, "And now?", cache_prompt=False)
        assert again["usage"]["prompt_cache_hit_tokens"] == 0
        assert (again["kvmem"]["conversation_use"], again["kvmem"]["n_conversations"]) == (
            "same",
            3,
        )
        cached = agent.ask(client, "And now?")
        assert cached["usage"]["prompt_cache_hit_tokens"] > first["usage"]["prompt_tokens"]
        assert cached["choices"] == again["choices"]
        kept = other.ask(client, "more")
        assert kept["kvmem"]["conversation_use"] == "switched"
        assert kept["usage"]["prompt_cache_hit_tokens"] > 100


@pytest.mark.parametrize("fields", [{"kvmem": False}, {"n_conversations": 1}])
def test_a_single_history_is_read_anew(tiny_llama: Path, fields: dict[str, Any]) -> None:
    memory = MemoryConfig(
        **{**MEMORY, "conversations": fields.get("n_conversations", 4)},
        enabled=fields.get("kvmem", True),
    )
    config = EngineConfig(model=ModelConfig(path=tiny_llama, n_threads=1), memory=memory)
    load = partial(EngineBackend, config)
    with TestClient(create_app(lambda p: load(progress=p), ServerConfig(alias="tiny"))) as client:
        until(lambda: client.get("/health").status_code == 200)
        body = {"prompt": "one two three", "n_predict": 4, "temperature": 0, "ignore_eos": True}
        first = client.post("/completion", json=body).json()
        cached = client.post("/completion", json=body).json()
        anew = client.post("/completion", json={**body, "cache_prompt": False}).json()
        odd = client.post("/completion", json={**body, "cache_prompt": "what"}).json()
    assert [r["timings"]["cache_n"] > 0 for r in (first, cached, anew, odd)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert first["content"] == cached["content"] == anew["content"]


@pytest.mark.parametrize("n_requests", [36, pytest.param(200, marks=pytest.mark.slow)])
def test_no_reply_contains_another_conversation(tiny_llama: Path, n_requests: int) -> None:
    """Case R05: six conversations in drawn order, four threads, and room for some of them."""
    order = random.Random(5).choices(range(6), k=n_requests)
    together = {number: Talk(number) for number in range(6)}
    with make_client(tiny_llama, conversations_bytes=3 << 20) as client:
        until(lambda: client.get("/health").status_code == 200)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: together[number].turn(client), order))
        uses = client.get("/metrics").text
    assert n_requests < 200 or ('use="new"' in uses and 'use="switched"' in uses)
    hits = [hit for talk in together.values() for hit in talk.hits]
    assert 0 in hits[1:] and max(hits) > 100, "some came back, and some had left"
    for number, talk in together.items():
        twin = Talk(number)
        with make_client(tiny_llama, conversations=1) as client:
            until(lambda client=client: client.get("/health").status_code == 200)  # type: ignore[misc]
            for _ in talk.replies:
                twin.turn(client)
        assert twin.replies == talk.replies, f"conversation {number}"


class Talk:
    """A conversation whose turns come one after the other; after seven it begins anew."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._random = random.Random(number)
        self._agent = Agent(self._system())
        self.replies: list[list[str]] = []
        self.hits: list[int] = []

    def _system(self) -> str:
        return f"You are agent {self._number % 4}. " * 12  # two have the same one as another

    def turn(self, client: TestClient) -> None:
        with self._lock:
            if len(self._agent.messages) > 14:
                self._agent = Agent(self._system())
            words = " ".join(self._random.choices(("red", "door", "tower", "42", "sea"), k=30))
            fields = {"max_tokens": 16, "logprobs": True, "enable_thinking": False}
            reply = self._agent.ask(client, f"{self._number}: {words}", **fields)
            chosen = reply["choices"][0]["logprobs"]["content"]
            self.replies.append([entry["token"] for entry in chosen])
            usage = reply["usage"]
            self.hits.append(usage["prompt_cache_hit_tokens"])
            assert self.hits[-1] + reply["kvmem"]["read_tokens"] == usage["prompt_tokens"]


def test_16_replies_read_their_prompt_once(tiny_llama: Path) -> None:
    """Also where it is to be read anew; then the first of them reads it."""
    messages = [{"role": "user", "content": "Tell me of the long voyage. " * 10}]
    fields = {"max_tokens": 2, "seed": 1, "cache_prompt": False}
    with make_client(tiny_llama) as client:
        until(lambda: client.get("/health").status_code == 200)

        def n_read(path: str, **body: Any) -> int:
            before = counted(client, "llamacpp:prompt_tokens_total")
            response = client.post(path, json={**fields, **body})
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["prompt_cache_hit_tokens"] == 0
            return counted(client, "llamacpp:prompt_tokens_total") - before

        once = n_read(CHAT, messages=messages, n=1)
        assert once > 100
        # each but the first reads the last token again, whose logits it needs
        assert n_read(CHAT, messages=messages, n=16) == once + 15
        text = {"prompt": messages[0]["content"]}
        once = n_read("/v1/completions", **text)
        assert n_read("/v1/completions", **text, n=16) == once + 15
        two = {"prompt": [text["prompt"], "Another one. " * 20], "n": 8}
        assert once + 14 < n_read("/v1/completions", **two) < 2 * once + 14


def counted(client: TestClient, name: str) -> int:
    """A counter of /metrics."""
    found = re.search(rf"^{name} ([\d.e+]+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def post(server_address: tuple[str, int], body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection(server_address, timeout=WAIT_S)
    client.sendall(head.encode() + data)
    return client


def finish(connection: socket.socket) -> dict[str, Any]:
    received = b""
    with connection:
        while b"\r\n\r\n" not in received or not received.rstrip().endswith(b"}"):
            received += connection.recv(65536)
    result: dict[str, Any] = json.loads(received.partition(b"\r\n\r\n")[2])
    return result


BATCH = 64
MOST_WORDS = 50_000  # of the window; each is about five tokens
SERVE = ("--port", "0", "-c", "262144", "-t", "1", "--kvmem-block-tokens", "32",
         "--kvmem-gen-reserve", "128", "--temp", "0", "-b", str(BATCH))  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[tuple[Server, tuple[str, int]]]:
    with serving("-m", str(tiny_llama), *SERVE, "--kvmem-budget", "512") as server:
        yield server, server.address()


@pytest.mark.alone
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_prompt_is_read_finds_it_read(
    server: tuple[Server, tuple[str, int]], stream: bool
) -> None:
    """Case R08: the work ends within a batch, and the same prompt goes on where it stopped."""
    process, address = server
    words = " ".join(f"w{(i * 31 + stream) % 997}" for i in range(2500))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "temperature": 0}
    with post(address, {**body, "stream": stream}):
        n_then = until_read(address, 500)
    until_idle(address)
    assert process.until("end=cancelled")
    n_read = slot_of(address)["n_prompt_tokens_processed"]
    # one that runs when it is told, and one while the news is on its way
    assert n_then <= n_read <= n_then + 2 * BATCH < slot_of(address)["n_prompt_tokens"]
    usage = finish(post(address, body))["usage"]
    assert n_read - BATCH <= usage["prompt_cache_hit_tokens"] <= n_read + BATCH


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("budget", ["512", "8192"])
def test_what_was_left_and_asked_again_is_what_a_fresh_server_says(
    tiny_llama: Path, budget: str
) -> None:
    """Case R08: with a part of the history in sight, and with all of it."""
    words = " ".join(f"w{(i * 29) % 983}" for i in range(800))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": "what is w29?"}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    args = (*SERVE, "--kvmem-budget", budget, "--kv-dtype", "f32")
    with serving("-m", str(tiny_llama), *args) as fresh:
        expected = finish(post(fresh.address(), body))["choices"]
    with serving("-m", str(tiny_llama), *args) as left:
        address = left.address()
        for least in (300, 1500):
            with post(address, body):
                until_read(address, least)
            until_idle(address)
        reply = finish(post(address, body))
    assert 1500 - BATCH < reply["usage"]["prompt_cache_hit_tokens"] < 3000
    assert reply["choices"] == expected


@pytest.mark.alone
@pytest.mark.parametrize("stream", [False, True])
def test_ten_clients_in_a_row_leave_during_their_replies(
    server: tuple[Server, tuple[str, int]], stream: bool
) -> None:
    """Case R07: each time the work ends, and the next reply is what it was before."""
    process, address = server
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    before = finish(post(address, body))["choices"]
    endless = {**body, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    for _ in range(10):
        with post(address, endless):
            until(lambda: slot_of(address)["next_token"][0]["n_decoded"] > 2)
        until_idle(address)
        assert process.until("end=cancelled")
    assert finish(post(address, body))["choices"] == before


@pytest.mark.alone
def test_a_stream_is_never_silent_for_long(server: tuple[Server, tuple[str, int]]) -> None:
    """Case R09: headers at once, then something each second while a long prompt is read."""
    _, address = server
    words = " ".join(f"v{(i * 37) % 991}" for i in range(8000))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 3, "stream": True}
    gaps, received = [], b""
    told = monotonic()
    with post(address, body) as connection:
        while b"[DONE]" not in received:
            received += connection.recv(65536)
            gaps.append(monotonic() - told)
            told = monotonic()
            assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(gaps) > 4 and received.count(b":\n\n") > 1, "it was read for some seconds"
    assert gaps[0] < 1, "behind the first byte the client knows that it was heard"
    assert max(gaps) < 2


@pytest.mark.alone
@pytest.mark.slow
def test_a_client_that_waits_three_seconds_for_a_byte_gets_its_reply(
    server: tuple[Server, tuple[str, int]],
) -> None:
    """Case R09: OpenAI's, with a prompt that this machine reads for longer than that."""
    host, port = address = server[1]
    n_words, began = 1000, monotonic()
    sample = " ".join(f"y{(i * 37) % 983}" for i in range(n_words))
    finish(post(address, {"messages": [{"role": "user", "content": sample}], "max_tokens": 1}))
    n_words = min(MOST_WORDS, int(n_words * 9 / (monotonic() - began)))  # for nine seconds
    words = " ".join(f"x{(i * 41) % 983}" for i in range(n_words))
    fields: dict[str, Any] = {
        "model": "any", "messages": [{"role": "user", "content": words}], "max_tokens": 8,
        "temperature": 0, "reasoning_effort": "none", "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    timeout = Timeout(WAIT_S, read=3)
    url = f"http://{host}:{port}/v1"
    with OpenAI(base_url=url, api_key="any", timeout=timeout, max_retries=0) as client:
        began = monotonic()
        streamed = [one.choices[0] for one in client.chat.completions.create(**fields, stream=True)]
        assert monotonic() - began > 3
        [again] = client.chat.completions.create(**fields).choices  # it is read already
    assert "".join(one.delta.content or "" for one in streamed) == again.message.content != ""
    assert streamed[-1].finish_reason == again.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_window_is_named_and_a_reply_ends_at_it(
    client: TestClient, stream: bool
) -> None:
    """Case R14."""
    long = {"messages": [{"role": "user", "content": "word " * 5000}], "stream": stream}
    response = client.post(CHAT, json=long)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == 4096 < error["n_prompt_tokens"]
    assert str(error["n_prompt_tokens"]) in error["message"] and "4096" in error["message"]
    fits = [{"role": "user", "content": "word " * 800}]
    reply = client.post(
        CHAT, json={"messages": fits, "max_tokens": 9000, "temperature": 0, "ignore_eos": True}
    ).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 4096


def slot_of(address: tuple[str, int]) -> dict[str, Any]:
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        connection.sendall(b"GET /slots HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    slot: dict[str, Any] = json.loads(received.partition(b"\r\n\r\n")[2])[0]
    return slot


def until_read(address: tuple[str, int], least: int) -> int:
    """How many tokens of a prompt are read, once these are more than so many."""
    slot: dict[str, Any] = {}

    def has_read() -> bool:
        slot.update(slot_of(address))
        n_read: int = slot["n_prompt_tokens_processed"]
        return slot["is_processing"] and n_read > least

    until(has_read)
    return int(slot["n_prompt_tokens_processed"])


def until_idle(address: tuple[str, int]) -> None:
    """Within a second from now."""
    began = monotonic()
    until(lambda: not slot_of(address)["is_processing"])
    assert monotonic() - began < 1
