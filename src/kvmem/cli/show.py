"""Text for people: tables without colour, sizes and counts in words."""

from collections.abc import Sequence

__all__ = ["count", "size", "table"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; those in `right` are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(n_bytes: float) -> str:
    """A number of bytes with the unit that leaves one to four digits before the point."""
    for unit in UNITS:
        if n_bytes < 1024 or unit == UNITS[-1]:
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"


def count(n: float) -> str:
    """A number of parameters as model cards have it: 135M, 27B."""
    for unit in ("", "K", "M", "B"):
        if n < 999.5 or unit == "B":
            break
        n /= 1000
    return f"{n:.3g}{unit}"
