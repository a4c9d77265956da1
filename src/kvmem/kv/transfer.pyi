from typing import NamedTuple, Self, final

from kvmem.kv.history import History
from kvmem.kv.place import Placement
from kvmem.kv.port import DevicePort
from kvmem.kv.residency import Residency

__all__ = ["Counters", "Stager", "Transfer"]

class Counters(NamedTuple):
    bytes_in: int
    bytes_out: int
    blocks_in: int
    blocks_out: int
    blocks_kept: int
    blocks_moved: int
    blocks_sealed: int

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
    def __new__(cls, port: DevicePort, history: History, residency: Residency) -> Self: ...
    @property
    def counters(self) -> Counters: ...
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
