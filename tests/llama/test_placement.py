"""Cells chosen from outside: batches that do not fit, and contexts that must stay stock."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engines import random_tokens

from kvmem.engine.prompt import text_positions
from kvmem.errors import CapacityError, DecodeError, ModelError, StateError
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama.context import Context
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model

BLOCK = 32
N_BUDGET = 4


@contextmanager
def pool(path: Path, ubatch: int) -> Iterator[tuple[Context, LlamaPort, WorkingSet]]:
    with (
        Model(path) as model,
        Context(
            model, n_ctx=2048, n_cells=(N_BUDGET + 1) * BLOCK, block_tokens=BLOCK,
            n_batch=512, n_ubatch=ubatch,
        ) as context,
    ):  # fmt: skip
        port = LlamaPort(context)
        working_set = WorkingSet(
            port, block_tokens=BLOCK, budget_blocks=N_BUDGET, reserve_blocks=1, slack_blocks=0,
            budget=HostBudget(1 << 24),
        )  # fmt: skip
        yield context, port, working_set
        del working_set


def read(context: Context, working_set: WorkingSet, n_tokens: int) -> np.ndarray:
    start = working_set.n_tokens
    tokens = np.array(random_tokens(n_tokens, seed=start), np.int32)
    pos = text_positions(start, start + n_tokens)
    working_set.prepare(n_tokens)
    context.decode(tokens, np.ascontiguousarray(pos[:, 0]))
    working_set.commit(tokens, pos)
    return context.logits()


@pytest.mark.parametrize("ubatch", [7, 20, 32, 50, 512])
def test_a_batch_beyond_the_free_cells_is_refused_before_it_runs(
    ubatch: int, tiny_llama: Path
) -> None:
    """llama.cpp places all ubatches of a call before it computes the first: all or nothing."""
    with pool(tiny_llama, ubatch) as (context, port, working_set):
        read(context, working_set, 70)
        with pytest.raises(CapacityError, match="59 tokens"):
            working_set.prepare(59)  # 26 in the open block, one block of 32
        assert (working_set.room(), port.n_cells_used) == (58, 70)

        # and where llama.cpp is given more tokens than it was told cells for
        working_set.prepare(58)
        more = np.array(random_tokens(120), np.int32)
        with pytest.raises(DecodeError, match="no free cells"):
            context.decode(more, np.arange(70, 190, dtype=np.int32))
        working_set.rollback()
        assert port.n_cells_used == 70
        working_set.check()

        after = read(context, working_set, 58)
        assert working_set.room() == 0
    with pool(tiny_llama, ubatch) as (context, _, working_set):
        read(context, working_set, 70)
        np.testing.assert_array_equal(read(context, working_set, 58), after)


def is_stock(context: Context, n_ctx: int) -> bool:
    """A stock cache takes n_ctx tokens wherever it likes."""
    with pytest.raises(StateError, match="no placeable memory"):
        LlamaPort(context)
    tokens, pos = np.array(random_tokens(n_ctx), np.int32), np.arange(n_ctx, dtype=np.int32)
    context.decode(tokens, pos)
    return context.seq_pos_max(0) == n_ctx - 1


def test_contexts_after_a_tiered_one_are_stock(tiny_llama: Path, tiny_gemma3: Path) -> None:
    """The factory is armed for one context, and disarmed however that one ends."""
    with Model(tiny_llama) as model, Model(tiny_gemma3) as refused:
        for _ in range(3):
            with Context(model, n_ctx=512, n_cells=64, block_tokens=BLOCK) as tiered:
                assert LlamaPort(tiered).n_slots == 2
                with Context(model, n_ctx=256) as stock:
                    assert is_stock(stock, 256)
            with pytest.raises(ModelError):
                Context(refused, n_ctx=512, n_cells=64, block_tokens=BLOCK)
            with Context(model, n_ctx=256) as stock:
                assert is_stock(stock, 256)


def test_contexts_of_other_threads_are_stock_meanwhile(tiny_llama: Path) -> None:
    """The factory belongs to the thread that armed it."""
    n_rounds = 30
    faults: list[BaseException] = []
    begin = threading.Barrier(2)

    def make_stock() -> None:
        try:
            with Model(tiny_llama) as model:
                begin.wait()
                for _ in range(n_rounds):
                    with Context(model, n_ctx=256) as stock:
                        assert is_stock(stock, 256)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=make_stock)
    thread.start()
    with Model(tiny_llama) as model:
        begin.wait()
        for _ in range(n_rounds):
            with Context(model, n_ctx=512, n_cells=64, block_tokens=BLOCK) as tiered:
                assert LlamaPort(tiered).n_slots == 2
    thread.join()
    assert faults == []


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory, root: Path) -> ctypes.CDLL:
    """llama.cpp's fitting of parameters over our libraries, compiled for this."""
    compiler, tree = shutil.which(os.environ.get("CXX", "c++")), root / "vendor" / "llama.cpp"
    if compiler is None or not (tree / "common").is_dir():
        pytest.skip("needs a C++ compiler and vendor/llama.cpp; scripts/vendor-llama fetches it")
    lib = library().parent
    target = tmp_path_factory.mktemp("fitting") / "autofit.so"
    sources = (Path(__file__).with_name("autofit.cpp"), tree / "common/fit.cpp",
               tree / "common/json.cpp")  # fmt: skip
    folders = [f"-I{tree / name}" for name in ("common", "include", "ggml/include", "vendor")]
    libraries = ("-lkvmem-llama", "-lkvmem-ggml", "-lkvmem-ggml-base", f"-Wl,-rpath,{lib}")
    subprocess.run(
        [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", *folders,
         "-o", target, *sources, f"-L{lib}", *libraries],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(target))


def library() -> Path:
    """libkvmem-llama as this process has mapped it."""
    with open("/proc/self/maps") as maps:
        return next(Path(line.split()[-1]) for line in maps if "libkvmem-llama.so" in line)


@pytest.mark.slow
def test_the_fitting_of_parameters_never_meets_the_factory(
    fitting: ctypes.CDLL, tiny_llama: Path, tiny_gemma3: Path
) -> None:
    """common_fit_params makes contexts of its own, here in the thread that arms the factory."""
    path = str(tiny_llama).encode()
    assert fitting.fit(path) == 0
    with Model(tiny_llama) as model, Model(tiny_gemma3) as refused:
        with Context(model, n_ctx=512, n_cells=64, block_tokens=BLOCK):
            assert fitting.fit(path) == 0
        with pytest.raises(ModelError):
            Context(refused, n_ctx=512, n_cells=64, block_tokens=BLOCK)
        assert fitting.fit(path) == 0
        with Context(model, n_ctx=256) as stock:
            assert is_stock(stock, 256)
        # the control: a factory that is left armed is asked, and the fitting fails
        assert fitting.fit_while_armed(path) > 0
