"""The options of serve, run, plan and calibrate as Markdown tables, from what defines them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from typer.main import get_command

from kvmem.cli.app import app
from kvmem.cli.options import EngineOptions
from kvmem.cli.sampling_options import SamplingOptions
from kvmem.cli.server_options import ServerOptions

__all__ = ["option_tables"]

COMMANDS = ("serve", "run", "plan", "calibrate")
GROUPS = (
    (EngineOptions, COMMANDS),
    (SamplingOptions, ("serve", "run")),
    (ServerOptions, ("serve",)),
)
HEAD = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
OWN_HEAD = ["| command | flag | default | meaning |", "|---|---|---|---|"]


def option_tables() -> str:
    """One table a panel, and one for what single commands have beside them."""
    panels: dict[str, list[str]] = {}
    for group, commands in GROUPS:
        hints = get_type_hints(group, include_extras=True)
        for item in fields(group):
            option = get_args(hints[item.name])[-1]
            title = f"### {option.rich_help_panel}: {_joined(commands)}"
            panels.setdefault(title, HEAD.copy()).append(_row(option, item.default))
    panels["### Options of single commands"] = OWN_HEAD + _own_rows()
    lines: list[str] = []
    for title, rows in panels.items():
        lines += ["", title, "", *rows]
    return "\n".join([*lines[1:], ""])


def _own_rows() -> list[str]:
    """Options that a command has beside its groups; those that are the same stand once."""
    commands_of: dict[str, list[str]] = {}
    every: Any = get_command(app)
    for command in COMMANDS:
        groups = [group for group, commands in GROUPS if command in commands]
        shared = {item.name for group in groups for item in fields(group)}
        for option in every.commands[command].params:
            if option.name not in shared:
                flags = ", ".join(f"`{name}`" for name in option.opts)
                row = f"{flags} | {_shown(option.default)} | {option.help} |"
                commands_of.setdefault(row, []).append(command)
    return [f"| {_joined(commands)} | {row}" for row, commands in commands_of.items()]


def _joined(commands: Sequence[str]) -> str:
    *first, last = commands
    return f"{', '.join(first)} and {last}" if first else last


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
