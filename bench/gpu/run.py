"""All GPU figures of docs/gpu.md: the model, and every measurement as a process of its own.

    python bench/gpu/run.py FOLDER                 everything, some 25 minutes on an H200
    python bench/gpu/run.py FOLDER speed tools     these alone, in this order
    python bench/gpu/run.py FOLDER --list          what there is
    python bench/gpu/run.py FOLDER --size 16g      what fits a card of 16 GB

Each writes FOLDER/NAME.jsonl and FOLDER/NAME.log, and draws what there is to draw where matplotlib
is installed; --aside names another folder for logs and pictures. kvmem must be built with CUDA
(`scripts/build-cuda`); the tests want pytest-xdist.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
GPU_TESTS = ["tests/llama", "tests/differential", "tests/cli/test_plan_bytes.py"]
GPU_TESTS += ["tests/engine/test_allocations.py", "tests/engine/test_fit.py"]
GPU_TESTS += ["tests/engine/test_device_checkpoint.py"]
SEPARATE = ("transfers", "states", "tools-stock")
"""What is measured among others; run by name alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a card holds.

    layers: of the model's shape; 64 are the 27B's. depths: of `speed`, the first within the budget.
    alone: the card holds one system at a time. tokens, rounds: of the tool task. far: tokens of the
    synthetic histories.
    """

    layers: int
    depths: tuple[int, ...]
    alone: bool
    tokens: int
    rounds: int
    far: int

    @property
    def model(self) -> str:
        return "27b-shape.gguf" if self.layers == 64 else f"{self.layers}-layers-shape.gguf"


SIZES = {
    "h200": Size(
        layers=64,
        depths=(32_768, 131_072, 258_048),
        alone=False,
        tokens=262_144,
        rounds=32,
        far=258_048,
    ),
    "24g": Size(
        layers=64, depths=(32_768, 131_072), alone=True, tokens=131_072, rounds=16, far=131_072
    ),
    "16g": Size(
        layers=32, depths=(32_768, 131_072), alone=True, tokens=131_072, rounds=16, far=131_072
    ),
}
BUDGET, RESERVE, WINDOW = 36_864, 16_384, 38_912
POOL = ["--kvmem-gen-reserve", str(RESERVE), "--kvmem-block-tokens", "128", "-b", "2048"]
CHAT = ["--task", "chat", "--tokens", "24576", "--rounds", "4", "--reply", "256"]
CHAT += ["--kvmem-budget", str(BUDGET), *POOL]
DRAFTS = ["--spec-draft-n-max", "3"]


def commands(size: Size, model: str, out: Path, aside: Path, threads: str) -> dict[str, list[str]]:
    """What is run, by name."""

    def record(name: str) -> list[str]:
        return ["--out", str(out / f"{name}.jsonl")]

    def bench(name: str, *arguments: str) -> list[str]:
        plots = ["--plots", str(aside / f"{name}.png")] if find_spec("matplotlib") else []
        common = ["-m", model, "-ngl", "-1", "-t", threads, *record(name), *plots]
        return ["-m", "kvmem", "bench", *arguments, *common]

    def experiments(name: str, *names: str) -> list[str]:
        far = ["--far", str(size.far)]
        return [str(HERE / "experiments.py"), model, *names, *far, *record(name)]

    drafts = [str(HERE / "drafts.py"), model, "-t", threads]
    alone = ["--alone"] * size.alone
    speed = ["--pool-tokens", str(BUDGET + RESERVE), "--window-tokens", str(WINDOW), *alone]
    for depth in size.depths:
        speed += ["--depth", str(depth)]
    speed += ["--prefill", "2048", "--decode", "48", *POOL]
    tools = ["--task", "tools", "--tokens", str(size.tokens), "--rounds", str(size.rounds)]
    tools += ["--reply", "64", "--kvmem-budget", str(BUDGET), *POOL]
    n_workers = str(max(1, (os.cpu_count() or 1) - 2))
    scoring_threads = sorted({"1", "2", threads}, key=int)
    return {
        "model": [str(HERE / "shape27b.py"), model, "--layers", str(size.layers)],
        "tests": ["-m", "pytest", "-q", "-m", "gpu", "-n", n_workers, *GPU_TESTS],
        "scoring": [
            str(HERE.parent / "micro" / "scoring.py"),
            *("--threads", *scoring_threads),
            *record("scoring"),
        ],
        "fit": [str(HERE / "fit.py"), model, "-t", threads, *record("fit")],
        "drafts": [*drafts, *alone, *record("drafts")],
        "states": [*drafts, "--alone", *("--tokens", "8192", "--repeats", "0"), *record("states")],
        "experiments": experiments("experiments"),
        "transfers": experiments("transfers", "transfers"),
        "speed": bench("speed", "speed", *speed),
        "chat": bench("chat", "agent", *CHAT, "--stock"),
        "chat-drafts": bench("chat-drafts", "agent", *CHAT, *DRAFTS),
        "tools": bench("tools", "agent", *tools),
        "tools-drafts": bench("tools-drafts", "agent", *tools, *DRAFTS),
        "tools-stock": bench("tools-stock", "agent", *tools, "--stock"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--model", type=Path, help="a model that is there; left out: written")
    parser.add_argument("--size", choices=SIZES, default="h200", help="of the card")
    parser.add_argument("--aside", type=Path, help="for logs and pictures; left out: FOLDER")
    parser.add_argument("--gpu", help="the only GPU that is seen, by number; left out: all")
    parser.add_argument("--threads", default=str(min(16, os.cpu_count() or 1)))
    parser.add_argument("--list", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    model = arguments.model or arguments.folder / size.model
    aside = arguments.aside or arguments.folder
    steps = commands(size, str(model), arguments.folder, aside, arguments.threads)
    unknown = [name for name in arguments.names if name not in steps]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(steps)}")
    names = arguments.names or [n for n in steps if n not in SEPARATE]
    if "model" not in names and not set(names) <= {"tests", "scoring"} and not model.exists():
        names = ["model", *names]
    if model.exists():
        names = [name for name in names if name != "model"]
    if arguments.list:
        for name in names:
            print(f"{name:12} python {' '.join(steps[name])}")
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    aside.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if arguments.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = arguments.gpu
    failed = [name for name in names if not run(name, steps[name], aside, environment)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, command: list[str], folder: Path, environment: dict[str, str]) -> bool:
    """Run one; its output goes to its log, and the end of that to the terminal."""
    started = time.perf_counter()
    log = folder / f"{name}.log"
    with log.open("w") as file:
        status = subprocess.run(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        ).returncode
    print(f"{name}: {'failed' if status else 'done'} in {time.perf_counter() - started:.0f} s")
    print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
    return not status


if __name__ == "__main__":
    main()
