"""The ways in: `kvmem` and `python -m kvmem`."""

import os
import subprocess
import sys

import pytest

INTERRUPTED = """
import sys


class Interrupt:
    def find_spec(self, name, *rest):
        if name == "kvmem.cli.app":
            raise KeyboardInterrupt


sys.meta_path.insert(0, Interrupt())
sys.argv = ["kvmem", "plan"]
"""


@pytest.mark.parametrize(
    "start",
    [
        "from kvmem.__main__ import main; main()",  # the installed command
        "import runpy; runpy.run_module('kvmem', run_name='__main__')",
    ],
)
def test_an_interrupt_while_it_is_imported_is_an_interrupt(start: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED + start]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
