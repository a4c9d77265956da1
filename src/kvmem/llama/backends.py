"""Which loadable back ends to load: all of another kind than the CPU's, and the CPU's best variant.

Only the release form has any (KVMEM_RELEASE); in a build for one machine the back ends are linked.
ggml's own search looks for its own file names, and for them in the current folder too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["choose_backends"]

PREFIX = "libkvmem-ggml-"


def choose_backends(folder: Path) -> list[Path]:
    """The modules in `folder` to hand to ggml_backend_load, the CPU's first.

    A CPU variant scores 0 on a processor that lacks an instruction set it was compiled for, else
    the higher the more it uses. Source: ggml/src/ggml-cpu/arch/x86/cpu-feats.cpp.
    """
    variants: list[tuple[int, Path]] = []
    others: list[Path] = []
    for path in sorted(folder.glob(f"{PREFIX}*.so")):
        if path.name == f"{PREFIX}base.so":
            continue
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "ggml_backend_init"):
            continue
        if path.name.startswith(f"{PREFIX}cpu"):
            score = library.ggml_backend_score() if hasattr(library, "ggml_backend_score") else 1
            variants.append((score, path))
        else:
            others.append(path)
    best = max(variants, default=(0, None))
    return [*([best[1]] if best[0] and best[1] else []), *others]
