"""`kvmem bench turns`: what a session of many questions recalls, brings back and moves."""

from dataclasses import asdict
from typing import Annotated, Literal

from typer import Option

from kvmem.bench.record import environment, json_line, write_jsonl
from kvmem.bench.report import turn_table
from kvmem.bench.turns import TurnSpec, run_turns, summarise_turns
from kvmem.cli.bench_options import (
    Block,
    Budget,
    Json,
    KvDtype,
    Layers,
    Model,
    Out,
    Threads,
    model_or_demo,
)
from kvmem.cli.progress import progress, table_console
from kvmem.config import Scorer

__all__ = ["turns"]


def turns(
    model: Model = None,
    generator: Annotated[
        Literal["harbor", "office", "agent"],
        Option(help="Which text generator makes the histories."),
    ] = "harbor",
    tokens: Annotated[int, Option(help="Length of each history.")] = 3072,
    prompts: Annotated[int, Option(help="Histories, a session each.")] = 2,
    turns: Annotated[int, Option(help="Questions of a session; eight different ones.")] = 16,
    seed: Annotated[int, Option(help="Seed of the first history.")] = 0,
    budget: Budget = 512,
    block: Block = 32,
    reply: Annotated[int, Option(help="Tokens of a reply at most.")] = 16,
    kv_dtype: KvDtype = "q8_0",
    scorer: Annotated[Scorer, Option("--kvmem-scorer", help="The scorer.")] = "fused",
    calibration: Annotated[
        str, Option("--kvmem-calibration", help="auto, off, or a file of kvmem calibrate.")
    ] = "auto",
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
    with progress() as report:
        records = list(run_turns(spec, report=report))
    if out is not None:
        write_jsonl(out, [where, *records])
    rows = summarise_turns(records)
    if as_json:
        print(json_line({**where, "rows": [asdict(row) for row in rows]}))
        return
    title = (
        f"{spec.model.name}, {tokens} tokens x {prompts} ({generator}), budget {budget} in units "
        f"of {block}, {turns} turns each"
    )
    table_console().print(turn_table(rows, title))
