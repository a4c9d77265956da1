"""`kvmem`, and `python -m kvmem`."""

import os
import signal
import sys

__all__ = ["main"]

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code."""
    serves = sys.argv[1:2] == ["serve"]
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    # while modules are imported Python may drop an exception, and there is nothing to put in order
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
    if serves:
        signal.signal(signal.SIGTERM, _leave)
    from kvmem.cli.app import execute

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if serves:
        # ends in order from the first moment, whatever is loaded
        signal.signal(signal.SIGTERM, _end)
    try:
        code = execute(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
