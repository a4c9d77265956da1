"""Endpoints that count and show tokens, against a tokenizer of bytes and a real model's."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
import pytest
from live import WAIT_S, serving
from server_fake import FakeBackend, app_of, until
from starlette.testclient import TestClient

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend

MESSAGES = [{"role": "user", "content": "What is the sea?"}]


@pytest.fixture(scope="module")
def fake() -> Iterator[TestClient]:
    with TestClient(app_of(FakeBackend()), raise_server_exceptions=False) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[TestClient]:
    config = EngineConfig(
        model=ModelConfig(path=tiny_llama, n_threads=1), memory=MemoryConfig(workspace_tokens=512)
    )
    app = create_app(lambda _: EngineBackend(config), ServerConfig(alias="tiny"))
    with TestClient(app) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


def answer(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def test_text_becomes_tokens(fake: TestClient) -> None:
    assert answer(fake, "/tokenize", content="ab") == {"tokens": [97, 98]}
    assert answer(fake, "/tokenize", content="ab", add_special=True) == {"tokens": [256, 97, 98]}
    assert answer(fake, "/tokenize") == {"tokens": []}


def test_text_and_token_ids_may_be_mixed(fake: TestClient) -> None:
    body = {"content": [7, "a", 8, "b"], "add_special": True}
    # what stands in front of a text is only wanted where the text stands first
    assert answer(fake, "/tokenize", **body) == {"tokens": [7, 97, 8, 98]}


def test_a_piece_that_is_no_text_is_shown_as_bytes(fake: TestClient) -> None:
    tokens = answer(fake, "/tokenize", content="aé", with_pieces=True)["tokens"]
    assert tokens == [
        {"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {"content": 3.5}, "content"),
        ("/tokenize", {"content": ["a", True]}, "content"),
        ("/tokenize", {"content": [257]}, "257"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "is outside the vocabulary of 257"),
        ("/apply-template", {}, "messages"),
        ("/v1/chat/completions/input_tokens", {}, "messages"),
    ],
)
def test_a_wrong_field_is_named(
    fake: TestClient, path: str, body: dict[str, Any], named: str
) -> None:
    response = fake.post(path, json=body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_a_body_must_be_an_object(fake: TestClient) -> None:
    assert fake.post("/tokenize", json=[1]).status_code == 400


def test_a_text_survives_the_way_there_and_back(real: TestClient) -> None:
    text = "the sea 媽 and 🤗"
    tokens = answer(real, "/tokenize", content=text)["tokens"]
    assert answer(real, "/detokenize", tokens=tokens) == {"content": text}
    outside = real.post("/detokenize", json={"tokens": [10**6]})
    assert outside.status_code == 400


def test_the_count_is_what_a_reply_reports(real: TestClient) -> None:
    counted = answer(real, "/v1/chat/completions/input_tokens", messages=MESSAGES)
    reply = answer(real, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert counted["input_tokens"] == reply["usage"]["prompt_tokens"]


CHAT = {"messages": MESSAGES * 20}
COUNTED: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "the sea 媽 and 🤗 " * 200},
    "/detokenize": {"tokens": list(range(64, 90)) * 50},
    "/apply-template": CHAT,
    "/v1/chat/completions/input_tokens": CHAT,
}
STEADY = ("/health", "/v1/models", "/props", *COUNTED)


@pytest.mark.alone
@pytest.mark.parametrize(
    "model", ["tiny_llama", pytest.param("demo_model", marks=pytest.mark.slow)]
)
def test_all_of_them_answer_at_once_during_a_generation(
    model: str, request: pytest.FixtureRequest
) -> None:
    """And what they say is what an idle server says, where that does not change."""
    path: Path = request.getfixturevalue(model)
    times: defaultdict[str, list[float]] = defaultdict(list)

    def call(route: str) -> httpx2.Response:
        began = monotonic()
        body = COUNTED.get(route)
        response = client.get(route) if body is None else client.post(route, json=body)
        times[route].append(monotonic() - began)
        assert response.status_code == 200, response.text
        return response

    def slot() -> dict[str, Any]:
        return dict(call("/slots").json()[0])

    with serving("-m", str(path), "--port", "0", "-c", "8192", "-t", "1", "--metrics") as server:
        host, port = server.address()
        with httpx2.Client(base_url=f"http://{host}:{port}", timeout=WAIT_S) as client:
            idle = {route: call(route).text for route in STEADY}
            times.clear()
            endless = {"messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=endless):
                until(lambda: slot()["next_token"][0]["n_decoded"] > 2)
                n_decoded = slot()["next_token"][0]["n_decoded"]
                for _ in range(20):
                    assert {route: call(route).text for route in STEADY} == idle
                    assert slot()["is_processing"]
                    assert "llamacpp:requests_processing 1.0" in call("/metrics").text
                assert slot()["next_token"][0]["n_decoded"] > n_decoded + 20
    assert len(times) == 9
    for route, taken in times.items():
        *_, second, slowest = sorted(taken)
        print(f"{route}: {slowest:.3f} s at most")
        assert second < 0.5, route  # one in twenty may have waited for others on the machine


def test_the_prompt_of_a_chat_is_shown(real: TestClient) -> None:
    prompt = answer(real, "/apply-template", messages=MESSAGES)["prompt"]
    assert "<|im_start|>user\nWhat is the sea?<|im_end|>" in prompt
    assert "<|im_start|>assistant" in prompt
    bare = answer(real, "/apply-template", messages=MESSAGES, add_generation_prompt=False)
    assert prompt.startswith(bare["prompt"]) and len(bare["prompt"]) < len(prompt)
