"""The ways in: `kvmem` and `python -m kvmem`."""

import os
import subprocess
import sys

import pytest

SIGNALLED = """
import os, signal, sys


class Signal:
    def find_spec(self, name, *rest):
        if name == "kvmem.cli.app":
            try:
                os.kill(os.getpid(), {number})
                for _ in range(1000):
                    pass  # the handler runs between two lines
            except BaseException:
                pass  # as Python drops what is raised in a callback of its own


sys.meta_path.insert(0, Signal())
sys.argv = ["kvmem", "{command}", "--nope"]
"""


@pytest.mark.parametrize(
    ("number", "command", "code"), [("signal.SIGINT", "plan", 130), ("signal.SIGTERM", "serve", 0)]
)
@pytest.mark.parametrize(
    "start",
    [
        "from kvmem.__main__ import main; main()",  # the installed command
        "import runpy; runpy.run_module('kvmem', run_name='__main__')",
    ],
)
def test_a_signal_while_it_is_imported_ends_it_quietly(
    number: str, command: str, code: int, start: str
) -> None:
    program = SIGNALLED.format(number=number, command=command) + start
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
