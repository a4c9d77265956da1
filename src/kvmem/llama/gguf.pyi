from os import PathLike
from pathlib import Path

__all__ = ["data_offset", "split_files"]

def data_offset(path: str | PathLike[str]) -> int: ...
def split_files(path: str | PathLike[str]) -> list[Path]: ...
