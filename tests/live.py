"""A `kvmem serve` process to talk to."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

WAIT_S = 30.0


class Server:
    """A `kvmem serve` process whose stderr is read line by line."""

    def __init__(self, *args: str, variables: Mapping[str, str] | None = None) -> None:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "KVMEM_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvmem", "serve", *args],
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **(variables or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seen: list[str] = []

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, pattern: str) -> re.Match[str]:
        """The first line from here on that matches."""
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line matches {pattern!r} in {self.seen}")

    def log(self) -> list[str]:
        """All lines, of a process that has ended."""
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self.seen.append(line)
        return self.seen

    def address(self) -> tuple[str, int]:
        found = self.until(r"listening on http://([\d.]+):(\d+)")
        return found[1], int(found[2])

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        self.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def serving(*args: str, variables: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = Server(*args, variables=variables)
    try:
        yield server
    finally:
        server.close()
