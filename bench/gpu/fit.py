"""A start on a smaller card: the rest of this GPU is taken first, and then a model is started with
the sizes that kvmem chooses.

    python bench/gpu/fit.py model.gguf --card-gib 16 --out fit.jsonl

For each configuration one record: what the plan counted, what was free at every stage, whether a
retry was needed, and the speed of a history that fills the pool. Nothing is modelled but the card.
"""

import argparse
import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from kvmem.bench.record import environment, json_line, write_jsonl
from kvmem.cli.plan import make_plan
from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig, SpecType
from kvmem.engine.engine import Engine
from kvmem.errors import KvmemError
from kvmem.llama import runtime

MIB = 1 << 20
CHUNK = 512 * MIB


def free_by_gpu() -> list[int]:
    return [gpu.free_bytes for gpu in runtime.gpus()]


def free_bytes() -> int:
    return sum(free_by_gpu())


@contextmanager
def card(gib: float) -> Iterator[None]:
    """Take memory of the one GPU until this much is left free."""
    free_bytes()  # makes CUDA's own context, which a card of any size pays for
    mapped = Path("/proc/self/maps").read_text().split()
    name = next((word for word in mapped if "/libcudart" in word), "libcudart.so")
    cuda = ctypes.CDLL(name)
    taken: list[ctypes.c_void_p] = []
    try:
        while (rest := free_bytes() - int(gib * 1024) * MIB) > 0:
            pointer = ctypes.c_void_p()
            if cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(min(rest, CHUNK))):
                raise RuntimeError(f"{rest // MIB} MiB more than {gib} GiB are left on this GPU")
            taken.append(pointer)
        yield
    finally:
        for pointer in taken:
            cuda.cudaFree(pointer)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(config: EngineConfig) -> dict[str, Any]:
    """Start it, fill its pool, decode; what was free on the way."""
    said = _Lines()
    logging.getLogger("kvmem").addHandler(said)
    row: dict[str, Any] = {"free MiB": free_bytes() // MIB}
    try:
        plan = make_plan(config)
        row["planned pool"] = plan.sizes.pool_tokens
        started = time.perf_counter()
        with Engine(config) as engine:
            row["start s"] = time.perf_counter() - started
            row["pool"] = engine.sizes.pool_tokens
            row["budget"] = engine.sizes.budget_tokens
            row["places"] = [asdict(place) for place in engine.facts.places]
            row["shares"] = [share._asdict() for share in engine.tiered.context.shares()]
            row["free MiB, started"] = free_bytes() // MIB
            session = engine.session()
            n_tokens = min(engine.sizes.pool_tokens + 4096, engine.n_ctx)
            tokens = np.random.default_rng(0).integers(0, 256, n_tokens)
            started = time.perf_counter()
            session.read(tokens.astype(np.int32))
            row["read t/s"] = len(tokens) / (time.perf_counter() - started)
            row["free MiB, pool full"] = free_bytes() // MIB
            row["transfer"] = engine.tiered.port.transfer
    except KvmemError as error:
        row["error"] = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("kvmem").removeHandler(said)
    row["said"] = said.lines
    return row


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--card-gib", type=float, default=16.0, help="what the card has free")
    parser.add_argument("-c", "--ctx-size", type=int, default=262144)
    parser.add_argument("-t", "--threads", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if (n_gpus := len(free_by_gpu())) != 1:
        parser.error(f"kvmem sees {n_gpus} GPUs here, but must see one (CUDA_VISIBLE_DEVICES)")
    rows: list[dict[str, Any]] = [environment(arguments.model, vars(arguments), "fit")]
    model = ModelConfig(path=arguments.model, n_threads=arguments.threads)
    memory = MemoryConfig(workspace_tokens=arguments.ctx_size)
    for spec_type in get_args(SpecType):
        draft = DraftConfig(spec_type=spec_type)
        with card(arguments.card_gib):
            row = start(EngineConfig(model=model, memory=memory, draft=draft))
        rows.append({"experiment": "fit", "what": spec_type, **row})
        print(json_line(rows[-1]), flush=True)
    if arguments.out is not None:
        write_jsonl(arguments.out, rows)


if __name__ == "__main__":
    main()
