"""Where kvmem keeps what it can make or fetch again."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/kvmem`, or `~/.cache/kvmem`. A relative XDG_CACHE_HOME is ignored.

    Source: XDG base directory specification, which says the same of relative paths.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvmem"
