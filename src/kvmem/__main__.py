"""`kvmem`, and `python -m kvmem`."""

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:2] == ["serve"]:
        # ends in order from the first moment, whatever is imported, calibrated or loaded
        signal.signal(signal.SIGTERM, _end)
    from kvmem.cli.app import execute

    sys.exit(execute(sys.argv[1:]))


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
