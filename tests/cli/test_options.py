"""Flags, variables and the one line that each mistake gets."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvmem.chat.thinking import Thinking
from kvmem.cli.app import execute
from kvmem.cli.faults import LATER, OTHER_VARIABLES, RENAMED
from kvmem.cli.options import EngineOptions
from kvmem.cli.sampling_options import SamplingOptions
from kvmem.config import MemoryConfig
from kvmem.errors import ConfigError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LLAMA_", "KVMEM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def stderr_of(capsys: pytest.CaptureFixture[str]) -> "Runner":
    return Runner(capsys)


class Runner:
    """Runs a command line; gives exit code and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> tuple[int, str]:
        code = execute(args)
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return code, captured.err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--kvmem-budget", "100"],
            "error: --kvmem-budget is 100, but must be at least two blocks (--kvmem-block-tokens "
            "128), of which the sink is one; try another --kvmem-budget (kvmem plan shows what "
            "fits)",
        ),
        (
            ["--kvmem-budget", "512", "--kvmem-sink-tokens", "512"],
            "error: --kvmem-sink-tokens is 512, but must be below --kvmem-budget 512 (the sink is "
            "at least one block); try a smaller --kvmem-sink-tokens, or a larger --kvmem-budget",
        ),
        (
            ["--kvmem-budget", "512", "--kvmem-sink-tokens", "600"],
            "error: --kvmem-sink-tokens is 600, but must be below --kvmem-budget 512 (the sink is "
            "at least one block); try a smaller --kvmem-sink-tokens, or a larger --kvmem-budget",
        ),
        (
            ["--kvmem-gen-reserve", "0"],
            "error: --kvmem-gen-reserve is 0, but must be at least one block "
            "(--kvmem-block-tokens 128); try another --kvmem-gen-reserve, or leave it out",
        ),
        (
            ["-ctk", "f16"],
            "error: -ctv is q8_0, but must be as -ctk f16, where one of them is a float; "
            "try --kv-dtype, which sets both",
        ),
        (
            ["--kvmem-host-gb", "nan"],
            "error: --kvmem-host-gb is nan, but must be GiB, from 0 to 1048576; try kvmem plan "
            "--help",
        ),
        (
            ["--kvmem-conversations-gb", "-1"],
            "error: --kvmem-conversations-gb is -1.0, but must be GiB, from 0 to 1048576; try "
            "kvmem plan --help",
        ),
        (
            ["--kvmem-host-gb", "1e300"],
            "error: --kvmem-host-gb is 1e+300, but must be GiB, from 0 to 1048576; try kvmem plan "
            "--help",
        ),
        *(
            (
                [flag, "99999999999999999999"],
                f"error: {flag} is 99999999999999999999, but must be at most {most}; try {hint}",
            )
            for flag, most, hint in (
                ("-c", 2147483647, "kvmem plan --help"),
                ("-b", 2147483647, "kvmem plan --help"),
                ("-ngl", 2147483647, "kvmem plan --help"),
                ("-t", 512, "kvmem plan --help"),
                ("-tb", 512, "kvmem plan --help"),
                ("--kvmem-conversations", 2147483647, "kvmem plan --help"),
                ("--kvmem-budget", 2147483647, "another --kvmem-budget (kvmem plan shows what "
                 "fits)"),
            )
        ),
        (
            ["--no-kvmem", "--kvmem-budget", "512"],
            "error: --kvmem is off, but must be on with --kvmem-budget 512; try it without that, "
            "or without --no-kvmem",
        ),
        (
            ["--no-kvmem", "--kvmem-host-gb", "2"],
            "error: --kvmem is off, but must be on with --kvmem-host-gb 2.0; try it without that, "
            "or without --no-kvmem",
        ),
        (
            ["-t", "0"],
            "error: -t is 0, but must be at least 1, or -1 for all cores; try kvmem plan --help",
        ),
        (
            ["-c", "-5"],
            "error: -c is -5, but must be at least 1, or 0 for the length that the model was "
            "trained for; try kvmem plan --help",
        ),
        (["-ngl", "x"], "error: -ngl is x, but must be a number, or all; try kvmem plan --help"),
        (["--foo"], "error: there is no option --foo; try kvmem plan --help"),
        (["--foo=1"], "error: there is no option --foo; try kvmem plan --help"),
        (["-zz"], "error: there is no option -zz; try kvmem plan --help"),
        (["-to", "5"], "error: there is no option -to; try kvmem plan --help"),
        (["-t4"], "error: there is no option -t4; try kvmem plan --help"),
        (["--port", "1"], "error: there is no option --port; try kvmem plan --help"),
        (
            ["--mmproj", "x.gguf"],
            "error: --mmproj is not there yet (reading images comes later); try without it",
        ),
        (
            ["--cors-methods", "x"],
            "error: --cors-methods is not there yet (that security setting comes later); "
            "try without it",
        ),
        (["-c", "many"], "error: Invalid value for '-c' / '--ctx-size' (env var: "
         "'LLAMA_ARG_CTX_SIZE'): Input should be a valid integer, unable to parse string as an "
         "integer (it is 'many'); try kvmem plan --help"),
        (["--kvmem-host-gb", "1GB"], "error: Invalid value for '--kvmem-host-gb' (env var: "
         "'KVMEM_HOST_GB'): Input should be a valid number, unable to parse string as a "
         "number (it is '1GB'); try kvmem plan --help"),
        (["-c"], "error: Option '-c' requires an argument; try kvmem plan --help"),
        (["more"], "error: Got unexpected extra argument(s) (more); try kvmem plan --help"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(stderr_of: Runner, args: list[str], line: str) -> None:
    assert stderr_of("plan", "-m", "m.gguf", *args) == (2, line + "\n")


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--temp", "inf", "a finite number"),
        ("--presence-penalty", "nan", "a finite number"),
        ("--top-p", "3.0", "from 0 to 1"),
        ("--min-p", "-0.5", "from 0 to 1"),
    ],
)
def test_sampling_that_each_request_would_fail_on(
    stderr_of: Runner, flag: str, value: str, rule: str
) -> None:
    code, line = stderr_of("run", "-m", "m.gguf", "-p", "x", flag, value)
    assert code == 2
    assert line == f"error: {flag} is {value}, but must be {rule}; try kvmem run --help\n"


