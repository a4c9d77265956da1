"""`kvmem bench`: quality and speed on the user's own machine and model."""

import typer

from kvmem.cli.agent import agent
from kvmem.cli.quality import quality
from kvmem.cli.recall import recall
from kvmem.cli.report import report
from kvmem.cli.speed import speed
from kvmem.cli.turns import turns

__all__ = ["bench"]

bench = typer.Typer(help="Measure recall and speed.", rich_markup_mode=None)
for command in (quality, turns, recall, speed, agent, report):
    bench.command()(command)
