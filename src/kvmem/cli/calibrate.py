"""`kvmem calibrate`: find the attention heads of a model that know where a fact stands."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from kvmem.bench.calibrate import Calibrated, CalibrationSpec, calibrate, discard, store
from kvmem.bench.report import number
from kvmem.cli import logs, show
from kvmem.cli.bench_options import Seed, can_be_written
from kvmem.cli.options import EngineOptions
from kvmem.cli.progress import progress
from kvmem.cli.takes import takes
from kvmem.config import EngineConfig
from kvmem.engine.calibration import CALIBRATED_SCORERS, find
from kvmem.errors import ConfigError

__all__ = ["calibrate_missing", "calibrate_model"]

_log = logging.getLogger(__name__)


@takes(EngineOptions)
def calibrate_model(
    options: EngineOptions,
    generator: Annotated[
        Literal["office", "harbor"],
        Option(help="Which text generator makes the questions. Test with another one."),
    ] = "office",
    questions: Annotated[
        Path | None,
        Option(help="Conversations to use instead: JSON lines, docs/benchmarks.md has the format."),
    ] = None,
    tokens: Annotated[int, Option(help="Length of each history.")] = 2048,
    prompts: Annotated[
        int, Option(help="Histories; each has eleven questions, five of them paraphrased.")
    ] = 8,
    seed: Seed = 1000,
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            help="File to write. Left out: beside the model, or in the cache.",
            callback=can_be_written,
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print an object instead of a table.")] = False,
    verbose: Annotated[bool, Option("-v", "--verbose", help="Log to stderr.")] = False,
) -> int:
    """Pick the few attention heads that find a fact, for this model and these KV types.

    Reads synthetic questions on the model itself, minutes on a CPU; an interrupted run goes on
    where it stopped. The result is stored, and every later start of kvmem with this model uses it.
    """
    logs.set_up(verbose=verbose)
    config = options.config()
    spec = CalibrationSpec(
        model=config.model,
        memory=config.memory,
        generator=generator,
        questions=questions,
        n_tokens=tokens,
        n_prompts=prompts,
        first_seed=seed,
    )
    with progress() as report:
        found = calibrate(spec, report=report)
    path = store(spec, found.calibration, out) if found.is_better else None
    discard(spec, found.calibration)
    if as_json:
        print(json.dumps({**asdict(found.calibration), "path": path and str(path)}))
    else:
        print(_table(found))
    if path is None:
        print("not stored: what scores without it finds more on this model", file=sys.stderr)
        return 1
    print(f"stored in {path}", file=sys.stderr)
    return 0


def calibrate_missing(config: EngineConfig, tell: Callable[[float], object]) -> None:
    """Calibrate before a start, where a calibration would be used and none is found; say what came
    of it, also where it cannot be done. tell: called with how far that is, 0 to 1; it may raise.
    """
    found_already, source = find(config)
    if found_already is not None:
        return
    memory = config.memory
    if not (
        memory.enabled and memory.calibration == "auto" and memory.scorer in CALIBRATED_SCORERS
    ):
        logs.say(f"not calibrated, as it would not be used: calibration {source}")
        return
    spec = CalibrationSpec(model=config.model, memory=config.memory)
    tell(0.0)
    logs.say(f"calibrating {config.model.path}")
    with progress() as report:

        def step(what: str, done: int, total: int) -> None:
            report(what, done, total)
            tell(done / total)

        try:
            found = calibrate(spec, report=step)
        except ConfigError as error:  # its questions do not suit this model; settings were checked
            _log.warning("not calibrated: %s; kvmem calibrate has sizes to change", error)
            return
    logs.say(_table(found))
    if found.is_better:
        logs.say(f"stored in {store(spec, found.calibration)}")
    else:
        logs.say("not stored: what scores without it finds more on this model")
    discard(spec, found.calibration)


def _table(found: Calibrated) -> str:
    picked = found.picked
    pairs = " ".join(f"{layer}:{head}" for layer, head in found.calibration.pairs)
    head = ("heads that score (layer:KV head)", "gold recall, held out", "paraphrased")
    rows = [
        (*head, "bytes a token"),
        (pairs, *_row(picked.recall, picked.paraphrased, found.bytes_per_token)),
        (
            "uncalibrated",
            *_row(picked.recall_whole, picked.paraphrased_whole, found.bytes_per_token_whole),
        ),
    ]
    n = f"{picked.n_questions} questions, {picked.n_groups} histories"
    return show.table(rows, right=(1, 2, 3)) + f"\n{n}; each checked with pairs picked on others"


def _row(recall: float, paraphrased: float, n_bytes: float) -> tuple[str, ...]:
    return number(recall, 3), number(paraphrased, 3), f"{n_bytes:.0f}"
