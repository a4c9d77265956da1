"""Plots of a recall run, as SVG. Needs matplotlib (`kvmem[bench]`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmem.bench.details import N_DEPTHS
from kvmem.bench.quality import Record
from kvmem.bench.summary import REFERENCES, Row, Size, summarise
from kvmem.errors import ConfigError

__all__ = ["budgets", "draw", "values"]

HEAT: Final = ("fused* @first", "fused @first", "heads* @first", "heads @first", "recency")
"""The first of these that was measured is drawn by depth and length."""


DRAWN: Final = (("gold_recall", "gold recall"), ("kle", "KLE"))


def draw(found: Sequence[tuple[str, Record]], folder: Path) -> Iterator[Path]:
    """Write `recall.svg`, `kle.svg` (by policy and cell), `depth.svg` (depth and cell), and
    `budget.svg` where one length has several budgets.

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
    for name, label in DRAWN:
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        policies = list(dict.fromkeys(record.policy for _, record in found))
        for shift, cell in enumerate(cells):
            at = np.arange(len(policies)) + shift / (len(cells) + 1)
            width = values(rows[cell], policies, name)
            axes.barh(at, width, height=1 / (len(cells) + 1), label=cell)
        axes.set_yticks(range(len(policies)), policies)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.legend()
        yield _save(figure, folder / f"{name.split('_')[-1]}.svg")
    lengths = budgets(found)
    if lengths:
        figure = Figure(figsize=(10, 5), layout="constrained")
        yield _save(_by_budget(figure, lengths), folder / "budget.svg")
    measured = {record.policy for _, record in found}
    policy = next((name for name in HEAT if name in measured), None)
    if policy is not None:
        figure = Figure(figsize=(8, 1.5 + 0.5 * len(cells)), layout="constrained")
        yield _save(_heat(figure, found, cells, policy), folder / "depth.svg")


def values(rows: Sequence[Row], policies: Sequence[str], name: str) -> list[float]:
    """Of each policy the number of that name, or the mean of its interval; NaN: not measured."""
    of = {row.policy: getattr(row, name) for row in rows}
    found = [of.get(policy, np.nan) for policy in policies]
    return [float(getattr(value, "mean", value)) for value in found]


def budgets(found: Sequence[tuple[str, Record]]) -> dict[str, dict[int, list[Row]]]:
    """Of each length with several budgets, all generators together, the rows by budget."""
    by_size: dict[Size, list[Record]] = {}
    for cell, record in found:
        if (size := Size.of(cell)) is not None:
            by_size.setdefault(size, []).append(record)
    lengths: dict[str, dict[int, list[Row]]] = {}
    for size in sorted(by_size):
        name = f"{size.n_tokens} tokens in units of {size.block_tokens}"
        lengths.setdefault(name, {})[size.budget_tokens] = summarise(by_size[size])
    return {name: rows for name, rows in lengths.items() if len(rows) > 1}


def _by_budget(figure: Any, lengths: Mapping[str, Mapping[int, Sequence[Row]]]) -> Any:
    """Gold recall and KLE by budget: a line for each policy and length."""
    for axes, (name, label) in zip(figure.subplots(1, 2), DRAWN, strict=True):
        for length, rows in lengths.items():
            policies = [
                policy
                for policy in dict.fromkeys(row.policy for each in rows.values() for row in each)
                if policy not in REFERENCES
            ]
            lines = np.array([values(each, policies, name) for each in rows.values()])
            for policy, line in zip(policies, lines.T, strict=True):
                axes.plot(list(rows), line, marker="o", label=f"{policy}, {length}")
        axes.set_xlabel("budget, tokens")
        axes.set_ylabel(label)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


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