@pytest.mark.parametrize("flag", sorted(LATER))
def test_flags_of_later_features_are_named(stderr_of: Runner, flag: str) -> None:
    code, line = stderr_of("serve", "-m", "m.gguf", flag, "1")
    assert code == 2
    assert line == f"error: {flag} is not there yet ({LATER[flag]} comes later); try without it\n"


@pytest.mark.parametrize(("flag", "now"), sorted(RENAMED.items()))
def test_flags_that_llama_server_has_renamed_say_so(stderr_of: Runner, flag: str, now: str) -> None:
    line = f"error: there is no option {flag} any more; try {now}\n"
    assert stderr_of("serve", "-m", "m.gguf", flag, "1") == (2, line)


@pytest.mark.parametrize("kind", ["ngram-mod", "draft-simple", "draft-mtp,ngram-mod", "mtp"])
def test_other_ways_of_drafting_are_refused_by_name(stderr_of: Runner, kind: str) -> None:
    code, line = stderr_of("serve", "-m", "m.gguf", "--spec-type", kind)
    assert code == 2
    assert line.startswith("error: Invalid value for '--spec-type'")
    assert repr(kind) in line and "'none'" in line and "'draft-mtp'" in line


def test_draft_settings_are_those_of_llama_server() -> None:
    """Same names, same defaults; each type alone, or both."""
    model = Path("m.gguf")
    plain = EngineOptions(model=model).config().draft
    assert (plain.n_max, plain.n_min, plain.p_min) == (3, 0, 0.0)
    assert (plain.type_k, plain.type_v) == ("f16", "f16")
    both = EngineOptions(model=model, spec_kv_dtype="q8_0").config().draft
    assert (both.type_k, both.type_v) == ("q8_0", "q8_0")
    one = EngineOptions(model=model, spec_kv_dtype="q8_0", spec_type_v="q5_0").config().draft
    assert (one.type_k, one.type_v) == ("q8_0", "q5_0")
    with pytest.raises(ConfigError, match="spec_draft_type_v is f16"):
        EngineOptions(model=model, spec_type_k="q8_0").config()


def test_no_model_and_no_command(stderr_of: Runner) -> None:
    assert stderr_of("run", "-p", "x") == (
        2,
        "error: -m is not given, but must be the path of a GGUF file; try -m FILE, or kvmem "
        "demo-model for a small one\n",
    )
    assert stderr_of("dance") == (2, "error: No such command 'dance'; try kvmem --help\n")


