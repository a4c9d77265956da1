from typing import NamedTuple, Self, final

from kvmem.kv.block import BlockTable
from kvmem.kv.place import Placement
from kvmem.kv.port import DevicePort
from kvmem.kv.residency import Residency
from kvmem.kv.store import HostStore

__all__ = ["Stager", "Transfer"]

class Transfer(NamedTuple):
    n_in: int
    n_out: int
    n_kept: int
    n_moved: int
    bytes_in: int
    bytes_out: int
    seconds: float

@final
class Stager:
    def __new__(
        cls, port: DevicePort, store: HostStore, residency: Residency, table: BlockTable
    ) -> Self: ...
    @property
    def n_sealed(self) -> int: ...
    @property
    def n_in(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    @property
    def n_kept(self) -> int: ...
    @property
    def n_moved(self) -> int: ...
    def perform(self, placement: Placement) -> Transfer: ...
