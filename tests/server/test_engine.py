"""The server over the real engine and a tiny model: random words, but true counts."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_fake import until
from starlette.testclient import TestClient

from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend

CHAT = "/v1/chat/completions"


def words(n: int, seed: int = 0) -> str:
    """About 4 n tokens of a byte-level tokenizer."""
    return " ".join(f"w{(seed * 7919 + i * 31) % 997}" for i in range(n))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def client_of(path: Path, *, template: str | None = None, **memory: Any) -> TestClient:
    config = EngineConfig(
        model=ModelConfig(path=path, n_threads=1, chat_template=template),
        memory=MemoryConfig(
            **{"workspace_tokens": 4096, "budget_tokens": 512, "reserve_tokens": 64,
               "block_tokens": 32, **memory}
        ),
    )  # fmt: skip
    app = create_app(
        lambda progress: EngineBackend(config, progress=progress), ServerConfig(alias="tiny")
    )
    return TestClient(app)


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[TestClient]:
    with client_of(tiny_llama) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


def chat(client: TestClient, *messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    body = {
        "messages": list(messages), "temperature": 0, "max_tokens": 8, "kvmem": True,
        "enable_thinking": False, **fields,
    }  # fmt: skip
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def text_of(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def test_a_second_turn_reads_only_what_is_new(client: TestClient) -> None:
    first = chat(client, user(words(100)), max_tokens=5)
    assert first["usage"]["prompt_tokens"] > 300
    assistant = {"role": "assistant", "content": text_of(first)}
    second = chat(client, user(words(100)), assistant, user("and then?"))
    usage, timings = second["usage"], second["timings"]
    assert usage["prompt_cache_hit_tokens"] >= first["usage"]["prompt_tokens"] - 32
    assert (
        usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"]
        == usage["prompt_tokens"]
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"]
    total = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"]
    assert total == usage["total_tokens"]


def test_stream_and_whole_reply_say_the_same(client: TestClient) -> None:
    whole = chat(client, user("who built the tower?"), max_tokens=30)
    response = client.post(
        CHAT,
        json={
            "messages": [user("who built the tower?")],
            "temperature": 0,
            "max_tokens": 30,
            "enable_thinking": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text_of(whole)
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]


def test_a_reply_longer_than_the_reserve_ends_by_max_tokens(client: TestClient) -> None:
    """Case R01: reserve 64, a prompt beyond the budget, 300 tokens wanted."""
    reply = chat(client, user(words(250, 1)), max_tokens=300, ignore_eos=True)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 300
    assert reply["usage"]["prompt_tokens"] > 512
    assert text_of(chat(client, user("hi"))) == text_of(chat(client, user("hi")))


def test_an_uncached_turn_wider_than_the_budget(client: TestClient) -> None:
    """Case R02, as plain user turns: it is read in pieces; repeats are hits with equal text."""
    start = user(words(60, 2))
    first = chat(client, start, max_tokens=4)
    grown = (start, {"role": "assistant", "content": text_of(first)}, user(words(400, 3)))
    replies = [chat(client, *grown) for _ in range(3)]
    # the first reply saw the question read anew, the repeats find it in the history
    assert text_of(replies[1]) == text_of(replies[2])
    usage = replies[2]["usage"]
    assert usage["prompt_tokens"] > 1024
    assert usage["prompt_cache_hit_tokens"] > 0


def test_the_memory_report_tells_what_was_chosen(client: TestClient) -> None:
    report = chat(client, user(words(300, 4) + " what was the first word?"))["kvmem"]
    assert report["scorer"] == "fused"
    assert 0 < len(report["blocks"]) <= 512 // 32
    assert report["blocks"] == sorted(report["blocks"])
    assert report["n_blocks"] > len(report["blocks"])
    assert report["device_bytes"] > 0 and report["host_bytes"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_model_can_refuse_is_a_400(client: TestClient, stream: bool) -> None:
    body = {"messages": [user("hi")], "logit_bias": {"1000000": 1}, "stream": stream}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "logit_bias holds token 1000000, which is outside the vocabulary" in message


NO_TEXT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(
            (path, fields, param)
            for path in (CHAT, "/completion", "/v1/completions")
            for fields, param in (
                ({"logit_bias": {"999999": 1}}, "logit_bias"),
                ({"logit_bias": [[999999, False]]}, "logit_bias"),
                ({"samplers": ["top_k", "foo"]}, "samplers"),
                ({"samplers": ["top_k", "top_k"]}, "samplers"),
                ({"samplers": ["infill"]}, "samplers"),
                ({"dry_sequence_breakers": ["x"] * 129}, "dry_sequence_breakers"),
                ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
            )
        ),
        (CHAT, {"messages": NO_TEXT}, "messages[0].content[0]"),
        ("/completion", {"prompt": ""}, "prompt"),
        ("/completion", {"prompt": ["a", ""]}, "prompt[1]"),
        ("/completion", {"prompt": [1000000]}, "prompt"),
        ("/completion", {"prompt": ["a", [1, -1]]}, "prompt[1]"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"echo": True}, "echo"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/tokenize", {"content": ["a", 999999]}, "content"),
        ("/detokenize", {"tokens": [999999]}, "tokens"),
    ],
)
def test_the_field_that_is_wrong_is_named(
    client: TestClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = client.post(path, json={"messages": [user("hi")], "prompt": "hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} "), "and stands in front"


@pytest.mark.parametrize("name", ["temperature", "top-k", "minp", "nucleus", "dry"])
def test_every_name_of_a_sampler_is_taken(client: TestClient, name: str) -> None:
    body = {"messages": [user("hi")], "prompt": "hi", "max_tokens": 1, "samplers": [name]}
    for path in (CHAT, "/completion"):
        assert client.post(path, json=body).status_code == 200


def test_a_prompt_beyond_the_workspace_loses_nothing(client: TestClient) -> None:
    chat(client, user(words(100, 5)))
    response = client.post(CHAT, json={"messages": [user(words(2000))], "stream": True})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == 4096 < error["n_prompt_tokens"]
    again = chat(client, user(words(100, 5)))
    assert again["usage"]["prompt_cache_miss_tokens"] <= 32


@pytest.mark.parametrize("path", [CHAT, "/completion"])
def test_a_time_limit_ends_a_reply_that_has_a_line(client: TestClient, path: str) -> None:
    body = {"messages": [user("hi")], "prompt": "hi", "temperature": 0, "t_max_predict_ms": 1}

    def n_said(grammar: str, max_tokens: int) -> int:
        fields = {"grammar": grammar, "max_tokens": max_tokens, "ignore_eos": True}
        reply = client.post(path, json={**body, **fields}).json()
        end = reply["stop_type"] if path != CHAT else reply["choices"][0]["finish_reason"]
        assert end in ("limit", "length")
        n: int = reply["timings"]["predicted_n"]
        return n

    endless = 'root ::= "a\\n" "b"+'
    assert 2 <= n_said(endless, 1500) < 1000, "they take longer"
    assert n_said('root ::= "a"+', 60) == 60, "no line is cut"
    body["t_max_predict_ms"] = -1
    assert n_said(endless, 60) == 60


def test_llama_servers_name_for_the_number_of_replies(client: TestClient) -> None:
    body = {"messages": [user("hi")], "prompt": "hi", "max_tokens": 2, "n": 3, "n_cmpl": 2}
    assert len(client.post(CHAT, json=body).json()["choices"]) == 2
    assert len(client.post("/completion", json=body).json()) == 2
    response = client.post(CHAT, json={**body, "n_cmpl": 17})
    assert response.json()["error"]["message"] == "n_cmpl is 17, but must be from 1 to 16"


@pytest.mark.parametrize("path", [CHAT, "/completion", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("grammar_lazy", True, False),
        ("grammar_triggers", [{"type": 0, "value": "x"}], []),
        ("lora", [{"id": 0, "scale": 0.5}], []),
    ],
)
def test_what_would_change_a_reply_and_is_not_built(
    client: TestClient, path: str, field: str, value: object, harmless: object
) -> None:
    body = {"messages": [user("hi")], "prompt": "hi", "max_tokens": 2}
    for said in (harmless, None):
        assert client.post(path, json={**body, field: said}).status_code == 200
    error = client.post(path, json={**body, field: value}).json()["error"]
    assert (error["code"], error["type"]) == (400, "not_supported_error")
    assert error["message"].startswith(f"{field} is not supported")


def test_eight_clients_at_once_are_all_served(client: TestClient) -> None:
    """Case R20 over HTTP: each reply equals that of a client that comes alone."""
    prompts = [f"question {i} about the hill" for i in range(8)]
    alone = [text_of(chat(client, user(prompt))) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: text_of(chat(client, user(prompt))), prompts))
    assert together == alone


def test_models_tells_all_that_clients_rely_on(client: TestClient, tiny_llama: Path) -> None:
    listed = client.get("/v1/models").json()
    (about,) = listed["data"]
    assert listed["object"] == "list"
    assert (about["id"], about["object"], about["owned_by"]) == ("tiny", "model", "kvmem")
    assert isinstance(about["created"], int)
    assert about["architecture"]["input_modalities"] == ["text"]
    with Model(tiny_llama) as model:
        assert about["meta"] == {
            "architecture": "llama",
            "n_ctx": 4096,
            "n_ctx_train": 131072,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "n_vocab": Vocab(model).n_tokens,
            "size": model.size_bytes,
            "vocab_type": 2,  # BPE
        }


def test_a_stop_text_of_the_real_tokenizer(client: TestClient) -> None:
    text = text_of(chat(client, user("tell me"), max_tokens=40, ignore_eos=True))
    stop = text[5:7]
    reply = chat(
        client, user("tell me"), max_tokens=400, ignore_eos=True, stop=[stop], logprobs=True
    )
    assert text_of(reply) == text[: text.index(stop)]
    told = reply["choices"][0]["logprobs"]["content"]
    assert len(told) == reply["usage"]["completion_tokens"], "nothing from behind the stop text"
    assert reply["choices"][0]["finish_reason"] == "stop"


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The demo model's template: it shows no tools."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_demanded_is_never_prose(tiny_llama: Path, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [user("hi")], "tools": [tool], "max_tokens": 8, "stream": stream}
    with client_of(tiny_llama, template=SMOLLM2) as client:
        until(lambda: client.get("/health").status_code == 200)
        for choice in ("required", named):
            response = client.post(CHAT, json={**body, "tool_choice": choice})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "not_supported_error")
            assert "this model's chat template has no place for tools" in error["message"]
        for choice in ("auto", "none"):
            assert client.post(CHAT, json={**body, "tool_choice": choice}).status_code == 200


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(*args: Any, **options: Any) -> Any:
        raise AssertionError("30 MB are tokenised")

    text = "heliotrope " * (30_000_000 // 11)
    monkeypatch.setattr("kvmem.chat.segments.SegmentTokenizer.tokenize", tokenize)
    monkeypatch.setattr("kvmem.chat.completion.tokenize_mixed", tokenize)
    for path, body in (
        (CHAT, {"messages": [user(text)]}),
        (CHAT, {"messages": [user(text)], "stream": True}),
        ("/completion", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "stream": True}),
    ):
        response = client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
        assert error["n_ctx"] == 4096 <= error["n_prompt_tokens"] < 30_000_000
        assert "tokens or more) exceeds the available context size (4096" in error["message"]


def test_the_examples_of_the_page_are_answered(client: TestClient, root: Path) -> None:
    page = (root / "docs" / "server-api.md").read_text()
    asked = [(CHAT, body) for body in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    asked += re.findall(r"curl -s http://127\.0\.0\.1:8080(\S+) -d '(.*?)'", page)
    assert len(asked) >= 5 and page.count("curl ") == len({path for path, _ in asked})
    for path, body in asked:
        response = client.post(path, content=body)
        assert response.status_code == 200, (body, response.text)


def test_an_uncached_tool_result_wider_than_the_budget(client: TestClient) -> None:
    """Case R02 with tool messages: 200 each time, and repeats are hits with equal text."""
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    start = user(words(60, 6))
    chat(client, start, max_tokens=4, tools=[tool])
    grown: tuple[Any, ...] = (
        start,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": words(400, 7)},
    )
    replies = [chat(client, *grown, tools=[tool]) for _ in range(3)]
    assert text_of(replies[1]) == text_of(replies[2])
    usage = replies[2]["usage"]
    assert usage["prompt_tokens"] > 1024
    assert usage["prompt_cache_miss_tokens"] <= 64