def test_files_that_are_no_model(stderr_of: Runner, tmp_path: Path, tiny_llama: Path) -> None:
    code, line = stderr_of("plan", "-m", str(tmp_path / "none.gguf"))
    assert code == 1
    assert line.startswith(f"error: cannot read the model {tmp_path}/none.gguf: No such file")
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    code, line = stderr_of("plan", "-m", str(text))
    assert code == 1
    assert line.startswith(f"error: {text} is no GGUF file")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_llama.read_bytes()[:-100_000])
    code, line = stderr_of("plan", "-m", str(cut))
    assert code == 1
    assert line.count("\n") == 1
    assert "is not within the file bounds" in line


@pytest.mark.parametrize("gib", ["1000000", "0.00001"])
def test_a_host_limit_beyond_the_machine(stderr_of: Runner, tiny_llama: Path, gib: str) -> None:
    code, line = stderr_of("plan", "-m", str(tiny_llama), "-c", "512", "--kvmem-host-gb", gib)
    assert code == 2
    assert line.startswith("error: --kvmem-host-gb is ")
    assert "GiB, but must be from" in line


def test_a_pool_beyond_the_machine(stderr_of: Runner, tiny_llama: Path) -> None:
    huge = str(1 << 30)
    code, line = stderr_of(
        "plan", "-m", str(tiny_llama), "-c", huge, "--kvmem-budget", str(1 << 29)
    )
    assert code == 2
    last = line.splitlines()[-1]
    assert last.startswith("error: --kvmem-budget is 536870912, but must be at most ")


def test_variables_are_read_and_flags_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", str(tiny_llama))
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    monkeypatch.setenv("KVMEM_BUDGET", "512")
    assert execute(["plan", "--json"]) == 0
    shown = capsys.readouterr().out
    assert '"workspace_tokens": 4096,' in shown
    assert '"budget_tokens": 512,' in shown
    assert execute(["plan", "--json", "--kvmem-budget", "1024"]) == 0
    assert '"budget_tokens": 1024,' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["KVMEM_BUDGTE", "LLAMA_ARG_MMPROJ", "LLAMA_API_KEY_FILE"])
