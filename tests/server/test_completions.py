"""Plain completions, in llama-server's form and in OpenAI's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fake import FakeBackend, Script, app_of, until
from starlette.testclient import TestClient

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend


def client_of(backend: FakeBackend) -> TestClient:
    client = TestClient(app_of(backend), raise_server_exceptions=False)
    client.__enter__()
    until(lambda: client.get("/health").status_code == 200)
    return client


def post(backend: FakeBackend, path: str, **fields: Any) -> Any:
    client = client_of(backend)
    try:
        return client.post(path, json={"prompt": "one", **fields})
    finally:
        client.__exit__(None, None, None)


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[TestClient]:
    config = EngineConfig(
        model=ModelConfig(path=tiny_llama, n_threads=1), memory=MemoryConfig(workspace_tokens=128)
    )
    app = create_app(lambda _: EngineBackend(config), ServerConfig(alias="tiny"))
    with TestClient(app) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


def complete(client: TestClient, **fields: Any) -> Any:
    response = client.post("/completion", json={"temperature": 0, "n_predict": 8, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_whole_reply_in_llama_servers_form() -> None:
    body = post(FakeBackend(Script([b"Hello", b"\nyou"])), "/completion", n_predict=2).json()
    assert body["content"] == "Hello\nyou"
    assert body["stop"] is True and body["stop_type"] == "eos"
    assert body["has_new_line"] is True and body["truncated"] is False
    assert body["tokens"] == [] and body["prompt"] == "<s>one"
    assert body["tokens_predicted"] == 2 and body["tokens_evaluated"] == 4
    assert body["generation_settings"] == {"n_predict": 2}
    assert post(FakeBackend(), "/completions", return_tokens=True).json()["tokens"] == [0, 1]


def test_a_whole_reply_in_openais_form() -> None:
    body = post(FakeBackend(), "/v1/completions", max_tokens=2).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["system_fingerprint"].startswith("b")
    assert body["choices"] == [
        {"text": "Hello world", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == 4 and body["usage"]["completion_tokens"] == 2


def test_a_stream_in_llama_servers_form_has_no_done() -> None:
    text = post(FakeBackend(), "/completion", stream=True).text
    *parts, last = events_of(text)
    assert [(part["content"], part["tokens"]) for part in parts] == [
        ("Hello", [0]),
        (" world", [1]),
    ]
    assert all(part["stop"] is False for part in parts)
    assert last["stop"] is True and last["content"] == ""
    assert "[DONE]" not in text


def test_a_stream_in_openais_form() -> None:
    text = post(FakeBackend(), "/v1/completions", stream=True).text
    *parts, last = events_of(text)
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello world"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None]
    assert last["choices"][0]["finish_reason"] == "stop" and last["usage"]["total_tokens"] == 6
    assert text.endswith("data: [DONE]\n\n")


def test_a_stop_text_ends_it_and_is_not_shown() -> None:
    backend = FakeBackend(Script([b"one", b" EN", b"D two", b" three"]))
    body = post(backend, "/completion", stop=["END"]).json()
    assert body["content"] == "one " and body["stop_type"] == "word"
    assert body["stopping_word"] == "END"


def test_tokens_behind_a_stop_text_are_not_counted() -> None:
    pieces = [b"a", b"STOP", *[b"more"] * 1000]
    assert (
        post(FakeBackend(Script(pieces)), "/completion", stop="STOP").json()["tokens_predicted"]
        == 2
    )
    for stream in (False, True):
        reply = post(FakeBackend(Script(pieces)), "/v1/completions", stop="STOP", stream=stream)
        body = events_of(reply.text)[-1] if stream else reply.json()
        assert body["usage"]["completion_tokens"] == 2


def test_several_prompts_get_a_reply_each() -> None:
    backend = FakeBackend(Script([b"a"]), Script([b"b"]))
    bodies = post(backend, "/completion", prompt=["x", [1, 2]]).json()
    assert [(body["index"], body["content"]) for body in bodies] == [(0, "a"), (1, "b")]
    backend = FakeBackend(Script([b"a"]), Script([b"b"]))
    choices = post(backend, "/v1/completions", n=2).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "b")]


def test_only_the_fields_that_are_wanted() -> None:
    wanted = ["content", "generation_settings/n_predict", "no/such"]
    body = post(FakeBackend(), "/completion", n_predict=5, response_fields=wanted).json()
    assert body == {"content": "Hello world", "generation_settings/n_predict": 5}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 0}, "n"),
        ({"grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ({"response_fields": "content"}, "response_fields"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    response = post(FakeBackend(), "/completion", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(named)


def test_a_prompt_that_is_too_long_is_refused(real: TestClient) -> None:
    response = real.post("/completion", json={"prompt": [5] * 128})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "exceed_context_size_error"


def test_text_and_tokens_are_the_same_prompt(real: TestClient) -> None:
    tokens = real.post("/tokenize", json={"content": "the sea", "add_special": True}).json()
    replies = complete(real, prompt=["the sea", tokens["tokens"], {"prompt_string": "the sea"}])
    assert len({reply["content"] for reply in replies}) == 1
    assert replies[1]["timings"]["cache_n"] == len(tokens["tokens"]) - 1


def test_a_reply_is_held_to_a_grammar_or_a_schema(real: TestClient) -> None:
    assert complete(real, prompt="x", grammar='root ::= "abc"')["content"] == "abc"
    assert json.loads(complete(real, prompt="x", json_schema={"const": "42"})["content"]) == "42"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": "root ::= ("}, "grammar does not parse"),
        ({"grammar": "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000}, "grammar has paren"),
        ({"json_schema": nested(300)}, "json_schema cannot be enforced: the schema at #"),
        ({"json_schema": {"multipleOf": 3}}, "json_schema cannot be enforced: multipleOf"),
    ],
)
def test_what_llama_cpp_cannot_hold_a_reply_to(
    real: TestClient, fields: dict[str, Any], named: str
) -> None:
    """The second one overflowed the stack, and ended the server."""
    response = real.post("/completion", json={"prompt": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(named)


def test_probabilities_of_each_token(real: TestClient) -> None:
    reply = complete(real, prompt="the sea", n_probs=3, n_predict=4)
    found = reply["completion_probabilities"]
    assert len(found) == 4
    assert all(len(one["top_logprobs"]) == 3 for one in found)
    assert all(one["id"] == one["top_logprobs"][0]["id"] for one in found)  # greedy


def test_chances_after_sampling(real: TestClient) -> None:
    wanted = {"n_probs": 5, "post_sampling_probs": True, "n_predict": 6, "seed": 3}
    reply = complete(real, prompt="the sea", temperature=1.5, top_k=8, min_p=0, **wanted)
    for one in reply["completion_probabilities"]:
        chances = [entry["prob"] for entry in one["top_probs"]]
        assert chances == sorted(chances, reverse=True)
        assert chances[-1] > 0 and sum(chances) <= 1.0001 and 0 < one["prob"] <= chances[0]
    greedy = complete(real, prompt="the sea", **wanted)["completion_probabilities"]
    assert all(one["id"] == one["top_probs"][0]["id"] for one in greedy)


def test_a_bias_may_name_a_text(real: TestClient) -> None:
    first = complete(real, prompt="the sea", return_tokens=True, n_predict=1)["tokens"][0]
    piece = real.post("/detokenize", json={"tokens": [first]}).json()["content"]
    assert "\ufffd" not in piece, "the test needs a token that is a text"
    other = complete(real, prompt="the sea", logit_bias={piece: False}, return_tokens=True)
    assert first not in other["tokens"]


def test_the_settings_are_told(real: TestClient) -> None:
    settings = complete(real, prompt="x", seed=7, ignore_eos=True)["generation_settings"]
    assert settings["seed"] == 7 and settings["n_predict"] == 8
    assert [bias["bias"] for bias in settings["logit_bias"]] == [None] * len(settings["logit_bias"])
    assert settings["logit_bias"]


def test_the_workspace_truncates(real: TestClient) -> None:
    reply = complete(real, prompt="the sea", n_predict=-1, ignore_eos=True)
    assert reply["truncated"] is True and reply["stop_type"] == "limit"
    assert reply["tokens_evaluated"] + reply["tokens_predicted"] == 128


@pytest.mark.parametrize("field", [{"echo": True}, {"echo": 1}, {"best_of": 2}, {"suffix": "x"}])
def test_what_is_not_there_is_refused(field: dict[str, Any]) -> None:
    response = post(FakeBackend(), "/v1/completions", **field)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{next(iter(field))} is not supported"


def test_what_says_nothing_is_taken() -> None:
    nothing = {"echo": False, "best_of": 1, "suffix": ""}
    assert post(FakeBackend(), "/v1/completions", **nothing).status_code == 200


def test_more_prompts_than_can_ever_wait_are_no_503() -> None:
    response = post(FakeBackend(), "/completion", prompt=["a"] * 33, n=2)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt" and "66 replies" in error["message"]
    assert post(FakeBackend(), "/completion", prompt=["a"] * 32, n=2).status_code == 200
