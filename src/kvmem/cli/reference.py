"""The options of serve, run and plan as Markdown tables, from the classes that define them."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from kvmem.cli.options import EngineOptions
from kvmem.cli.sampling_options import SamplingOptions
from kvmem.cli.server_options import ServerOptions

__all__ = ["option_tables"]

GROUPS = (
    (EngineOptions, "all three commands"),
    (SamplingOptions, "serve and run"),
    (ServerOptions, "serve"),
)


def option_tables() -> str:
    """One table a panel: flags, variable, default, meaning."""
    panels: dict[str, list[str]] = {}
    for group, commands in GROUPS:
        hints = get_type_hints(group, include_extras=True)
        for item in fields(group):
            option = get_args(hints[item.name])[-1]
            title = f"### {option.rich_help_panel}: {commands}"
            panels.setdefault(title, []).append(_row(option, item.default))
    lines: list[str] = []
    for title, rows in panels.items():
        lines += ["", title, "", "| flag | variable | default | meaning |", "|---|---|---|---|"]
        lines += rows
    return "\n".join([*lines[1:], ""])


def _row(option: Any, default: object) -> str:
    names = (option.default, *option.param_decls)  # Typer keeps the first name there
    flags = ", ".join(f"`{name}`" for name in names)
    variable = f"`{option.envvar}`" if option.envvar else ""
    return f"| {flags} | {variable} | {_shown(default)} | {option.help} |"


def _shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)