def test_variables_that_no_option_reads(
    stderr_of: Runner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    line = f"error: the variable {name} is set, but no option reads it; try unset {name}\n"
    assert stderr_of("plan", "-m", "m.gguf") == (2, line)


def test_an_empty_key_in_a_variable_opens_no_server(
    stderr_of: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "")
    code, line = stderr_of("serve", "-m", "m.gguf", "--port", "0")
    assert code == 2
    assert line.startswith("error: --api-key is an empty key, but must be a text that is not empty")


def test_a_variable_of_another_command_is_no_mistake(
    stderr_of: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One environment serves them all: plan is asked before serve."""
    monkeypatch.setenv("LLAMA_ARG_PORT", "8081")
    code, line = stderr_of("plan", "-m", "none.gguf")
    assert code == 1 and line.startswith("error: cannot read the model none.gguf")


def test_variables_of_the_build_and_the_tests_are_no_mistake(
    stderr_of: Runner, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """Whoever has set one may run a command, and each that is let pass is read somewhere."""
    build = ("Makefile", "CMakeLists.txt", "pyproject.toml")
    scripts = [path for path in (root / "scripts").glob("*") if path.is_file()]
    code = [path for name in ("tests", "src") for path in (root / name).rglob("*.py")]
    others = {Path(__file__).resolve(), root / "src" / "kvmem" / "cli" / "faults.py"}
    sources = {*(root / name for name in build), *scripts, *code} - others
    texts = [path.read_text(encoding="utf-8") for path in sources]
    asked = {name for text in texts for name in re.findall(r"""environ\S*?["'](KVMEM_\w+)""", text)}
    assert {"KVMEM_TEST_BODIES", "KVMEM_DEMO_MODEL"} <= asked <= OTHER_VARIABLES
    for name in sorted(OTHER_VARIABLES):
        assert any(re.search(rf"\b{name}\b", text) for text in texts), name
        monkeypatch.setenv(name, "1")
    status, line = stderr_of("plan", "-m", "none.gguf")
    assert status == 1 and line.startswith("error: cannot read the model none.gguf")


def test_bad_values_of_variables(stderr_of: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "many")
    code, line = stderr_of("plan", "-m", "m.gguf")
    assert code == 2
    assert "LLAMA_ARG_CTX_SIZE" in line and "'many'" in line


def test_left_out_is_llama_cpps_own_without_the_memory() -> None:
    def memory(**options: Any) -> MemoryConfig:
        return EngineOptions(model=Path("m.gguf"), **options).config().memory

    def computing(config: MemoryConfig) -> tuple[str, str, int, int]:
        return config.type_k, config.type_v, config.batch_tokens, config.ubatch

    assert computing(memory()) == ("q8_0", "q8_0", 512, 512)
    assert computing(memory(batch=1024)) == ("q8_0", "q8_0", 1024, 1024)
    assert computing(memory(kvmem=False)) == ("f16", "f16", 2048, 512)
    assert computing(memory(kvmem=False, batch=64)) == ("f16", "f16", 64, 64)
    given = memory(kvmem=False, kv_dtype="q8_0", batch=1024, ubatch=1024)
    assert computing(given) == ("q8_0", "q8_0", 1024, 1024)
    # a pair that only plain llama.cpp takes
    assert computing(memory(kvmem=False, type_k="q8_0"))[:2] == ("q8_0", "f16")
    with pytest.raises(ConfigError, match="type_v is q8_0"):
        memory(type_k="f16")


def defaults_of(**options: Any) -> Thinking:
    return SamplingOptions(**options).defaults().thinking


@pytest.mark.parametrize(
    ("word", "means"), [("on", "on"), ("1", "on"), ("disabled", "off"), ("-1", "auto")]
)
def test_flash_attention_takes_llama_servers_words(word: str, means: str) -> None:
    options = EngineOptions(model=Path("m.gguf"), flash_attn=word, kv_dtype="f16")
    assert options.config().memory.flash_attn == means


def test_flags_of_thinking() -> None:
    assert defaults_of() == Thinking()
    assert defaults_of(
        enable_thinking=False,
        reasoning_effort="low",
        reasoning_budget=9,
        reasoning_budget_message="Enough.",
        template_kwargs='{"enable_thinking": true, "style": "plain"}',
    ) == Thinking(
        enabled=False,
        effort="low",
        budget=9,
        message="Enough.",
        kwargs={"enable_thinking": True, "style": "plain"},
    )


@pytest.mark.parametrize(
    ("options", "enabled"),
    [
        ({"reasoning": "off"}, False),
        ({"reasoning": "on"}, True),
        ({"reasoning": "on", "enable_thinking": True}, True),
        ({"reasoning": "auto", "enable_thinking": False}, False),
    ],
)
def test_llamacpps_name_for_the_switch(options: dict[str, Any], enabled: bool) -> None:
    assert defaults_of(**options).enabled is enabled


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--reasoning", "on", "--no-think"], "--reasoning is on, but must be given without --no"),
        (["--reasoning-effort", "hard"], "--reasoning-effort is hard, but must be one of none, "),
        (["--reasoning-budget", "-2"], "--reasoning-budget is -2, but must be at least 0, or -1"),
        (["--reasoning-budget", "4294967296"], "--reasoning-budget is 4294967296, but must be at "),
        (["--top-k", "3000000000"], "--top-k is 3000000000, but must be at most 2147483647"),
        (["-n", "2147483648"], "-n is 2147483648, but must be at most 2147483647"),
        (["--temp", "1e300"], "--temp is 1e+300, but must be at most 3.40282e+38"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs is [1], but must be a JSON "),
        (
            ["--chat-template-kwargs", '{"enable_thinking": "false"}'],
            "chat_template_kwargs.enable_thinking must be true or false, not a string",
        ),
        (["--chat-template", "llama3"], "--chat-template is llama3, but must be Jinja text, or "),
    ],
)
def test_wrong_flags_of_thinking(stderr_of: Runner, args: list[str], reason: str) -> None:
    code, line = stderr_of("serve", "-m", "m.gguf", "--port", "0", *args)
    assert code == 2 and line.count("\n") == 1
    assert reason in line


def test_thinking_by_variables(monkeypatch: pytest.MonkeyPatch, stderr_of: Runner) -> None:
    monkeypatch.setenv("LLAMA_ARG_THINK_BUDGET", "-2")
    assert "--reasoning-budget is -2" in stderr_of("serve", "-m", "m.gguf", "--port", "0")[1]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert re.fullmatch(r"kvmem \S.*, llama\.cpp b\d+\n", capsys.readouterr().out)


def test_a_hint_names_the_command_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "speed", "--nothing"]) == 2
    assert capsys.readouterr().err.endswith("try kvmem bench speed --help\n")


def test_a_template_that_is_no_jinja(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "-m", str(tiny_llama), "-p", "x", "--chat-template", "{{ bad"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is no Jinja that can be read" in line and "std::exception" not in line


def test_a_calibration_is_named_by_its_flag(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "README.md"
    text.write_text("no JSON")
    assert execute(["plan", "-m", str(tiny_llama), "--kvmem-calibration", str(text)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --kvmem-calibration is {text}")
