"""Plots of saved runs as PNG and SVG; matplotlib is an optional dependency (`kvmem[bench]`)."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvmem.bench.agent import AgentRecord
from kvmem.bench.speed import SYSTEMS, RequestRecord, SpeedRecord
from kvmem.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_agent", "plot_speed"]

GIB: Final = 1 << 30
HISTORY: Final = "tokens of history"
COLOURS: Final = {
    "kvmem": "#0072b2",
    "stock": "#d55e00",
    "window": "#009e73",
    "server": "#cc79a7",
    "on the device": "#56b4e9",
    "on the host": "#e69f00",
}
"""A system has the same colour everywhere; of Okabe and Ito's, which most people can tell apart."""

Draw = Callable[["Axes"], None]
Points = Mapping[int, Sequence[float]]
"""All values measured at a depth."""


def plot_speed(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord], path: Path, title: str = ""
) -> list[Path]:
    """Prefill, decode, time to the first token and memory, by depth: medians and spread."""
    warm = [r for r in requests if r.kind == "warm" and not r.in_a_row]
    tiered = [r for r in warm if r.system == "kvmem"]

    def rates(phase: str) -> Mapping[str, Points]:
        return {
            system: _by_depth(
                [
                    (r.depth_tokens, r.tokens_per_s)
                    for r in speeds
                    if (r.system, r.phase) == (system, phase) and r.round
                ]
            )
            for system in SYSTEMS
        }

    first_tokens: Mapping[str, Points] = {
        system: _by_depth([(r.depth_tokens, r.first_token_s) for r in warm if r.system == system])
        for system in SYSTEMS
    }
    memory = {
        "on the device": _by_depth([(r.depth_tokens, r.device_bytes / GIB) for r in tiered]),
        "on the host": _by_depth([(r.depth_tokens, r.host_bytes / GIB) for r in tiered]),
    }
    return _save(
        [
            _lines_or_bars("reading behind the history", "tokens/s", rates("prefill")),
            _lines_or_bars("writing behind the history", "tokens/s", rates("decode")),
            _lines_or_bars("first token of one more question", "s", first_tokens),
            _lines_or_bars("memory that kvmem takes for the history", "GiB", memory),
        ],
        path,
        title,
    )


def plot_agent(records: Sequence[AgentRecord], path: Path, title: str = "") -> list[Path]:
    """Prefill, decode, first token and memory by the length of the history, a line each."""
    groups = {
        key: [r for r in records if (r.task, r.system) == key]
        for key in dict.fromkeys((r.task, r.system) for r in records)
    }
    styles = dict(zip(dict.fromkeys(task for task, _ in groups), ("-", "--"), strict=False))

    def lines(what: str, unit: str, values: Mapping[str, Callable[[AgentRecord], object]]) -> Draw:
        def draw(axes: "Axes") -> None:
            for (task, system), group in groups.items():
                for name, value in values.items():
                    points = [(r.prompt_tokens, y) for r in group if (y := value(r))]
                    if points:
                        axes.plot(
                            *zip(*points, strict=True),
                            marker="o",
                            markersize=3,
                            color=COLOURS[system],
                            alpha=0.5 if name == "GPU" else 1,
                            linestyle=styles[task],
                            label=", ".join(filter(None, (system, task, name))),
                        )
            _finish(axes, what, unit)

        return draw

    return _save(
        [
            lines("reading, a round", "tokens/s", {"": lambda r: r.read_tokens / r.prompt_s}),
            lines("writing, a round", "tokens/s", {"": _decode_per_s}),
            lines("first token, a round", "s", {"": lambda r: r.prompt_s}),
            lines(
                "memory of the process",
                "GiB",
                {
                    "RAM": lambda r: r.rss_bytes and r.rss_bytes / GIB,
                    "GPU": lambda r: r.gpu_bytes and r.gpu_bytes / GIB,
                },
            ),
        ],
        path,
        title,
    )


def _decode_per_s(record: AgentRecord) -> float:
    """0 where nothing was said, or a server sent all of it at once."""
    return (record.reply_tokens - 1) / record.decode_s if record.decode_s > 0 else 0.0


def _by_depth(points: Sequence[tuple[int, float]]) -> Points:
    return {x: [y for at, y in points if at == x] for x in sorted({x for x, _ in points})}


def _lines_or_bars(what: str, unit: str, series: Mapping[str, Points]) -> Draw:
    """Lines by depth where there are several; bars of one depth."""
    measured = {name: points for name, points in series.items() if points}
    depths = sorted({depth for points in measured.values() for depth in points})

    def draw_lines(axes: "Axes") -> None:
        for name, points in measured.items():
            middle = [statistics.median(values) for values in points.values()]
            colour = COLOURS[name]
            axes.plot(list(points), middle, marker="o", color=colour, label=name)
            low, high = map(min, points.values()), map(max, points.values())
            axes.fill_between(list(points), list(low), list(high), color=colour, alpha=0.2)
        _finish(axes, what, unit)

    def draw_bars(axes: "Axes") -> None:
        for name, points in measured.items():
            (values,) = points.values()
            middle = statistics.median(values)
            spread = [[middle - min(values)], [max(values) - middle]]
            bars = axes.bar([name], [middle], yerr=spread, capsize=4, color=COLOURS[name])
            said = f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"
            axes.bar_label(bars, [said], label_type="center", color="white", weight="bold")
        axes.set(title=f"{what}\n({depths[0]:,} tokens)", ylabel=unit, ylim=(0, None))
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.1)

    def draw_nothing(axes: "Axes") -> None:
        axes.set(title=what)
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()

    return (draw_nothing, draw_bars, draw_lines)[min(len(depths), 2)]


def _finish(axes: "Axes", what: str, unit: str) -> None:
    from matplotlib.ticker import StrMethodFormatter

    axes.set(title=what, xlabel=HISTORY, ylabel=unit, ylim=(0, None), xlim=(0, None))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if axes.lines:
        axes.legend(fontsize="small", framealpha=0.7)


def _save(drawings: Sequence[Draw], path: Path, title: str) -> list[Path]:
    """Four panels; `path` without its ending gets .png and .svg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots", "on", "used where matplotlib is installed: pip install 'kvmem[bench]'"
        ) from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for axes, draw in zip(figure.subplots(2, 2).flat, drawings, strict=True):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        draw(axes)
    written = [path.with_suffix(ending) for ending in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=120)
    return written
