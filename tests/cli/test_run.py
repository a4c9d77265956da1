"""One prompt and a chat, on a tiny model: random words, but the same ones each time."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvmem.cli.app import execute
from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab

MODEL_ARGS = ("-c", "1024", "-t", "1", "--temp", "0", "-n", "6", "--no-think")


def run(*args: str) -> int:
    return execute(["run", *args])


def test_one_prompt_in_each_way_it_can_be_given(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("who built the tower?")
    monkeypatch.setattr(sys, "stdin", io.StringIO("who built the tower?"))
    replies = []
    for way in (("-p", "who built the tower?"), ("-f", str(file)), ("-f", "-")):
        assert run("-m", str(tiny_llama), *MODEL_ARGS, *way) == 0
        captured = capsys.readouterr()
        replies.append(captured.out)
        assert captured.err.startswith("[")
        assert "6 reply tokens" in captured.err
    assert len(set(replies)) == 1
    assert replies[0].endswith("\n") and len(replies[0]) > 1


def test_json_holds_text_usage_and_memory(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", str(tiny_llama), *MODEL_ARGS, "-p", "hi", "--json", "--system", "short") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["finish_reason"] == "length"
    assert report["usage"]["completion_tokens"] == 6
    assert report["kvmem"]["decision"] == "all_resident"


def plain_reply(path: Path, prompt: list[int], n: int, **settings: str) -> str:
    """What llama.cpp says, with the context that llama-server makes where nothing is set."""
    with (
        Model(path) as model,
        Context(model, n_ctx=4096, n_batch=2048, n_ubatch=512, flash_attn="auto", **settings)  # type: ignore[arg-type]
        as context,
    ):  # fmt: skip
        vocab = Vocab(model)
        said: list[int] = []
        step = np.array(prompt, np.int32)
        while len(said) < n:
            start = len(prompt) + len(said) - len(step)
            context.decode(step, np.arange(start, start + len(step), dtype=np.int32))
            step = np.array([context.logits(-1).argmax()], np.int32)
            if vocab.is_eog(int(step[0])):
                break
            said.append(int(step[0]))
        return vocab.detokenize(said, special=False)


def test_no_kvmem_is_plain_llama_cpp_token_for_token(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of several graphs. The control: with the memory's own types it says other words."""
    text = " ".join(f"the tower has {i} steps and the light turns." for i in range(52))
    with Model(tiny_llama) as model:
        prompt = [int(token) for token in Vocab(model).tokenize(text)]
    assert len(prompt) > 1024

    def say(*args: str) -> str:
        as_it_is = ("--chat-template", "{{ messages[0].content }}", "--no-kvmem", "--json")
        assert run("-m", str(tiny_llama), "-c", "4096", "-t", "1", "--temp", "0", "-n", "120",
                   *as_it_is, "-p", text, *args) == 0  # fmt: skip
        report = json.loads(capsys.readouterr().out)
        assert report["usage"]["prompt_tokens"] == len(prompt)
        assert report["kvmem"]["decision"] == "off"
        return str(report["text"])

    expected = plain_reply(tiny_llama, prompt, 120)
    assert say() == expected
    assert say("--kv-dtype", "q8_0") != expected
    # given types are llama.cpp's too, also a pair that the memory would not take
    assert say("-ctk", "q8_0") == plain_reply(tiny_llama, prompt, 120, type_k="q8_0")


def test_a_seed_repeats_a_reply(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = []
    for seed in ("1", "1", "2"):
        args = (
            "-c",
            "512",
            "-t",
            "1",
            "-n",
            "12",
            "--no-think",
            "--temp",
            "2",
            "--top-k",
            "0",
            "-s",
            seed,
        )
        assert run("-m", str(tiny_llama), *args, "-p", "hi") == 0
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1] != replies[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_chat_reads_only_what_is_new(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("who built the tower?\n\nwhen was it?\n"))
    assert run("-m", str(tiny_llama), *MODEL_ARGS) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    prompt, read = (int(lines[1].split()[i].lstrip("[")) for i in (0, 3))
    assert read < prompt


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("-p", "x", "-f", "y"), "error: --file is y, but must be given without --prompt; "
         "try kvmem run --help"),
        (("-f", "/none"), "error: --file is /none, but must be a readable text file "
         "([Errno 2] No such file or directory: '/none'); try kvmem run --help"),
        (("-p", " "), "error: --prompt is empty, but must be some text; try kvmem run --help"),
        (("--seed", "-2", "-p", "x"), "error: --seed is -2, but must be from 0 to 4294967295, or "
         "-1 for a random one; try kvmem run --help"),
        (("-n", "-5", "-p", "x"), "error: -n is -5, but must be at least 0, or -1 for no limit; "
         "try kvmem run --help"),
        (("--temp", "-1", "-p", "x"), "error: --temp is -1.0, but must be at least 0; "
         "try kvmem run --help"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], line: str
) -> None:
    assert run("-m", "m.gguf", *args) == 2
    assert capsys.readouterr().err == line + "\n"


def test_a_prompt_that_is_too_long(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", str(tiny_llama), "-c", "64", "-p", "word " * 100) == 1
    assert "exceeds the available context size (64 tokens)" in capsys.readouterr().err


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("after_s", [0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
def test_an_interrupt_at_the_start_is_an_interrupt(
    tiny_llama: Path, tmp_path: Path, after_s: float
) -> None:
    """After this much CPU time Python imports, the model loads, or the context is made."""
    file = tmp_path / "long.txt"
    file.write_text("the tower on the hill " * 8_000)
    args = ["-m", str(tiny_llama), "-c", "200000", "-t", "1", "--kvmem-budget", "512"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmem", "run", *args, "-f", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while process.poll() is None and cpu_seconds(process.pid) < after_s:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # Python itself ends by the signal while it imports
    assert process.returncode in (130, -signal.SIGINT), said.decode()


def test_an_interrupt_ends_the_reading_of_a_long_prompt(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("the tower on the hill " * 8_000)  # 104,000 tokens, many seconds
    args = ["-m", str(tiny_llama), "-c", "200000", "-t", "1", "--kvmem-budget", "512"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmem", "run", *args, "-f", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    with process.stderr as stderr:
        # the last words before the reading begins
        assert b"-c 200000 is above the 131072 tokens" in stderr.readline()
        begun = cpu_seconds(process.pid)
        while process.poll() is None and cpu_seconds(process.pid) < begun + 1:
            time.sleep(0.05)  # the context is made in a fraction of this, the reading takes longer
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        code = process.wait(60)
    assert code == 130
    assert time.monotonic() - started < 10  # far below what is left to read


def test_bytes_that_are_no_text_are_told_as_such(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors in ("strict", "surrogateescape"):
        given = io.TextIOWrapper(io.BytesIO(b"bad \xff\xfe bytes"), "utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", given)
        assert run("-m", str(tiny_llama), *MODEL_ARGS, "-f", "-") == 2
        assert capsys.readouterr().err.startswith("error: --file is -, but must be text in UTF-8")
    for flag, rest in (("--prompt", ()), ("--system", ("-p", "hi"))):
        argument = os.fsdecode(b"\xff bad")
        assert run("-m", str(tiny_llama), *MODEL_ARGS, flag, argument, *rest) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {flag} is other bytes, but must be text in UTF-8")
