"""The `kvmem` command: its parts, and how every failure becomes one line and an exit code."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer
from typer import Option

from kvmem.bench.record import version
from kvmem.cli import faults, logs
from kvmem.cli.bench import bench
from kvmem.cli.calibrate import calibrate_model
from kvmem.cli.demo import demo
from kvmem.cli.demo_model import demo_model
from kvmem.cli.plan import plan
from kvmem.cli.run import run
from kvmem.cli.serve import serve
from kvmem.errors import Cancelled, KvmemError
from kvmem.llama.runtime import build_number

__all__ = ["app", "execute"]

INTERRUPTED = 130
OURS = ("serve", "run", "plan", "calibrate")  # commands that take settings from variables

app = typer.Typer(
    name="kvmem",
    help="llama.cpp with tiered KV memory: a bounded working set that recalls.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"kvmem {version('(not installed)')}, llama.cpp b{build_number()}")
        raise typer.Exit


app.command()(serve)
app.command()(run)
app.command()(plan)
app.command("calibrate")(calibrate_model)
app.command()(demo)
app.command("demo-model")(demo_model)
app.add_typer(bench, name="bench")


@app.callback()
def _any(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_tell_version, help="Show the version.")
    ] = False,
) -> None:
    pass


def execute(args: Sequence[str]) -> int:
    """Run a command line. Returns 0 done, 1 failed, 2 usage, 130 interrupted."""
    args = args or ("--help",)
    command = typer.main.get_command(app)
    name = args[0] if args and not args[0].startswith("-") else ""
    # how the first complaint is told; a command with -v does it again
    is_json = ("--log-format", "json") in pairwise(args)
    logs.set_up(verbose=False, kind="json" if is_json else "text")
    if name in OURS:
        commands = getattr(command, "commands", {})
        options = commands[name].params
        # one environment serves them all
        variables = frozenset(
            str(option.envvar) for one in OURS for option in commands[one].params if option.envvar
        )
        stray = faults.unknown_variable(variables) or faults.unknown_flag(
            args[1:],
            command=name,
            known={text for option in options for text in (*option.opts, *option.secondary_opts)},
            with_value={text for option in options if not option.is_flag for text in option.opts},
        )
        if stray is not None:
            return _fail(stray, faults.USAGE)
    try:
        result = command.main(args=list(args), prog_name="kvmem", standalone_mode=False)
    except typer.TyperException as error:
        return _usage(error, _path(command, args))
    except (KeyboardInterrupt, typer.Abort, Cancelled):
        return INTERRUPTED
    except (KvmemError, OSError) as error:
        line, code = faults.describe(error, command=_path(command, args) or name)
        logging.getLogger(__name__).debug("%s failed", name, exc_info=True)
        return _fail(line, code)
    return result if isinstance(result, int) else 0


def _path(command: object, args: Sequence[str]) -> str:
    """The command that is meant, with its group: `bench speed`."""
    names = []
    for arg in args:
        command = getattr(command, "commands", {}).get(arg)
        if command is None:
            break
        names.append(arg)
    return " ".join(names)


def _usage(error: typer.TyperException, name: str) -> int:
    message = error.format_message().rstrip(".")
    given = _given(error)
    if given and given not in message:
        message += f" (it is {given})"
    hint = f"kvmem {name} --help" if name else "kvmem --help"
    return _fail(f"error: {message}; try {hint}", faults.USAGE)


def _given(error: typer.TyperException) -> str:
    """The value of a wrong type, which Typer's message leaves out; empty at other faults."""
    errors = getattr(error.__cause__, "errors", None)  # pydantic's ValidationError
    return "" if errors is None else ", ".join(repr(fault["input"]) for fault in errors())


def _fail(line: str, code: int) -> int:
    logs.complain(line)
    return code
