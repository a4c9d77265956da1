"""Plots of a recall run, as SVG. Needs matplotlib (`kvmem[bench]`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmem.bench.details import N_DEPTHS
from kvmem.bench.quality import Record
from kvmem.bench.summary import summarise
from kvmem.errors import ConfigError

__all__ = ["draw"]

HEAT: Final = ("fused* @first", "fused @first", "heads* @first", "heads @first", "recency")
"""The first of these that was measured is drawn by depth and length."""


def draw(found: Sequence[tuple[str, Record]], folder: Path) -> Iterator[Path]:
    """Write `recall.svg`, `kle.svg` (by policy and cell) and `depth.svg` (depth and cell).

    found: cell and record. Raises ConfigError: matplotlib is not installed, or nothing was found.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        rule = "used where matplotlib is installed: pip install 'kvmem[bench]'"
        raise ConfigError("plot", folder, rule) from error
    if not found:
        raise ConfigError("plot", folder, "drawn from at least one record")
    folder.mkdir(parents=True, exist_ok=True)
    cells = list(dict.fromkeys(cell for cell, _ in found))
    rows = {cell: summarise([r for c, r in found if c == cell]) for cell in cells}
    for name, label in (("gold_recall", "gold recall"), ("kle", "KLE")):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for shift, cell in enumerate(cells):
            values = [_value(getattr(row, name)) for row in rows[cell]]
            at = np.arange(len(values)) + shift / (len(cells) + 1)
            axes.barh(at, values, height=1 / (len(cells) + 1), label=cell)
        axes.set_yticks(range(len(rows[cells[0]])), [row.policy for row in rows[cells[0]]])
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.legend()
        yield _save(figure, folder / f"{name.split('_')[-1]}.svg")
    policies = {record.policy for _, record in found}
    policy = next((name for name in HEAT if name in policies), None)
    if policy is not None:
        figure = Figure(figsize=(8, 1.5 + 0.5 * len(cells)), layout="constrained")
        yield _save(_heat(figure, found, cells, policy), folder / "depth.svg")


def _value(value: Any) -> float:
    """The mean of an interval, or the number itself."""
    return float(getattr(value, "mean", value))


def _heat(figure: Any, found: Sequence[tuple[str, Record]], cells: list[str], policy: str) -> Any:
    """Gold recall by depth of the evidence, one line a cell."""
    grid = np.full((len(cells), N_DEPTHS), np.nan)
    for row, cell in enumerate(cells):
        own = [r for c, r in found if c == cell and r.policy == policy]
        for depth in range(N_DEPTHS):
            inside = [r.gold_recall for r in own if int(r.depth * N_DEPTHS) == depth]
            if inside:
                grid[row, depth] = np.mean(inside)
    axes = figure.subplots()
    image = axes.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(cells)), cells)
    names = [f"{100 * i // N_DEPTHS}-{100 * (i + 1) // N_DEPTHS} %" for i in range(N_DEPTHS)]
    axes.set_xticks(range(N_DEPTHS), names)
    axes.set_title(f"gold recall by depth, {policy}")
    figure.colorbar(image, ax=axes)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path
