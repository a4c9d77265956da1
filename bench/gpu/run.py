"""All GPU figures of docs/gpu.md: the model, and every measurement as a process of its own.

    python bench/gpu/run.py FOLDER                 everything, some 25 minutes on an H200
    python bench/gpu/run.py FOLDER speed tools     these alone
    python bench/gpu/run.py FOLDER --list          what there is

Each writes FOLDER/NAME.jsonl and FOLDER/NAME.log. kvmem must be built with CUDA
(`scripts/build-cuda`); the tests want pytest-xdist.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
POOL = ["--kvmem-gen-reserve", "16384", "--kvmem-block-tokens", "128", "-b", "2048"]
GPU_TESTS = ["tests/llama", "tests/differential"]
TOOLS = ["--task", "tools", "--tokens", "262144", "--rounds", "32", "--reply", "64"]
TOOLS += ["--kvmem-budget", "36864", *POOL]
CHAT = ["--task", "chat", "--tokens", "24576", "--rounds", "4", "--reply", "256"]
CHAT += ["--kvmem-budget", "36864", *POOL]
SPEED = ["--depth", "258048", "--pool-tokens", "53248", "--window-tokens", "38912"]
SPEED += ["--prefill", "2048", "--decode", "48", *POOL]


def commands(model: str, out: Path, threads: str) -> dict[str, list[str]]:
    """What is run, by name."""

    def record(name: str) -> list[str]:
        return ["--out", str(out / f"{name}.jsonl")]

    def bench(name: str, *arguments: str) -> list[str]:
        common = ["-m", model, "-ngl", "-1", "-t", threads, *record(name)]
        return ["-m", "kvmem", "bench", *arguments, *common]

    n_workers = str(max(1, (os.cpu_count() or 1) - 2))
    return {
        "model": [str(HERE / "shape27b.py"), model],
        "tests": ["-m", "pytest", "-q", "-m", "gpu", "-n", n_workers, *GPU_TESTS],
        "drafts": [str(HERE / "drafts.py"), model, *record("drafts")],
        "experiments": [str(HERE / "experiments.py"), model, *record("experiments")],
        "transfers": [str(HERE / "experiments.py"), model, "transfers", *record("transfers")],
        "speed": bench("speed", "speed", *SPEED),
        "chat": bench("chat", "agent", *CHAT, "--stock"),
        "chat-drafts": bench("chat-drafts", "agent", *CHAT, "--spec-draft-n-max", "3"),
        "tools": bench("tools", "agent", *TOOLS),
        "tools-drafts": bench("tools-drafts", "agent", *TOOLS, "--spec-draft-n-max", "3"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--model", type=Path, help="a model that is there; left out: written")
    parser.add_argument("--gpu", help="the only GPU that is seen, by number; left out: all")
    parser.add_argument("--threads", default=str(min(16, os.cpu_count() or 1)))
    parser.add_argument("--list", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    model = arguments.model or arguments.folder / "27b-shape.gguf"
    steps = commands(str(model), arguments.folder, arguments.threads)
    unknown = [name for name in arguments.names if name not in steps]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(steps)}")
    names = arguments.names or [n for n in steps if n != "transfers"]  # experiments hold them
    if "model" not in names and names != ["tests"] and not model.exists():
        names = ["model", *names]
    if model.exists():
        names = [name for name in names if name != "model"]
    if arguments.list:
        for name in names:
            print(f"{name:12} python {' '.join(steps[name])}")
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if arguments.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = arguments.gpu
    failed = [name for name in names if not run(name, steps[name], arguments.folder, environment)]
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
