"""`kvmem bench turns`: what a session of many questions recalls, brings back and moves."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from kvmem.bench.record import environment
from kvmem.bench.report import turn_table
from kvmem.bench.turns import TurnSpec, run_turns, summarise_turns
from kvmem.cli.bench_frame import measure, show
from kvmem.cli.bench_options import (
    Block,
    Budget,
    Calibration,
    Generator,
    Json,
    KvDtype,
    Layers,
    Model,
    Out,
    Seed,
    Threads,
    model_or_demo,
)
from kvmem.config import Scorer

__all__ = ["turns"]


def turns(
    model: Model = None,
    generator: Generator = "harbor",
    tokens: Annotated[int, Option(help="Length of each history.")] = 3072,
    prompts: Annotated[int, Option(help="Histories, a session each.")] = 2,
    turns: Annotated[int, Option(help="Questions of a session; eight different ones.")] = 16,
    seed: Seed = 0,
    budget: Budget = 512,
    block: Block = 32,
    reply: Annotated[int, Option(help="Tokens of a reply at most.")] = 16,
    kv_dtype: KvDtype = "q8_0",
    scorer: Annotated[Scorer, Option("--kvmem-scorer", help="The scorer.")] = "fused",
    calibration: Calibration = "auto",
    threads: Threads = 0,
    n_gpu_layers: Layers = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Ask many questions in one session: what leaves, what comes back, what is moved for it."""
    spec = TurnSpec(
        model=model_or_demo(model),
        generator=generator,
        n_tokens=tokens,
        n_prompts=prompts,
        n_turns=turns,
        first_seed=seed,
        budget_tokens=budget,
        block_tokens=block,
        reply_tokens=reply,
        kv_type=kv_dtype,
        scorer=scorer,
        calibration=calibration,
        n_threads=threads or None,
        n_gpu_layers=n_gpu_layers,
    )
    where = environment(spec.model, asdict(spec), "turns")
    records = measure(out, where, lambda report: run_turns(spec, report=report))
    rows = summarise_turns(records)
    title = (
        f"{spec.model.name}, {tokens} tokens x {prompts} ({generator}), budget {budget} in units "
        f"of {block}, {turns} turns each"
    )
    tables = (turn_table(rows, title),)
    show(as_json, where, lambda: {"rows": [asdict(row) for row in rows]}, None, tables)
