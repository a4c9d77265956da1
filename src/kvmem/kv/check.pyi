from kvmem.kv.block import BlockTable
from kvmem.kv.budget import HostBudget
from kvmem.kv.port import DevicePort
from kvmem.kv.residency import Residency
from kvmem.kv.store import HostStore

__all__ = ["check_memory"]

def check_memory(
    port: DevicePort,
    table: BlockTable,
    residency: Residency,
    store: HostStore,
    budget: HostBudget,
    n_pending: int,
) -> None: ...
