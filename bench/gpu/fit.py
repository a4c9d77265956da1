"""A start on a smaller card: the rest of this GPU is taken first, and then a model is started with
the sizes that kvmem chooses. What is in use before, CUDA's own, is the card's, too.

    python bench/gpu/fit.py model.gguf --card-gib 16 --out fit.jsonl

For each configuration one record: what the plan counted, what was free at every stage, whether a
retry was needed, and the speed of a history that fills the pool. Nothing is modelled but the card:
how much of it is free, and how much it has.
"""

import argparse
import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from kvmem.bench.asking import ask, read_in_pieces
from kvmem.bench.record import environment, json_line, write_jsonl
from kvmem.bench.speed import make_text
from kvmem.cli.plan import make_plan
from kvmem.config import DraftConfig, EngineConfig, MemoryConfig, ModelConfig, SpecType
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.errors import KvmemError
from kvmem.llama import runtime
from kvmem.llama.context import Share, shares_of

MIB = 1 << 20
CHUNK = 512 * MIB
ASKED_TOKENS = 64
"""Of the question behind a full pool, and of its reply."""


def free_by_gpu() -> list[int]:
    return [gpu.free_bytes for gpu in runtime.gpus()]


def free_bytes() -> int:
    return sum(free_by_gpu())


@contextmanager
def card(gib: float) -> Iterator[None]:
    """Take memory of the one GPU until it has no more than a card of this size has, and say so
    where kvmem asks how much it has: an automatic pool leaves a share of that free.
    """
    [gpu] = runtime.gpus()  # makes CUDA's own context, which a card of any size pays for
    free = int(gib * 1024) * MIB - (gpu.total_bytes - gpu.free_bytes)
    mapped = Path("/proc/self/maps").read_text().split()
    name = next((word for word in mapped if "/libcudart" in word), "libcudart.so")
    cuda = ctypes.CDLL(name)
    taken: list[ctypes.c_void_p] = []
    try:
        while (rest := free_bytes() - free) > 0:
            pointer = ctypes.c_void_p()
            if cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(min(rest, CHUNK))):
                raise RuntimeError(f"{rest // MIB} MiB more than {gib} GiB are left on this GPU")
            taken.append(pointer)
        with patch("kvmem.engine.facts.shares_of", partial(_shares, int(gib * 1024) * MIB)):
            yield
    finally:
        for pointer in taken:
            cuda.cudaFree(pointer)


def _shares(card_bytes: int, *args: Any, **kwargs: Any) -> list[Share]:
    """What devices hold and have, where the GPU is that card."""
    shares = shares_of(*args, **kwargs)
    return [share._replace(total=card_bytes) if share.device else share for share in shares]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(config: EngineConfig) -> dict[str, Any]:
    """Start it, fill its pool, ask; what was free on the way."""
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
            row["devices"] = [asdict(device) for device in engine.facts.devices]
            row["shares"] = [share._asdict() for share in engine.tiered.context.shares()]
            row["free MiB, started"] = free_bytes() // MIB
            session = engine.session()
            n_tokens = min(engine.sizes.pool_tokens + 4096, engine.n_ctx - 2 * ASKED_TOKENS)
            text = make_text(engine, n_tokens + ASKED_TOKENS)
            row["read t/s"] = n_tokens / read_in_pieces(session, text[:n_tokens])
            row["free MiB, pool full"] = free_bytes() // MIB
            prompt = Prompt(tokens=text.tolist(), query_span=Span(n_tokens, len(text)))
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            params = GenerateParams(sampling=sampling, max_tokens=ASKED_TOKENS)
            stats = ask(session, prompt, params).stats
            row["decode t/s"] = stats.decode_per_s
            row["blocks in"] = stats.memory.blocks_in
            row["free MiB, answered"] = free_bytes() // MIB
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
    parser.add_argument("--card-gib", type=float, default=16.0, help="what the card has")
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
