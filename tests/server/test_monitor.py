"""Those who watch: /props, /slots, /metrics, during a generation too; keys and web pages."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import log_records
from prometheus_client.parser import text_string_to_metric_families
from server_fake import FakeBackend, Script, acquire, app_of, until
from starlette.testclient import TestClient

from kvmem.cli import logs
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from kvmem.engine.events import Done
from kvmem.engine.stats import RequestStats
from kvmem.errors import ConfigError
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend
from kvmem.server.watch import Watch

CHAT = "/v1/chat/completions"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[TestClient]:
    config = EngineConfig(
        model=ModelConfig(path=tiny_llama, n_threads=1),
        memory=MemoryConfig(
            workspace_tokens=2048,
            budget_tokens=512,
            reserve_tokens=64,
            block_tokens=32,
            conversations=4,
        ),
    )
    app = create_app(
        lambda progress: EngineBackend(config, progress=progress),
        ServerConfig(alias="tiny", show_metrics=True),
    )
    with TestClient(app) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


def ask(client: TestClient, *texts: str, **fields: Any) -> dict[str, Any]:
    messages = [user(text) for text in texts]
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, **fields}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def measures(client: TestClient) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_counters_are_the_sums_of_what_the_replies_said(client: TestClient) -> None:
    before = measures(client)
    usages = [ask(client, "tell me about " + "ships " * n)["usage"] for n in (10, 40, 10)]
    after = measures(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["llamacpp:prompt_tokens_total"] == sum(
        usage["prompt_cache_miss_tokens"] for usage in usages
    )
    assert grown["llamacpp:prompt_tokens_cached_total"] == sum(
        usage["prompt_cache_hit_tokens"] for usage in usages
    )
    assert grown["llamacpp:tokens_predicted_total"] == sum(
        usage["completion_tokens"] for usage in usages
    )
    assert sum(v for name, v in grown.items() if name.startswith("kvmem:requests_total")) == 3
    assert grown["llamacpp:prompt_seconds_total"] > 0
    assert after["kvmem:host_bytes"] > 0 and after["kvmem:device_bytes"] > 0
    assert after["llamacpp:requests_processing"] == 0


def test_a_refused_request_is_not_among_the_replies_that_began(client: TestClient) -> None:
    ask(client, "hello")
    before = measures(client)
    body = {"messages": [user("hello")], "max_tokens": "9"}
    assert client.post("/v1/chat/completions", json=body).status_code == 400
    assert measures(client) == before
    text = client.get("/metrics").text
    assert "# HELP kvmem:requests_total Replies that began, by how they ended." in text


def test_the_rate_of_replies_is_that_of_their_steps() -> None:
    """The first token of a reply costs no step, and none of the time that is counted."""
    watch = Watch()
    watch.saw(Done("stop", RequestStats(completion_tokens=1, decode_s=0.0)))
    watch.saw(Done("stop", RequestStats(completion_tokens=0, decode_s=0.1)))
    watch.saw(Done("stop", RequestStats(completion_tokens=21, decode_s=1.9)))
    assert (watch.totals.decode_steps, watch.totals.reply_tokens) == (20, 22)
    assert RequestStats(completion_tokens=0, decode_s=0.1).decode_per_s == 0.0


def test_slots_show_conversations_and_the_last_report_and_no_text(client: TestClient) -> None:
    secret = "heliotrope"
    first = ask(
        client, f"the word is {secret} " * 20, kvmem={"conversation_id": "a", "report": True}
    )
    ask(client, "something else entirely " * 20, kvmem={"conversation_id": "b"})
    response = client.get("/slots")
    slot = response.json()[0]
    assert secret not in response.text
    assert (slot["id"], slot["is_processing"], slot["n_ctx"]) == (0, False, 2048)
    kept = slot["kvmem"]["conversations"]
    assert [one["client_id"] for one in kept[:2]] == ["b", "a"]
    assert [one["is_on_device"] for one in kept[:2]] == [True, False]
    last = slot["kvmem"]["last"]
    assert last["n_conversations"] == len(kept)
    report = first["kvmem"]
    times = report["times"]
    assert sum(times.values()) == pytest.approx(
        (first["timings"]["prompt_ms"] + first["timings"]["predicted_ms"]) / 1e3, rel=1e-6
    )
    assert {"switch_s", "read_s", "score_s", "move_s", "replay_s", "decode_s"} <= set(times)
    again = ask(client, f"the word is {secret} " * 20, kvmem={"conversation_id": "a"})
    assert again["usage"]["prompt_cache_miss_tokens"] <= 32


def test_props_name_the_model_and_its_template(client: TestClient) -> None:
    props = client.get("/props").json()
    assert props["model_alias"] == "tiny"
    assert props["total_slots"] == 1
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "messages" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"].startswith("b")


def test_props_and_slots_tell_how_a_chat_is_sampled(client: TestClient) -> None:
    params = client.get("/props").json()["default_generation_settings"]["params"]
    assert params["n_predict"] == -1
    assert (params["temperature"], params["top_k"]) == (1.0, 20), "thinking is on, as in a chat"
    assert {"top_p", "min_p", "repeat_penalty", "presence_penalty", "seed"} <= set(params)
    assert client.get("/slots").json()[0]["params"] == params


def test_all_of_them_answer_during_a_generation() -> None:
    script = Script([b"x"] * 9, hold_at=2)
    backend = FakeBackend(Script(), script)
    with TestClient(app_of(backend, show_metrics=True)) as client:
        until(lambda: client.get("/health").status_code == 200)
        client.post(CHAT, json={"messages": [user("warm up")]})
        with client.stream("POST", CHAT, json={"messages": [user("hi")], "stream": True}):
            acquire(backend.holding)
            slot = client.get("/slots").json()[0]
            assert slot["is_processing"]
            assert slot["next_token"][0]["n_decoded"] == 2
            assert client.get("/slots?fail_on_no_slot=1").status_code == 503
            assert measures(client)["llamacpp:requests_processing"] == 1
            for path in ("/props", "/v1/models", "/health"):
                assert client.get(path).status_code == 200
            script.release.set()


def test_what_is_switched_off_says_how_to_switch_it_on() -> None:
    with TestClient(app_of(FakeBackend(), show_slots=False)) as client:
        until(lambda: client.get("/health").status_code == 200)
        for path, flag in (("/slots", "--no-slots"), ("/metrics", "--metrics")):
            response = client.get(path)
            assert response.status_code == 501
            assert response.json()["error"]["type"] == "not_supported_error"
            assert flag in response.json()["error"]["message"]


def test_keys_guard_everything_but_health() -> None:
    with TestClient(app_of(FakeBackend(), api_keys=("k1", "k2"), show_metrics=True)) as client:
        until(lambda: client.get("/health").status_code == 200)
        for path in ("/v1/models", "/props", "/slots", "/metrics", "/nothing"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"X-Api-Key": "k3"}).status_code == 401
        for path in ("/v1/models", "/props", "/slots", "/metrics"):
            assert client.get(path, headers={"Authorization": "Bearer k2"}).status_code == 200
            assert client.get(path, headers={"X-Api-Key": "k1"}).status_code == 200


@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        ((), "https://evil.example", False),
        ((), "null", False),
        ((), "http://[", False),
        ((), "http://localhost.evil.example", False),
        ((), "http://localhost:3000", True),
        ((), "http://127.0.0.1:18200", True),
        ((), "http://[::1]:80", True),
        (("https://chat.example",), "https://chat.example", True),
        (("https://chat.example",), "https://other.example", False),
        (("*",), "https://evil.example", True),
    ],
)
def test_foreign_pages_may_not_ask(allowed: tuple[str, ...], origin: str, may: bool) -> None:
    backend = FakeBackend(Script())
    app = app_of(backend, cors_origins=allowed, api_keys=("k",))
    key = {"Authorization": "Bearer k"}
    with TestClient(app) as client:
        until(lambda: client.get("/health").status_code == 200)
        preflight = client.options(
            CHAT,
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            },
        )
        assert preflight.status_code == (200 if may else 403)
        response = client.post(
            CHAT, json={"messages": [user("hi")]}, headers={"Origin": origin, **key}
        )
        assert response.status_code == (200 if may else 403)
        assert response.headers.get("access-control-allow-origin") == (origin if may else None)
        assert len(backend.requests) == int(may), "a refused page starts nothing"
        assert client.get("/v1/models", headers=key).status_code == 200, "no page, no origin"


@pytest.mark.parametrize(
    ("settings", "host", "may"),
    [
        ({}, "127.0.0.1:8080", True),
        ({}, "[::1]:8080", True),
        ({}, "192.168.1.20", True),
        ({}, "localhost:80", True),
        ({}, "LOCALHOST.", True),
        ({}, "kvmem", True),
        ({}, "box.local:8080", True),
        ({}, "host.docker.internal", True),
        ({}, "evil.example", False),
        ({}, "localhost.evil.example:8080", False),
        ({}, "127.0.0.1.evil.example", False),
        ({"host": "chat.lan.example"}, "chat.lan.example:8080", True),
        ({"allowed_hosts": ("chat.example",)}, "Chat.Example:443", True),
        ({"allowed_hosts": ("chat.example",)}, "a.chat.example", False),
        ({"allowed_hosts": ("*.example",)}, "a.chat.example", True),
        ({"allowed_hosts": ("*",)}, "evil.example", True),
        ({"cors_origins": ("https://chat.example",)}, "chat.example", True),
        ({"cors_origins": ("*",)}, "evil.example", True),
        ({"api_keys": ("k",)}, "evil.example", True),
    ],
)
def test_a_name_of_elsewhere_that_leads_here(
    settings: dict[str, Any], host: str, may: bool
) -> None:
    """DNS rebinding: what a page may not read across origins, it asks for under its own name."""
    with TestClient(app_of(FakeBackend(Script()), **settings)) as client:
        key = {"Authorization": "Bearer k"}
        until(lambda: client.get("/health").status_code == 200)
        for path in ("/v1/models", "/health", "/slots"):
            response = client.get(path, headers={**key, "Host": host})
            assert response.status_code == (200 if may else 403)
            if not may:
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", 403)
                assert "--allowed-hosts" in error["message"] and host in error["message"]


def test_settings_of_the_server_are_checked(tmp_path: Path) -> None:
    pem = tmp_path / "k.pem"
    pem.write_text("x")
    for settings, message in (
        ({"ssl_key_file": pem}, "ssl_cert_file is not given"),
        ({"ssl_key_file": pem, "ssl_cert_file": tmp_path / "no"}, "a file that can be read"),
        ({"cors_origins": ("chat.example",)}, "cors_origins is chat.example"),
        ({"cors_origins": ("http://[::1",)}, "cors_origins is http"),
        ({"cors_origins": ("https://*.chat.example",)}, "cors_origins is https"),
        ({"allowed_hosts": ("https://chat.example",)}, "allowed_hosts is https://chat.example"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig(**settings)


def test_one_line_a_request_with_fixed_keys_and_no_text(client: TestClient) -> None:
    with log_records("kvmem") as records:
        ask(client, "a word like heliotrope")
    lines = [record for record in records if record.name == "kvmem.server.request"]
    assert len(lines) == 1
    fields = lines[0].__dict__["fields"]
    assert list(fields) == [
        "conversation", "use", "prompt", "hit", "selected", "staged_in", "replayed", "prefill_s",
        "decode_tok_s", "reply", "end", "memory",
    ]  # fmt: skip
    assert not any("heliotrope" in record.getMessage() for record in records)


def test_log_lines_as_objects(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("kvmem").handlers, logging.getLogger("kvmem").level
    try:
        logs.set_up(verbose=False, kind="json")
        logs.show_requests()
        logging.getLogger("kvmem.server.request").info("a=1", extra={"fields": {"a": 1}})
        logging.getLogger("kvmem.other").info("not shown")
        logging.getLogger("kvmem.other").warning("shown")
        entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    finally:
        root = logging.getLogger("kvmem")
        root.handlers, root.propagate = before[0], True
        root.setLevel(before[1])
        logging.getLogger("kvmem.server.request").setLevel(logging.NOTSET)
        logging.getLogger("kvmem.llama").setLevel(logging.NOTSET)
    assert [entry["message"] for entry in entries] == ["a=1", "shown"]
    assert entries[0]["a"] == 1 and entries[0]["level"] == "info"
