"""`kvmem`, and `python -m kvmem`."""

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        if sys.argv[1:2] == ["serve"]:
            # ends in order from the first moment, whatever is imported, calibrated or loaded
            signal.signal(signal.SIGTERM, _end)
        from kvmem.cli.app import execute

        code = execute(sys.argv[1:])
    except KeyboardInterrupt:  # also of the import
        code = 130
    sys.exit(code)


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
