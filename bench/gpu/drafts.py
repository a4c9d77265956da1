"""Drafts on a GPU: what a step costs and gains, with snapshots and with replay; what a state costs
to save and to put back; how long a request reads on when it is cancelled.

    python bench/gpu/drafts.py model.gguf --out drafts.jsonl
    python bench/gpu/drafts.py model.gguf --alone --tokens 8192 --repeats 0    without the replies

Random weights accept next to nothing, and a trained model accepts most: here the share is set, so
that both ends are timed. The proposals, the batch that verifies them and what is taken back are
real. The engines lie on the GPU at the same time and take turns; with --alone one follows another,
and what is in use on the GPU is that of one engine.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvmem.bench.asking import ask, read_in_pieces
from kvmem.bench.record import environment, gpu_used_bytes, json_line
from kvmem.bench.speed import make_text
from kvmem.config import DraftConfig, DraftState, EngineConfig, MemoryConfig, ModelConfig
from kvmem.engine import decode
from kvmem.engine.draft import Worth
from kvmem.engine.engine import Engine
from kvmem.engine.prompt import Prompt, Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.stats import RequestStats
from kvmem.errors import Cancelled
from kvmem.kv.port import HostMemory
from kvmem.llama.context import CancelToken
from kvmem.llama.state import restore_state, save_state, state_bytes

Row = dict[str, Any]

QUESTION_TOKENS = 64
N_DRAFTS = 3
BATCH_TOKENS, UBATCH_TOKENS = 2048, 512
STATES: tuple[DraftState | None, ...] = (None, "snapshots", "replay")
ACCEPTED = (0, 1, 2, 3)


class _Forced(decode._Reply):  # noqa: SLF001, the one place that knows what was accepted
    """Accepts the first `accepted` proposals of a step, whatever they are. Each row is sampled as
    always.
    """

    accepted = 0

    def _accept(self, drafts: list[int]) -> list[int]:
        n = min(self.accepted, len(drafts))
        sampled = [self.sample(row) for row in range(n + 1)]
        self._stats.draft_n += len(drafts)
        self._stats.draft_n_accepted += n
        return [*drafts[:n], sampled[-1]]


def configure(arguments: argparse.Namespace, state: DraftState | None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path=arguments.model, n_gpu_layers=arguments.n_gpu_layers, n_threads=arguments.threads
        ),
        memory=MemoryConfig(
            workspace_tokens=2 * arguments.tokens,
            budget_tokens=arguments.budget,
            reserve_tokens=arguments.reserve,
            block_tokens=arguments.block,
            batch_tokens=BATCH_TOKENS,
            ubatch_tokens=UBATCH_TOKENS,
            type_k="q8_0",
            type_v="q8_0",
        ),
        draft=DraftConfig(spec_type="draft-mtp", n_max=N_DRAFTS, state=state)
        if state
        else DraftConfig(),
    )


class System:
    """An engine behind a history."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.engine = engine
        self.session = engine.session()
        text = make_text(engine, tokens + QUESTION_TOKENS)
        self.history, self.question = text[:tokens], text[tokens:]
        self.read_per_s = tokens / read_in_pieces(self.session, self.history)
        self.session.tiered.save_checkpoint()  # each request begins here

    def reply(self, n_tokens: int) -> RequestStats:
        drafter = self.session.tiered.drafter
        if drafter is not None:
            drafter.worth = Worth()  # drafts that lose are to be timed, too
        tokens = (*self.history.tolist(), *self.question.tolist())
        prompt = Prompt(tokens=tokens, query_span=Span(len(self.history), len(tokens)))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        params = GenerateParams(sampling=sampling, max_tokens=n_tokens)
        stats = ask(self.session, prompt, params).stats
        self.session.truncate(len(self.history))
        return stats


Stats = dict[tuple[str, int], list[RequestStats]]
"""By the system's name and the accepted drafts of a step."""


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    stats: Stats = {}
    groups = [(state,) for state in STATES] if arguments.alone else [STATES]
    for group in groups:
        with ExitStack() as stack:
            systems: dict[str, System] = {}
            for state in group:
                before = gpu_used_bytes()
                engine = stack.enter_context(Engine(configure(arguments, state)))
                name: str = state or "no drafts"
                systems[name] = System(engine, arguments.tokens)
                kv_bytes, state_bytes_ = engine.tiered.port.device_bytes()
                used = gpu_used_bytes()
                yield {
                    "what": "memory",
                    "system": name,
                    "all MiB": (used - before) / 2**20,
                    "in use on the GPU MiB": used / 2**20,
                    "KV MiB": kv_bytes / 2**20,
                    "recurrent MiB": state_bytes_ / 2**20,
                    "prefill t/s": systems[name].read_per_s,
                }
            yield from states(systems)
            if "no drafts" in systems:
                yield cancels("no drafts", systems["no drafts"])
            if arguments.repeats:
                play(systems, arguments.reply, arguments.repeats, stats)
    yield from replies(stats, arguments.reply)


