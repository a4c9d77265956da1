"""The options that the commands of `kvmem bench`, and the demo, have in common."""

from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

from typer import Option

from kvmem.bench import demo_model
from kvmem.cli.progress import progress
from kvmem.config import KvType
from kvmem.errors import ConfigError

__all__ = [
    "ApiKey",
    "Batch",
    "Block",
    "Budget",
    "Calibration",
    "Generator",
    "Json",
    "KvDtype",
    "Layers",
    "Model",
    "Out",
    "Plots",
    "Seed",
    "Shuffle",
    "Threads",
    "Ubatch",
    "Url",
    "can_be_threads",
    "can_be_written",
    "model_or_demo",
]


def can_be_written(path: Path | None) -> Path | None:
    """The same path. ConfigError, before anything is measured: its file could not be written."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path.parent):
                pass
            if path.is_dir():
                raise IsADirectoryError(EISDIR, "it is a folder")
        except OSError as error:
            rule = f"a file that can be written ({error.strerror})"
            raise ConfigError("out", path, rule) from None
    return path


def can_be_threads(count: int) -> int:
    """The same number. ConfigError: it is below 0, which stands for all cores."""
    if count < 0:
        raise ConfigError("n_threads", count, "at least 1, or 0 for all cores")
    return count


Model = Annotated[
    Path | None, Option("-m", "--model", help="GGUF file. Left out: the demo model, fetched once.")
]
Generator = Annotated[
    Literal["harbor", "office", "agent"], Option(help="Which text generator makes the histories.")
]
Seed = Annotated[int, Option(help="Seed of the first history.")]
Threads = Annotated[
    int, Option("-t", "--threads", help="Threads; 0 for all cores.", callback=can_be_threads)
]
Layers = Annotated[int, Option("-ngl", "--n-gpu-layers", help="Layers on the GPU; -1 for all.")]
KvDtype = Annotated[KvType, Option("--kv-dtype", help="Type of K and V.")]
Budget = Annotated[int, Option("--kvmem-budget", help="Tokens that are visible.")]
Block = Annotated[int, Option("--kvmem-block-tokens", help="Tokens of a block.")]
Batch = Annotated[int, Option("-b", "--batch-size", help="Tokens of a decode call.")]
Ubatch = Annotated[int, Option("-ub", "--ubatch-size", help="Tokens of a graph.")]
Calibration = Annotated[
    str, Option("--kvmem-calibration", help="auto, off, or a file of kvmem calibrate.")
]
Shuffle = Annotated[
    bool, Option("--shuffle", help="Control: mix up what scores the blocks; recall must be lost.")
]
Out = Annotated[
    Path | None,
    Option(
        "-o",
        "--out",
        help="Write raw records to this file as JSON lines.",
        callback=can_be_written,
    ),
]
Plots = Annotated[
    Path | None, Option(help="Draw the run to this file, as .png and as .svg (needs matplotlib).")
]
Url = Annotated[str | None, Option(help="Measure the server at this address instead of a model.")]
ApiKey = Annotated[str | None, Option(help="The server's key.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def model_or_demo(path: Path | None) -> Path:
    """The given file, or the demo model."""
    if path is not None:
        return path
    with progress(unit_bytes=True) as report:
        return demo_model.fetch(report=report)
