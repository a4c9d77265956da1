"""A model's fingerprint: cheap enough for every start, and another one for other weights.

It covers, of every file of the model, the whole header (metadata and tensor table), the size and
evenly spread samples of the weights. A file of 14 GiB is not read through.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from kvmem.errors import ModelError
from kvmem.llama import gguf

__all__ = ["fingerprint"]

N_SAMPLES = 256
SAMPLE_BYTES = 4096


def fingerprint(path: str | os.PathLike[str]) -> str:
    """64 hex digits for the model whose (first) file is `path`. Raises ModelError."""
    digest = hashlib.sha256(b"kvmem model fingerprint 1")
    for part in gguf.split_files(path):
        try:
            _add(digest, part)
        except OSError as error:
            raise ModelError(f"cannot read the model file {part}: {error.strerror}") from None
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    header = gguf.data_offset(path)
    last = max(header, size - SAMPLE_BYTES)
    digest.update(f"{size} {header}".encode())
    with path.open("rb") as file:
        digest.update(file.read(header))
        for start in np.unique(np.linspace(header, last, N_SAMPLES).astype(np.int64)).tolist():
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
