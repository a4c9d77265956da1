"""Plots of saved runs as PNG and SVG; matplotlib is an optional dependency (`kvmem[bench]`)."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmem.bench.agent import AgentRecord
from kvmem.bench.speed import SYSTEMS, RequestRecord, SpeedRecord
from kvmem.bench.speed_summary import speed_rows
from kvmem.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_agent", "plot_speed"]

GIB = 1 << 30


def plot_speed(
    speeds: Sequence[SpeedRecord], requests: Sequence[RequestRecord], path: Path
) -> list[Path]:
    """Prefill, decode, time to the first token and memory, by depth."""

    def rates(phase: str) -> Callable[["Axes"], None]:
        def draw(axes: "Axes") -> None:
            for system in SYSTEMS:
                rows = [
                    r for r in speed_rows(list(speeds)) if (r.system, r.phase) == (system, phase)
                ]
                rows.sort(key=lambda row: row.depth_tokens)
                axes.plot(
                    [r.depth_tokens for r in rows],
                    [r.tokens_per_s for r in rows],
                    marker="o",
                    label=system,
                )
            axes.set(title=phase, xlabel="tokens of history", ylabel="tokens/s", ylim=(0, None))
            axes.legend()

        return draw

    warm = [r for r in requests if r.kind == "warm"]

    def first_token(axes: "Axes") -> None:
        for system in SYSTEMS[:2]:
            by_depth = _medians(
                [(r.depth_tokens, r.first_token_s) for r in warm if r.system == system]
            )
            axes.plot(list(by_depth), list(by_depth.values()), marker="o", label=system)
        axes.set(title="first token, warm", xlabel="tokens of history", ylabel="s", ylim=(0, None))
        axes.legend()

    def memory(axes: "Axes") -> None:
        tiered = [r for r in warm if r.system == "kvmem"]
        for name in ("device_bytes", "host_bytes"):
            by_depth = _medians([(r.depth_tokens, getattr(r, name) / GIB) for r in tiered])
            axes.plot(list(by_depth), list(by_depth.values()), marker="o", label=name.split("_")[0])
        axes.set(title="kvmem's memory", xlabel="tokens of history", ylabel="GiB", ylim=(0, None))
        axes.legend()

    return _save([rates("prefill"), rates("decode"), first_token, memory], path)


def plot_agent(records: Sequence[AgentRecord], path: Path) -> list[Path]:
    """Prefill, decode and memory by the length of the history, a line for each system."""
    groups = {
        key: [r for r in records if (r.task, r.system) == key]
        for key in dict.fromkeys((r.task, r.system) for r in records)
    }

    def lines(title: str, unit: str, value: Callable[[AgentRecord], float | None]) -> Any:
        def draw(axes: "Axes") -> None:
            for (task, system), group in groups.items():
                points = [(r.prompt_tokens, y) for r in group if (y := value(r)) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=f"{task}, {system}")
            axes.set(title=title, xlabel="tokens of history", ylabel=unit, ylim=(0, None))
            if axes.lines:
                axes.legend()

        return draw

    return _save(
        [
            lines("prefill", "tokens/s", lambda r: r.read_tokens / r.prompt_s),
            lines("decode", "tokens/s", lambda r: (r.reply_tokens - 1) / r.decode_s),
            lines("RAM", "GiB", lambda r: None if r.rss_bytes is None else r.rss_bytes / GIB),
            lines("GPU", "GiB", lambda r: None if not r.gpu_bytes else r.gpu_bytes / GIB),
        ],
        path,
    )


def _medians(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    return {
        x: statistics.median(y for at, y in points if at == x)
        for x in sorted({x for x, _ in points})
    }


def _save(drawings: Sequence[Callable[["Axes"], None]], path: Path) -> list[Path]:
    """Four panels; `path` without its ending gets .png and .svg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots", "on", "used where matplotlib is installed: pip install 'kvmem[bench]'"
        ) from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, draw in zip(figure.subplots(2, 2).flat, drawings, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
    written = [path.with_suffix(ending) for ending in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=120)
    return written
