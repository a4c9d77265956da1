from typing import final

from kvmem.kv.budget import HostBudget

__all__ = ["Chunks"]

@final
class Chunks:
    def __new__(cls, chunk_bytes: int, what: str, budget: HostBudget | None = None) -> Chunks: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def n_chunks(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def n_bytes(self) -> int: ...
