"""The server as a process: start, serve, notice that a client left, stop."""

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
import pytest
from live import WAIT_S, serving
from prometheus_client.parser import text_string_to_metric_families

from kvmem.cli.app import execute
from kvmem.cli.server_options import ServerOptions
from kvmem.errors import ConfigError


def post(address: tuple[str, int], body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{address[0]}:{address[1]}/v1/chat/completions", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        result: dict[str, Any] = json.load(response)
    return result


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        data: bytes = response.read()
    return data


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

        with send(address, ENDLESS):
            while not json.loads(get(f"http://{address[0]}:{address[1]}/slots"))[0][
                "is_processing"
            ]:
                pass
            with send(address, {**SHORT, "stream": True}) as waiting:
                assert waiting.recv(1) == b"H"  # queued behind the endless one
        server.until("end=cancelled")
        assert post(address, SHORT)["choices"] == reply["choices"]
        assert server.stop() == 130


@pytest.mark.alone
@pytest.mark.parametrize("n", [1, 16])
def test_the_first_byte_of_a_long_history_comes_within_a_second(tiny_llama: Path, n: int) -> None:
    """2 MB that nobody has seen: to render and to tokenise them takes longer."""
    words = " ".join(f"w{i * 31 % 997}" for i in range(2000))
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i} {words}"} for i in range(201)]
    body = {**SHORT, "messages": turns, "stream": True, "n": n}
    with serving("-m", str(tiny_llama), *ARGS, "-c", "1048576") as server:
        with send(server.address(), body) as client:
            sent = monotonic()
            assert client.recv(1) == b"H"
            assert monotonic() - sent < 1
        server.until("end=(left|cancelled|400)")


def test_a_termination_ends_it_in_the_middle_of_a_reply(tiny_llama: Path) -> None:
    with (
        serving("-m", str(tiny_llama), *ARGS) as server,
        send(server.address(), {**ENDLESS, "stream": True}) as client,
    ):
        assert client.recv(1) == b"H"
        assert server.stop(signal.SIGTERM) == 0


def rest_of(client: socket.socket) -> bytes:
    received = b""
    while piece := client.recv(1 << 16):
        received += piece
    return received


def test_a_termination_answers_every_request(tiny_llama: Path) -> None:
    with (
        serving("-m", str(tiny_llama), *ARGS) as server,
        send(server.address(), {**ENDLESS, "stream": True}) as running,
    ):
        host, port = running.getpeername()
        received = running.recv(1)
        while b"content" not in received:
            received += running.recv(4096)
        stream = {**SHORT, "stream": True}
        with send((host, port), stream) as waiting, send((host, port), SHORT) as plain:
            waiting.settimeout(WAIT_S)
            assert waiting.recv(1) == b"H"  # its stream has begun, behind the other
            while json.loads(get(f"http://{host}:{port}/slots"))[0]["kvmem"]["n_waiting"] < 2:
                pass
            assert server.stop(signal.SIGTERM) == 0
            for client in (running, waiting):
                text = rest_of(client).decode()
                last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
                error = json.loads(last.removeprefix("data: "))["error"]
                assert (error["code"], error["type"]) == (503, "unavailable_error")
                assert "[DONE]" not in text
            head, _, text = rest_of(plain).decode().partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 503") and "retry-after: 2" in head.lower()
            assert json.loads(text)["error"]["message"] == "the server is stopping"
    assert not any("Traceback" in line or "CancelledError" in line for line in server.log())


@pytest.mark.alone
@pytest.mark.parametrize(
    ("stream", "number", "code"), [(False, signal.SIGTERM, 0), (True, signal.SIGINT, 130)]
)
def test_a_termination_does_not_wait_for_a_prompt_that_is_rendered(
    tiny_llama: Path, stream: bool, number: int, code: int
) -> None:
    """So many messages take a template longer than a stop may last, and nothing interrupts it."""
    messages = [{"role": "user", "content": "a"}] * 100_000
    with (
        serving("-m", str(tiny_llama), *ARGS, "-c", "65536") as server,
        send(server.address(), {"messages": messages, "stream": stream}) as client,
    ):
        if stream:
            assert client.recv(1) == b"H"
        else:
            sleep(1)  # there is nothing to see of it
        sent = monotonic()
        assert server.stop(number) == code
        assert monotonic() - sent < 5
        head, _, text = rest_of(client).decode().partition("\r\n\r\n")
        assert '"code":503,"message":"the server is stopping"' in text
        assert stream or "retry-after: 2" in head.lower()
    assert not any("Traceback" in line or "CancelledError" in line for line in server.log())


