from collections.abc import Sequence

from kvmem.kv.block import BlockTable
from kvmem.kv.budget import HostBudget
from kvmem.kv.history import History
from kvmem.kv.port import DevicePort
from kvmem.kv.residency import Residency
from kvmem.kv.store import HostStore

__all__ = ["check_memory", "check_parked"]

def check_memory(
    port: DevicePort,
    table: BlockTable,
    residency: Residency,
    store: HostStore,
    budget: HostBudget,
    n_pending: int,
) -> None: ...
def check_parked(present: History, parked: Sequence[History], n_slots: int) -> None: ...
