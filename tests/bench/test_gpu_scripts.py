"""bench/gpu and bench/micro on tiny models: they run, and write what a report reads."""

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import card
import drafts
import experiments
import fit
import pytest
import run
import scoring
import shape27b
import typer
from gguf import GGMLQuantizationType as Q
from synthetic_pool import Settings, pool, steps_per_s
from typer.core import TyperGroup

from kvmem.bench.record import write_jsonl
from kvmem.bench.saved import load_run, run_files
from kvmem.bench.speed import SpeedSpec
from kvmem.cli.bench import bench
from kvmem.config import SpecType
from kvmem.engine import decode, facts
from kvmem.engine.engine import Engine
from kvmem.llama import runtime
from kvmem.llama.context import Share
from kvmem.llama.model import Model

GIB = 1 << 30


def call(
    main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> dict[str, Any]:
    """The environment that a script wrote, with its rows by what they measured."""
    path = Path(str(arguments[-1]))
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()
    (saved,) = map(load_run, run_files(path.parent))
    assert saved.n_others == 0
    return {**saved.environment, "rows": saved.experiments}


@pytest.mark.parametrize("alone", [False, True])
def test_drafts(
    alone: bool, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_Reply", decode._Reply)  # noqa: SLF001, the script puts its own there
    monkeypatch.setattr(drafts, "BATCH_TOKENS", 128)
    monkeypatch.setattr(drafts, "UBATCH_TOKENS", 64)
    sizes = ["--tokens", 512, "--budget", 256, "--reserve", 64, "--block", 32, "--reply", 9]
    sizes += ["--repeats", 0] if alone else ["--repeats", 1]
    path = tiny("qwen35_mtp")
    found = call(
        drafts.main,
        monkeypatch,
        *(
            path,
            "-ngl",
            0,
            "-t",
            1,
            *sizes,
            *["--alone"] * alone,
            "--out",
            tmp_path / "drafts.jsonl",
        ),
    )
    assert found["settings"]["tokens"] == 512
    count: dict[str, int] = {}
    for row in found["rows"]:
        count[row["what"]] = count.get(row["what"], 0) + 1
    assert count == {
        "memory": 3,
        "save a state": 6,  # on the host and on the device
        "restore a state": 6,
        "cancel while 128 tokens are read at a time": 1,
        **({} if alone else {"reply": 1 + 4 + 4}),
    }
    for row in found["rows"]:
        if row["what"].startswith("cancel"):
            assert row["n"] == 10
            assert 0 < row["ms"] <= row["slowest ms"] < 2000


def test_drafts_have_the_graphs_of_the_other_measurements(tiny: Callable[..., Path]) -> None:
    arguments = argparse.Namespace(
        model=tiny("qwen35_mtp"),
        n_gpu_layers=0,
        threads=1,
        tokens=4096,
        budget=4096,
        reserve=64,
        block=32,
    )
    with Engine(drafts.configure(arguments, None)) as engine:
        assert (engine.memory.context.n_batch, engine.memory.context.n_ubatch) == (2048, 512)


def test_experiments(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(model: Model, settings: Settings) -> Iterator[dict[str, Any]]:
        with pool(model, settings, budget=80, reserve=4) as p:
            p.far(window=8)
            yield {"what": "steps", "tokens": p.ws.n_tokens, "t/s": steps_per_s(p)[0]}

    monkeypatch.setitem(experiments.EXPERIMENTS, "small", small)
    path = tmp_path / "experiments.jsonl"
    found = call(
        experiments.main,
        monkeypatch,
        *(tiny_llama, "small", "--far", 4096, "-t", 1, "--out", path),
    )
    assert (found["bench"], found["model"]) == ("experiments", tiny_llama.name)
    assert found["settings"]["far"] == 4096
    (row,) = found["rows"]
    assert row["tokens"] == 4096
    assert row["t/s"] > 0


@pytest.mark.parametrize("n_gpus", [0, 2])
def test_a_smaller_card_is_left_of_one_gpu(
    n_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = runtime.Device("", "", "gpu", GIB, GIB)
    monkeypatch.setattr(runtime, "gpus", lambda: n_gpus * [device])
    monkeypatch.setattr(sys, "argv", ["fit.py", str(tmp_path / "model.gguf")])
    with pytest.raises(SystemExit):
        fit.main()
    assert f"sees {n_gpus} GPUs" in capsys.readouterr().err


def test_a_card_is_not_larger_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold what is free by now."""
    cuda = SimpleNamespace(cudaMalloc=lambda pointer, n_bytes: 2, cudaFree=lambda pointer: 0)
    device = runtime.Device("", "", "gpu", 3 * GIB, 4 * GIB)
    monkeypatch.setattr(runtime, "gpus", lambda: [device])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    with pytest.raises(RuntimeError, match="2048 MiB more than 2 GiB"), fit.card(2):
        pass


def test_a_smaller_card_is_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 GiB one was in use before; a card of 2 GiB has one left, and says that it has two."""
    taken: list[int] = []

    def malloc(pointer: object, n_bytes: ctypes.c_size_t) -> int:
        taken.append(n_bytes.value)
        return 0

    cuda = SimpleNamespace(cudaMalloc=malloc, cudaFree=lambda pointer: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(
        runtime,
        "gpus",
        lambda: [runtime.Device("", "", "gpu", 3 * GIB - sum(taken), 4 * GIB)],
    )
    share = Share("CUDA0", GIB, 4 * GIB, 0, 0, 0, 0)
    monkeypatch.setattr(
        fit, "shares_of", lambda *args, **kwargs: [share, share._replace(device="")]
    )
    with fit.card(2):
        assert runtime.gpus()[0].free_bytes == GIB
        seen = cast(Any, facts).shares_of()
    assert [one.total for one in seen] == [2 * GIB, 4 * GIB]


def test_a_start_on_a_smaller_card(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def whole(gib: float) -> Iterator[None]:
        yield

    monkeypatch.setattr(fit, "card", whole)
    monkeypatch.setattr(fit, "free_by_gpu", lambda: [GIB])
    arguments = (tiny_llama, "-c", 2048, "-t", 1, "--out", tmp_path / "fit.jsonl")
    rows = call(fit.main, monkeypatch, *arguments)["rows"]
    assert [row["what"] for row in rows] == list(get_args(SpecType))
    assert rows[0]["pool"] == rows[0]["planned pool"] > 0
    assert rows[0]["read t/s"] > 0


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_scoring(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--tokens", 1024, "--rows", 2, "--runs", 1, "--threads", 1]
    path = tmp_path / "scoring.jsonl"
    found = call(scoring.main, monkeypatch, "--kv", kind, *sizes, "--out", path)
    rows = found["rows"]
    assert [row["what"].split()[0] for row in rows] == 3 * ["summaries", "score"] + 2 * ["lexical"]
    assert all(row["ms"] > 0 for row in rows if row["what"].startswith("score"))


@pytest.mark.parametrize("name", run.SIZES)
def test_every_size_can_be_run_and_fits_its_card(name: str, tmp_path: Path) -> None:
    size = run.SIZES[name]
    spec = SpeedSpec(
        model=tmp_path,
        depths=size.depths,
        pool_tokens=run.BUDGET + run.RESERVE,
        reserve_tokens=run.RESERVE,
        window_tokens=run.WINDOW,
        block_tokens=128,
        prefill_tokens=2048,
        decode_tokens=48,
    )
    assert [spec.is_within(depth) for depth in size.depths] == [True] + [False] * (
        len(size.depths) - 1
    )
    group = typer.main.get_command(bench)
    assert isinstance(group, TyperGroup)
    for command in run.commands(size, "model.gguf", tmp_path, tmp_path, "1").values():
        if command[:3] == ["-m", "kvmem", "bench"]:
            group.commands[command[3]].make_context(command[3], command[4:])
    systems = 1 if size.alone else 3
    shape = replace(shape27b.SHAPE, n_layers=size.layers)
    weights = shape27b.sizes(Q.IQ4_XS, shape).on_device
    kv = 34 * 1024 * size.layers // 64  # of a token, in q8_0
    most = systems * (weights + GIB) + kv * (size.depths[-1] + (systems - 1) * spec.pool_tokens)
    assert most < {"16g": 15 * GIB, "24g": 22 * GIB, "h200": 130 * GIB}[name]


def test_the_shape_is_a_model_and_its_bytes_are_told(tmp_path: Path) -> None:
    path, n_vocab = tmp_path / "shape.gguf", 512
    small = replace(
        shape27b.SHAPE,
        n_layers=4, width=256, n_ff=512, n_heads=4, n_kv_heads=2, head_dim=64, n_ssm_keys=2,
        n_ssm_values=4,
    )  # fmt: skip
    shape27b.write(path, Q.IQ4_XS, small, n_vocab)
    sizes = shape27b.sizes(Q.IQ4_XS, small, n_vocab)
    with Model(path, load_mtp=True) as model:
        assert model.size_bytes == sizes.all
        assert model.is_hybrid
    assert sizes.all - sizes.on_device == n_vocab * 256 // 32 * 18  # the embeddings, in Q4_0


def test_another_card_has_its_own_weights_and_pool(tmp_path: Path) -> None:
    states, task = tmp_path / "states.jsonl", tmp_path / "tools.jsonl"
    where = {"settings": {"budget": 36_864, "reserve": 16_384}}
    used = {"system": "no drafts", "in use on the GPU MiB": 16_600.0, "KV MiB": 1768.0}
    write_jsonl(states, [where, {"what": "memory", **used}, {"what": "else"}])
    grown = [{"system": "kvmem", "gpu_bytes": n << 20} for n in (16_000, 16_009, 16_005)]
    write_jsonl(task, [where, *grown])
    rows = {(r["weights"], r["budget"]): r["MiB"] for r in card.rows(card.load(states, task))}
    assert rows["IQ4_XS", 36_864] == 16_609
    # of 53,248 cells 32,768 are kept
    assert rows["IQ4_XS", 24_576] == 16_609 - 1768 + 1768 * 32_768 // 53_248
    smaller = (shape27b.sizes(Q.IQ4_XS).all - shape27b.sizes(Q.IQ3_S).all) / (1 << 20)
    assert rows["IQ3_S", 36_864] == pytest.approx(16_609 - smaller, abs=1)


def test_the_page_has_what_is_computed_from_the_kept_rows(root: Path) -> None:
    kept = root / "bench/results"
    measured = card.load(
        kept / "states-27b-h200-2026-12-01.jsonl", kept / "agent-27b-h200-2026-11-30.jsonl"
    )
    computed = {
        (row["weights"], f"{row['budget']:,} + {row['reserve']:,}", row["drafts"]): row["MiB"]
        for row in card.rows(measured)
    }
    lines = (root / "docs/gpu.md").read_text().splitlines()
    shown = [line[2:].split(" | ") for line in lines if line.startswith(("| IQ4_XS", "| IQ3_S"))]
    assert len(shown) == 9
    for weights, cells, rolled_back, n_mib, fits in shown:
        needed = computed[weights, cells, rolled_back]
        assert int(n_mib.split()[0].replace(",", "")) == needed
        assert fits.startswith("no") == (needed > 16_384)