@pytest.mark.alone
def test_a_termination_does_not_wait_for_a_body(tiny_llama: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    with (
        serving("-m", str(tiny_llama), *ARGS) as server,
        socket.create_connection(server.address(), timeout=WAIT_S) as client,
    ):
        client.sendall(head + b"Expect: 100-continue\r\n\r\n{")
        assert client.recv(1) == b"H"  # it waits for more
        sent = monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert monotonic() - sent < 5
        told = rest_of(client).decode()
    assert "HTTP/1.1 503" in told and '"message":"the server is stopping"' in told
    lines = server.log()
    assert sum("end=503" in line for line in lines) == 1
    assert not any("Traceback" in line or "Error" in line or "Cancel" in line for line in lines)


@pytest.mark.alone
@pytest.mark.parametrize("reads_on", [True, False])
def test_a_client_that_has_stopped_to_read_is_waited_for_but_not_long(
    tiny_llama: Path, reads_on: bool
) -> None:
    """More than all buffers hold is said before the signal. Who reads on gets it; who does not is
    cut off, and the process ends in time.
    """
    body = {**ENDLESS, "max_tokens": 5000, "stream": True, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    with serving("-m", str(tiny_llama), *ARGS) as server, socket.socket() as client:
        address = server.address()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT_S)
        client.connect(address)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
        client.sendall(head.encode() + b"\r\n\r\n" + data)
        server.until("end=length")  # of the engine's work
        server.process.send_signal(signal.SIGTERM)
        began = monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(3.5)
        if reads_on:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            text = rest_of(client)
            assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(WAIT_S) == 0
        assert monotonic() - began < 10
    with socket.create_server(address):
        pass  # the port is free


START = ("--port", "0", "-c", "512", "-t", "1")
SWITCHES = ("--api-key", "secret-k", "--alias", "tiny", "--metrics", "--slots", "--log-disable",
            "-np", "1", "-fa", "auto", "-ngl", "0", "--no-mmap")  # fmt: skip
VARIABLES = {
    "LLAMA_API_KEY": "secret-k", "LLAMA_ARG_ALIAS": "tiny", "LLAMA_ARG_ENDPOINT_METRICS": "1",
    "LLAMA_ARG_ENDPOINT_SLOTS": "1", "LLAMA_ARG_N_PARALLEL": "1", "LLAMA_ARG_FLASH_ATTN": "auto",
    "LLAMA_ARG_N_GPU_LAYERS": "0", "LLAMA_ARG_LOAD_MODE": "none",
    "LLAMA_ARG_MODEL": "overruled.gguf",
}  # fmt: skip


@pytest.mark.parametrize("by_variables", [False, True])
def test_a_start_script_of_llama_server_moves_over(
    tiny_llama: Path, tmp_path: Path, by_variables: bool
) -> None:
    """Case R24: switches or variables, and the four routes with and without the key."""
    file = tmp_path / "keys"
    file.write_text("# office\nfiled-k\n")
    args = () if by_variables else (*SWITCHES, "--api-key-file", str(file))
    variables = {**VARIABLES, "LLAMA_ARG_API_KEY_FILE": str(file)} if by_variables else {}
    with serving("-m", str(tiny_llama), *START, *args, variables=variables) as server:
        host, port = server.address()
        for key, status in (("filed-k", 200), ("# office", 401)):
            assert httpx2.get(
                f"http://{host}:{port}/props", headers={"X-Api-Key": key}, timeout=WAIT_S
            ).status_code == status  # fmt: skip
        for path in ("/v1/models", "/metrics", "/slots", "/props"):
            url = f"http://{host}:{port}{path}"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url, timeout=WAIT_S)
            with refused.value:
                assert refused.value.code == 401
            request = urllib.request.Request(url, headers={"Authorization": "Bearer secret-k"})
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                text = response.read().decode()
            if path == "/v1/models":
                assert json.loads(text)["data"][0]["id"] == "tiny"
            if path == "/metrics":
                assert list(text_string_to_metric_families(text))
        assert server.stop(signal.SIGTERM) == 0
    with socket.create_server((host, port)):
        pass  # the port is free


