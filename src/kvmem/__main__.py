"""`kvmem`, and `python -m kvmem`."""

import sys

from kvmem.cli.app import execute

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
