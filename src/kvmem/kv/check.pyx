"""Every invariant of the memory, stated as code. docs/memory.md lists them in words."""

from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from kvmem.ids cimport BlockId, CellId, SlotId
from kvmem.kv.block cimport BlockTable
from kvmem.kv.budget cimport HostBudget
from kvmem.kv.history cimport History
from kvmem.kv.port cimport CellMeta, DevicePort
from kvmem.kv.residency cimport Residency
from kvmem.kv.slabs cimport RecordHeader
from kvmem.kv.store cimport HostStore

__all__ = ["check_memory", "check_parked"]


def check_memory(DevicePort port not None, BlockTable table not None, Residency residency not None,
                 HostStore store not None, HostBudget budget not None, int n_pending):
    """Raises AssertionError that names the first broken invariant. Costs a pass over all tokens.

    n_pending: tokens that are prepared; their cells may hold anything.
    """
    cdef CellMeta *meta = <CellMeta *>calloc(table.block_tokens, sizeof(CellMeta))
    if meta == NULL:
        raise MemoryError("no memory to check with")
    try:
        _check_table(table)
        residency.check()
        store.check()
        _check_budget(table, store, budget)
        _check_tiers(table, residency, store, n_pending)
        _check_records(table, store, meta)
        _check_cells(port, table, residency, n_pending, meta)
    finally:
        free(meta)


def check_parked(History present not None, parked, int n_slots):
    """The same for the histories beside the one on the device.

    parked: all of them. Every block of theirs has a record, and shared records are one content.
    """
    cdef History history
    cdef CellMeta *meta = <CellMeta *>calloc(present.table.block_tokens, sizeof(CellMeta))
    if meta == NULL:
        raise MemoryError("no memory to check with")
    owners = {}
    try:
        for history in (present, *parked):
            history.store.check()
            for address in history.store.addresses():
                owners[address] = owners.get(address, 0) + 1
        for history in parked:
            _check_table(history.table)
            _check_parked_blocks(history, meta, n_slots)
        for address, n in owners.items():
            _require((<RecordHeader *><size_t>address).n_holders == n,
                     f"{n} histories hold a record that counts "
                     f"{(<RecordHeader *><size_t>address).n_holders}")
        _require(present.store.slabs.n_used == len(owners),
                 f"{present.store.slabs.n_used} records are used, {len(owners)} are held")
    finally:
        free(meta)


cdef int _check_parked_blocks(History history, CellMeta *meta, int n_slots) except -1:
    cdef BlockId block
    cdef int fill
    cdef unsigned char *record
    cdef BlockTable table = history.table
    for block in range(table.n_blocks):
        fill = table.fill(block)
        record = history.store.find_open(block, table.version(block), fill)
        _require(record != NULL, f"block {block} of a parked history has no record of its {fill} "
                                 "tokens")
        table.write_meta(block, meta)
        _require(memcmp(meta, history.store.meta(record), fill * sizeof(CellMeta)) == 0,
                 f"the record of block {block} of a parked history holds other tokens")
    _require(history.n_records == table.n_blocks,
             f"a parked history of {table.n_blocks} blocks holds {history.n_records} records")
    blocks = history.resident_when_it_left().tolist()
    _require(blocks == sorted(set(blocks)) and len(blocks) <= n_slots,
             "a parked history was seen with more blocks than there are slots, or one twice")
    _require(max(blocks, default=-1) == table.n_blocks - 1,
             "a parked history was seen without its last block")
    return 0


def _require(bint holds, str message):
    if not holds:
        raise AssertionError(message)


def _check_table(BlockTable table):
    n_blocks = (table.n_tokens + table.block_tokens - 1) // table.block_tokens
    _require(table.n_blocks == n_blocks,
             f"{table.n_tokens} tokens make {n_blocks} blocks, counted {table.n_blocks}")
    versions = [table.version(block) for block in range(table.n_blocks)]
    _require(len(set(versions)) == len(versions), "two blocks share a version")


def _check_budget(BlockTable table, HostStore store, HostBudget budget):
    _require(budget.used <= budget.limit,
             f"{budget.used} bytes in use pass the host limit {budget.limit}")
    n_bytes = store.slabs.n_bytes + table.n_bytes
    _require(n_bytes <= budget.used,
             f"records and tables take {n_bytes} bytes, but only {budget.used} are charged")


def _check_tiers(BlockTable table, Residency residency, HostStore store, int n_pending):
    cdef BlockId block
    cdef SlotId slot
    cdef int n_copies = 0, limit = residency.n_budget_slots + residency.n_reserve_slots
    cdef int n_blocks = (table.n_tokens + n_pending + table.block_tokens - 1) // table.block_tokens
    _require(residency.n_used <= limit,
             f"{residency.n_used} blocks are resident, but budget and reserve have {limit}")
    for slot in range(residency.n_slots):
        _require(residency.block_at(slot) < n_blocks,
                 f"slot {slot} holds block {residency.block_at(slot)}, but there are {n_blocks}")
    for block in range(table.n_blocks, n_blocks):
        _require(residency.slot_of(block) != -1, f"prepared block {block} has no slot")
    for block in range(table.n_blocks):
        has_copy = store.find(block, table.version(block)) != NULL
        n_copies += has_copy
        _require(has_copy or residency.slot_of(block) != -1,
                 f"block {block} is neither resident nor has it a valid host copy")
        _require(not has_copy or table.is_complete(block), f"open block {block} has a host copy")
    if table.n_blocks:
        _require(residency.slot_of(table.n_blocks - 1) != -1,
                 f"block {table.n_blocks - 1} holds the last token, but is not resident")
    _require(n_copies == store.n_records,
             f"{store.n_records} records are used, but {n_copies} are valid copies")


cdef int _check_records(BlockTable table, HostStore store, CellMeta *meta) except -1:
    cdef BlockId block
    cdef unsigned char *record
    for block in range(table.n_blocks):
        record = store.find(block, table.version(block))
        if record == NULL:
            continue
        table.write_meta(block, meta)
        if memcmp(meta, store.meta(record), table.block_tokens * sizeof(CellMeta)) != 0:
            raise AssertionError(f"the record of block {block} holds other tokens or positions")
    return 0


cdef int _check_cells(DevicePort port, BlockTable table, Residency residency, int n_pending,
                      CellMeta *meta) except -1:
    cdef SlotId slot
    cdef BlockId block
    cdef CellId cell
    cdef CellMeta seen
    cdef int i, fill, n_own, state
    for slot in range(residency.n_slots):
        block = residency.block_at(slot)
        fill, n_own = 0, 0
        if block != -1:
            fill = table.fill(block)
            # prepared cells follow those of the history
            n_own = min(table.block_tokens,
                        table.n_tokens + n_pending - block * table.block_tokens)
            table.write_meta(block, meta)
        for i in range(table.block_tokens):
            if fill <= i < n_own:
                continue
            cell = slot * table.block_tokens + i
            state = port.peek(cell, &seen)
            if state == -1:
                return 0
            if state != (1 if i < fill else 0):
                raise AssertionError(f"cell {cell} is {'visible' if state else 'empty'}, but token "
                                     f"{i} of block {block} (fill {fill}) is not")
            if i < fill and (
                    seen.pos[0] != meta[i].pos[0]
                    or (seen.token != -1 and memcmp(&seen, &meta[i], sizeof(CellMeta)) != 0)):
                raise AssertionError(f"cell {cell} holds token {seen.token} at {seen.pos[0]}, but "
                                     f"token {i} of block {block} is {meta[i].token} at "
                                     f"{meta[i].pos[0]}")
    return 0