def test_what_is_wrong_with_the_command_line_is_an_object_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for args in (["--nope"], ["--port", "x"]):
        assert execute(["serve", "-m", "m.gguf", "--log-format", "json", *args]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert json.loads(line)["level"] == "error"


def test_every_line_of_a_start_is_an_object_where_that_is_asked_for(tiny_llama: Path) -> None:
    args = ("-m", str(tiny_llama), *START, "--log-format", "json", "--kvmem-calibrate",
            "--kvmem-calibration", "off")  # fmt: skip
    with serving(*args) as server:
        address = server.address()
        post(address, SHORT)
        assert server.stop() == 130
        told = [json.loads(line) for line in server.log()]
    messages = [entry["message"] for entry in told]
    assert messages[0].startswith("not calibrated, as it would not be used")
    assert messages[1] == f"loading {tiny_llama}"
    assert any(message.startswith("workspace (-c)") for message in messages)
    assert messages[-2].startswith("listening on http://")
    assert told[-1]["end"] == "length"


def status_of(address: tuple[str, int], path: str, content: bytes, **headers: str) -> int:
    """Of a POST; a stream is read to its end."""
    url = f"http://{address[0]}:{address[1]}{path}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(url, content=content, headers=named, timeout=WAIT_S).status_code


LOGGED = ((), ("-v",), ("-v", "--log-format", "json"))


@pytest.mark.parametrize("switches", LOGGED)
def test_keys_never_reach_the_log(
    tiny_llama: Path, tmp_path: Path, switches: tuple[str, ...]
) -> None:
    """Not at the start, with no request that is let in or kept out, and not at the end."""
    file = tmp_path / "keys"
    file.write_text("filed-k\n")
    keys = ("--api-key", "secret-k,other-k", "--api-key-file", str(file))
    body = json.dumps(SHORT).encode()
    with serving("-m", str(tiny_llama), *ARGS, *keys, *switches) as server:
        address = server.address()
        for key, status in (("secret-k", 200), ("filed-k", 200), ("wrong-k", 401)):
            for headers in ({"Authorization": f"Bearer {key}"}, {"X_Api_Key": key}):
                assert status_of(address, "/v1/chat/completions", body, **headers) == status
                assert status_of(address, "/nothing", body, **headers) in (401, 404)
                assert status_of(address, "/completion", b"{", **headers) in (400, 401)
        assert server.stop(signal.SIGTERM) == 0
        lines = server.log()
    requests = [line for line in lines if "end=" in line]
    assert len(requests) == 18, "the whole log was read"
    assert [line for line in lines for key in ("secret-k", "other-k", "filed-k", "wrong-k")
            if key in line] == []  # fmt: skip


SHORT_TEXT = {"type": "string", "maxLength": 3}  # which calls of this template are not held to


def bodies_with(word: str) -> list[tuple[str, int, Any]]:
    """Path, status and body of requests that have the word in every place that takes a text."""
    said = {"role": "user", "content": f"{word} and {word}"}
    look: dict[str, Any] = {
        "name": f"look_{word}", "description": word,
        "parameters": {"type": "object", "properties": {word: {"type": "string"}}},
    }  # fmt: skip
    call = {
        "id": word, "type": "function", "function": {"name": word, "arguments": f'{{"{word}": 1}}'},
    }  # fmt: skip
    history = [
        {"role": "system", "content": word}, said,
        {"role": "assistant", "content": None, "reasoning_content": word, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": word, "content": word}, said,
    ]  # fmt: skip
    tools = [{"type": "function", "function": look}, {"type": f"web_{word}"}]
    loose = {**look, "parameters": {"type": "object", "properties": {word: SHORT_TEXT}}}
    strict = {"type": "function", "function": {**loose, "strict": True}}
    schema = {"type": "object", "properties": {word: {"enum": [word]}}, "required": [word]}
    chat, few = "/v1/chat/completions", {"messages": [said], "max_tokens": 3}
    call_first = {"logit_bias": {"278": 100}, "max_tokens": 8}
    rows: list[tuple[str, int, Any]] = [
        (chat, 200, {**few, "messages": history, "tools": tools, "kvmem": {"conversation_id": word},
                     "stop": [word], "user": word, word: word, "reasoning_budget_message": word,
                     "chat_template_kwargs": {word: word}}),
        (chat, 200, {**few, "tools": [{"type": "function", "function": loose}]}),
        (chat, 200, {**few, **call_first, "tools": tools}),
        (chat, 200, {**few, "json_schema": schema, "max_tokens": 60}),
        (chat, 200, {**few, "grammar": f'root ::= "{word}"'}),
        (chat, 400, {**few, "messages": [{**said, "role": word}]}),
        (chat, 400, {**few, "messages": [*history, {"role": "assistant", "content": word,
                                                    "tool_calls": [{**call, "function": word}]}]}),
        (chat, 400, {**few, "tools": tools, "tool_choice": word}),
        (chat, 400, {**few, "tools": [strict]}),
        (chat, 400, {**few, "json_schema": {"not": {"const": word}}}),
        (chat, 400, {**few, "json_schema": {"$ref": f"#/{word}"}}),
        (chat, 400, {**few, "grammar": f"root ::= {word}"}),
        (chat, 400, {**few, "grammar": f'root ::= "{word}'}),
        (chat, 400, {**few, "temperature": word}),
        (chat, 400, {**few, "samplers": word}),
        (chat, 400, {**few, "logit_bias": {"1000000": 1}}),
        (chat, 400, {**few, "messages": [{**said, "content": f"{word} " * 9000}]}),
        (chat, 400, f'{{"messages": "{word}'),
        ("/completion", 200, {"prompt": word, "n_predict": 3, "stop": [word]}),
        ("/completion", 400, {"prompt": word, "grammar": f"root ::= {word}"}),
        ("/completion", 400, {"prompt": {"prompt_string": [word]}}),
        ("/v1/completions", 400, {"prompt": f"{word} " * 9000}),
        ("/tokenize", 200, {"content": word}),
        ("/apply-template", 200, {"messages": history}),
        ("/v1/messages", 404, {"messages": [said]}),
    ]  # fmt: skip
    return rows


@pytest.mark.parametrize("switches", LOGGED)
def test_no_text_of_a_request_reaches_the_log(tiny_llama: Path, switches: tuple[str, ...]) -> None:
    """Whether it is answered, noted, refused, or ends with the engine's failure."""
    rows = bodies_with("heliotrope")
    with serving("-m", str(tiny_llama), *ARGS, *switches) as server:
        address = server.address()
        for path, status, body in rows:
            streams = (False, True) if isinstance(body, dict) else (False,)
            for stream in streams:
                sent = json.dumps({**body, "stream": stream}) if isinstance(body, dict) else body
                assert status_of(address, path, sent.encode()) == status, (path, sent[:300])
        assert server.stop(signal.SIGTERM) == 0
        lines = server.log()
    assert sum("end=" in line for line in lines) >= 2 * 22
    assert [line for line in lines if "heliotrope" in line.lower()] == []


def test_keys_from_a_file_add_to_the_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufeff#\n# office\none\n\n two \n  #three\nfo#ur\n", "utf-8")
    config = ServerOptions(api_key="a,b", api_key_file=keys).config(Path("m.gguf"))
    assert config.api_keys == ("a", "b", "one", "two", "fo#ur"), "a comment opens nothing"


@pytest.mark.parametrize("text", [None, "", "\n", "#\n  # office\n"])
def test_a_file_without_a_key_ends_the_start(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        ServerOptions(api_key_file=path).config(Path("m.gguf"))


def test_files_that_are_no_certificate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pem = tmp_path / "k.pem"
    pem.write_text("x")
    files = ("--ssl-key-file", str(pem), "--ssl-cert-file", str(pem))
    assert execute(["serve", "-m", "none.gguf", "--port", "0", *files]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: --ssl-cert-file is {pem}, but must be a certificate in PEM")
    assert f"--ssl-key-file {pem}" in line


def test_https(tiny_llama: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the program openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out",
         certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    files = ("--ssl-key-file", str(key), "--ssl-cert-file", str(certificate))
    with serving("-m", str(tiny_llama), *START, *files) as server:
        found = server.until(r"listening on (https://[\d.:]+)")
        context = ssl.create_default_context(cafile=certificate)
        url = f"{found[1]}/v1/models"
        with urllib.request.urlopen(url, timeout=WAIT_S, context=context) as response:
            assert response.status == 200
        assert server.stop() == 130


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
    line = capsys.readouterr().err
    assert line.startswith("error: --host is 192.0.2.1, but must be an address of this machine")