def cancels(name: str, system: System, repeats: int = 10) -> Row:
    """From a cancel, at any point of a batch that is read, to the session's being free again."""
    text = make_text(system.engine, BATCH_TOKENS * 3)
    session, start = system.session, len(system.history)
    started = time.perf_counter()
    session.read(text[:BATCH_TOKENS])
    batch_s = time.perf_counter() - started
    session.truncate(start)
    waits = []
    for turn in range(repeats):
        token, asked = CancelToken(), 0.0

        def ask(token: CancelToken = token) -> None:
            nonlocal asked
            asked = time.perf_counter()
            token.set()

        timer = threading.Timer(batch_s * (0.2 + turn / repeats), ask)
        timer.start()
        try:
            while True:  # it may read faster than before
                session.read(text, cancel=token)
                session.truncate(start)
        except Cancelled:
            waits.append(time.perf_counter() - asked)
        timer.join()
        session.truncate(start)
    return {
        "what": f"cancel while {BATCH_TOKENS} tokens are read at a time",
        "system": name,
        "ms": 1e3 * statistics.median(waits),
        "slowest ms": 1e3 * max(waits),
        "ms of the batch": 1e3 * batch_s,
        "n": len(waits),
    }


def states(systems: dict[str, System], repeats: int = 9) -> Iterator[Row]:
    """A recurrent state to the host and back, as checkpoints have it, and to a device copy."""
    for name, system in systems.items():
        memory = system.engine.tiered
        for on_device in (False, True):
            before = gpu_used_bytes()
            n_bytes = state_bytes(memory.context, on_device=on_device)
            state = np.asarray(memoryview(HostMemory(memory.port, n_bytes)))
            save = partial(save_state, memory.context, state, on_device=on_device)
            restore = partial(
                restore_state, memory.context, state, memory.n_tokens, on_device=on_device
            )
            for what, move in (("save", save), ("restore", restore)):
                seconds = []
                for _ in range(repeats):
                    started = time.perf_counter()
                    move()
                    seconds.append(time.perf_counter() - started)
                yield {
                    "what": f"{what} a state",
                    "system": name,
                    "kept on": "device" if on_device else "host",
                    "host MiB": n_bytes / 2**20,
                    "GPU MiB": (gpu_used_bytes() - before) / 2**20,
                    "ms": 1e3 * statistics.median(seconds),
                    "n": repeats,
                }


def play(systems: dict[str, System], n_tokens: int, repeats: int, stats: Stats) -> None:
    """Replies with every share of accepted drafts, each system in its turn."""
    for turn in range(repeats + 1):
        for name, system in systems.items():
            for accepted in ACCEPTED if name != "no drafts" else (0,):
                _Forced.accepted = accepted
                one = system.reply(n_tokens)
                if turn:  # the first round builds graphs
                    stats.setdefault((name, accepted), []).append(one)


def replies(stats: Stats, n_tokens: int) -> Iterator[Row]:
    if not stats:
        return
    plain = statistics.median(map(_per_s, stats["no drafts", 0]))
    for (name, accepted), measured in stats.items():
        rate = statistics.median(map(_per_s, measured))
        yield {
            "what": "reply",
            "system": name,
            "accepted of a step": accepted,
            "t/s": rate,
            "of no drafts": rate / plain,
            "ms a step": 1e3 * (accepted + 1) / rate,
            "ms of the head": 1e3
            * statistics.median(m.memory.times.draft_s for m in measured)
            * (accepted + 1)
            / (n_tokens - 1),
            "n": len(measured),
        }


def _per_s(stats: RequestStats) -> float:
    return (stats.completion_tokens - 1) / stats.decode_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=49_152, help="tokens of the history")
    parser.add_argument("--budget", type=int, default=36_864)
    parser.add_argument("--reserve", type=int, default=16_384)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--reply", type=int, default=97, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=5, help="0: no replies")
    parser.add_argument("-t", "--threads", type=int, help="left out: all cores")
    parser.add_argument("--alone", action="store_true", help="one engine at a time")
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, default=-1)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    decode._Reply = _Forced  # type: ignore[misc]  # noqa: SLF001
    where = environment(arguments.model, vars(arguments), "drafts")
    keep(arguments.out, where)
    for row in run(arguments):
        keep(arguments.out, {"experiment": "drafts", **row})
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        print(shown, flush=True)


def keep(path: Path | None, row: Row) -> None:
    if path:
        with path.open("a") as file:
            file.write(json_line(row) + "\n")


if __name__ == "__main__":
    main()
