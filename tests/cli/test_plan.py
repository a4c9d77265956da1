"""The plan: the whole table, and that its figures are those of a start."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvmem.cli.app import execute
from kvmem.cli.plan import make_plan
from kvmem.config import EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import facts as facts_module
from kvmem.engine.engine import Engine
from kvmem.engine.facts import _warn, plain_devices
from kvmem.errors import CapacityError
from kvmem.llama import runtime
from kvmem.llama.model import Model

ARGS = ("-c", "4096", "--kvmem-budget", "512", "--kvmem-block-tokens", "32", "--kvmem-gen-reserve")

TABLE = """\
                        tokens      bytes  from
weights                         {weights}  llama (see below)
workspace (-c)           4,096             given
block                       32    8.5 KiB  given
budget                     512  136.0 KiB  given
  sink, always in it        32             auto: one block
  recent, always in it     128             auto: 128
reserve                    128   34.0 KiB  given
device pool                640  170.0 KiB  budget + reserve, K/V q8_0 / q8_0
compute buffers, host             2.4 MiB  llama.cpp's graphs, batches of 512 (-ub) over the pool
host store limit                  1.0 GiB  given
  conversations in it             1.0 GiB  at most 8 together
  a token in it              1      443 B  K, V, summaries, tables
scorer                                     fused
  calibration                              none: kvmem calibrate makes one
  a checkpoint in it                  0 B  none: this model has attention layers only
largest history          4,096             bounded by the workspace
"""


def test_the_table(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "-m", str(tiny_llama), *ARGS, "128", "--kvmem-host-gb", "1"]
    assert execute(args) == 0
    captured = capsys.readouterr()
    weights = f"{(tiny_llama.stat().st_size) / 1024:.1f}"
    shown = captured.out
    assert captured.err == ""
    lines = shown.splitlines()
    assert re.search(r"llama \d+(\.\d+)?K all F32$", lines[1])
    assert float(lines[1].split()[1]) == pytest.approx(float(weights), rel=0.05)
    assert lines[2:] == TABLE.splitlines()[2:]


def test_the_figures_are_those_of_a_start(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["plan", "--json", "-m", str(tiny_llama), *ARGS, "128"]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory = MemoryConfig(
        workspace_tokens=4096, budget_tokens=512, reserve_tokens=128, block_tokens=32
    )
    with Engine(EngineConfig(model=ModelConfig(path=tiny_llama), memory=memory)) as engine:
        assert plan["pool_tokens"] == engine.sizes.pool_tokens
        assert plan["budget_tokens"] == engine.sizes.budget_tokens
        assert plan["weight_bytes"] == engine.model.size_bytes
        assert plan["kv_bytes_per_token"] == engine.facts.kv_bytes_per_token
    assert plan["history_tokens"] == 4096
    assert plan["sources"]["budget_tokens"] == "given"


def test_a_small_host_limit_bounds_the_history(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "--json", "-m", str(tiny_llama), *ARGS, "128", "--kvmem-host-gb", "0.001"]
    assert execute(args) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["history_tokens"] == int(0.001 * (1 << 30)) // plan["host_bytes_per_token"]


def test_a_hybrid_has_checkpoints(tiny_qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "--json", "-m", str(tiny_qwen35), *ARGS, "128"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # two recurrent layers: 3 columns of 256 for the convolution, 32 x 128 of state, f32
    state = 2 * 4 * (3 * 256 + 32 * 128)
    assert plan["state_device_bytes"] == state
    assert state < plan["checkpoint_bytes"] < state + 128  # with llama.cpp's own head
    assert plan["max_checkpoints"] == 8
    assert plan["all_checkpoint_bytes"] == 9 * plan["checkpoint_bytes"]
    assert plan["history_tokens"] == plan["history_tokens_beside_checkpoints"] == 4096


def test_checkpoints_take_room_from_the_history(
    tiny_qwen35: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "-m", str(tiny_qwen35), *ARGS, "128", "--kvmem-host-gb", "0.001"]
    assert execute([*args, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    limit, token = int(0.001 * (1 << 30)), plan["host_bytes_per_token"]
    assert plan["history_tokens"] == limit // token
    left = limit - plan["all_checkpoint_bytes"]
    assert plan["history_tokens_beside_checkpoints"] == left // token
    assert execute(args) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a checkpoint in it 38.1 KiB the recurrent state" in shown
    assert "all checkpoints 342.7 KiB 8 kept, one being written" in shown
    assert f"beside all checkpoints {left // token:,} beyond it they give way to blocks" in shown


@pytest.mark.skipif(bool(runtime.gpus()), reason="there is a GPU")
def test_layers_for_a_gpu_that_is_not_there(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _warn.cache_clear()
    args = ["plan", "-m", str(tiny_llama), *ARGS, "128"]
    for layers in ("all", "0"):
        assert execute([*args, "-ngl", layers]) == 0
        assert capsys.readouterr().err == ""
    assert execute([*args, "-ngl", "20"]) == 0
    assert capsys.readouterr().err == (
        "W kvmem.engine.facts: -ngl 20 has no effect: this machine or this build has no GPU\n"
    )


def test_without_the_memory(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "-m", str(tiny_llama), "-c", "1024", "--no-kvmem"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "KV cache         1,024  512.0 KiB  --no-kvmem: plain llama.cpp"
    )


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_without_the_memory_a_cache_that_does_not_fit_is_refused(
    kind: str,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the settings to try that a start would name."""
    args = ["plan", "-m", str(tiny(kind)), "--no-kvmem", "-ngl", "0", "-b", "64", "-c"]
    monkeypatch.setattr(facts_module, "_host_memory", lambda: (64 << 20, 1 << 30))
    assert execute([*args, "1000"]) == 0
    capsys.readouterr()
    assert execute([*args, "1000000"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: no context of 1000000 cells in batches of 64: it takes ")
    assert line.endswith(" of the machine, where 64 MiB are free; try -c 750000 or -ub 32")


def test_a_hybrid_without_the_memory_is_refused_by_its_attention_layers_alone(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header alone would count every layer."""
    config = EngineConfig(
        model=ModelConfig(path=tiny_qwen35, n_gpu_layers=0),
        memory=MemoryConfig(enabled=False, workspace_tokens=100_000, batch_tokens=64),
    )
    facts = make_plan(config).facts
    counted = facts.kv_bytes_per_token * 100_000
    with Model(tiny_qwen35, n_gpu_layers=0, dry=True) as dry:
        (device,) = plain_devices(dry, config)
    taken = device.bytes_of(100_000)
    assert taken + taken // 50 < counted
    for free, fits in ((taken + taken // 50, True), (taken - taken // 10, False)):
        monkeypatch.setattr(
            facts_module, "_host_memory", lambda free=free: (free, facts.host_bytes)
        )
        with nullcontext() if fits else pytest.raises(CapacityError, match="no context of 100000"):
            make_plan(config)


def test_where_llama_cpp_alone_knows_what_it_takes_nothing_is_refused(tiny_llama: Path) -> None:
    """Types that kvmem does not take."""
    config = EngineConfig(
        model=ModelConfig(path=tiny_llama, n_gpu_layers=0),
        memory=MemoryConfig(enabled=False, workspace_tokens=1 << 30, type_k="f16", type_v="q8_0"),
    )
    assert make_plan(config).sizes.workspace_tokens == 1 << 30
