"""The facade of the memory: one history, its device slots and its host records."""

cimport cython

from time import perf_counter

import numpy as np

from kvmem.errors import CapacityError, ConfigError, StateError
from kvmem.kv.check import check_memory, check_parked
from kvmem.kv.place import place
from kvmem.kv.select import block_ids
from kvmem.kv.transfer import Transfer

__all__ = ["WorkingSet"]


@cython.final
cdef class WorkingSet:
    """The blocks whose cells attention sees, and the host copies of all the others.

    Blocks count against a region, wherever they sit: prefill may fill the budget, a reply the
    reserve too. The block of the last token is always resident.

    Any method may raise StateError while tokens are prepared, save commit, rollback and clear.
    After TransferError or CapacityError every block is resident and right, or absent with a valid
    host copy, and the history is what it was. docs/memory.md states every invariant.

    Args:
        port: the device; it outlives the working set.
        block_tokens: tokens of a block, as the port has it.
        budget_blocks: blocks of history, at least 2.
        reserve_blocks: blocks kept free for one reply.
        slack_blocks: free slots that ordered placement shifts blocks through.
        budget: the host limit, shared with summaries and checkpoints.
        ordered: apply() puts blocks in position order, for comparisons bit by bit.

    Raises:
        ConfigError: a size breaks a rule.
    """

    def __cinit__(self, DevicePort port not None, *, int block_tokens, int budget_blocks,
                  int reserve_blocks, int slack_blocks=0, HostBudget budget not None,
                  bint ordered=False):
        if block_tokens != port.block_tokens:
            raise ConfigError("block_tokens", block_tokens, f"the device's, {port.block_tokens}")
        if budget_blocks < 2:
            raise ConfigError("budget_blocks", budget_blocks,
                              "at least 2: the last block stays while prefill begins the next")
        if reserve_blocks < 1:
            raise ConfigError("reserve_blocks", reserve_blocks, "at least 1")
        if slack_blocks < (1 if ordered else 0):
            raise ConfigError("slack_blocks", slack_blocks,
                              "at least 1 with ordered placement, else at least 0")
        n_slots = budget_blocks + reserve_blocks + slack_blocks
        if n_slots > port.n_slots:
            raise ConfigError("budget_blocks + reserve_blocks + slack_blocks", n_slots,
                              f"at most the device's {port.n_slots} slots")
        self.block_tokens = block_tokens
        self.payload_bytes = port.payload_bytes
        self.ordered = ordered
        self._port = port
        self._budget = budget
        self._residency = Residency(budget_blocks, reserve_blocks, slack_blocks)
        self.history = History(port, budget)
        self._stager = Stager(port, self.history, self._residency)
        self._use(self.history)
        cells = np.zeros(n_slots * block_tokens, dtype=np.int32)
        self._cells = cells
        self._cells_array = cells.view()
        self._cells_array.flags.writeable = False
        self._blocks = np.zeros(n_slots, dtype=np.int32)

    # questions

    @property
    def n_tokens(self):
        """Tokens of the history."""
        return self._table.n_tokens

    @property
    def n_blocks(self):
        """Blocks of the history; the last may be open."""
        return self._table.n_blocks

    @property
    def n_sealed(self):
        """Blocks that have a valid host copy."""
        return self._store.n_records

    @property
    def n_slots(self):
        """Slots of budget, reserve and slack."""
        return self._residency.n_slots

    @property
    def tokens(self):
        """int32 [n_tokens], read-only, no copy."""
        return self._table.tokens()

    @property
    def pos(self):
        """int32 [n_tokens, 4], read-only, no copy."""
        return self._table.pos()

    @property
    def n_cells_used(self):
        """Cells that hold a token of the history."""
        return self._stager.n_cells_used()

    @property
    def highest_used_cell(self):
        """The highest cell that holds a token, -1 for none; attention's cost follows it."""
        return self._stager.highest_used_cell()

    @property
    def host_bytes(self):
        """Bytes that records and tables take of the host limit."""
        return self._store.slabs.n_bytes + self._table.n_bytes

    @property
    def counters(self):
        """Counters, the totals of all transfers."""
        return self._stager.counters

    def room(self, bint reply=False):
        """Tokens that fit now without anything leaving: the rest of the open block and free blocks.

        Prefill (the default) may use what is free of the budget, a reply the reserve as well.
        """
        self._require_idle()
        return self._open_rest() + self._residency.n_free(reply) * self.block_tokens

    def resident(self):
        """The resident blocks: int32 [n], ascending."""
        held = self._residency.blocks()
        return np.sort(held[(held != -1) & (held < self._table.n_blocks)])

    def is_resident(self, int block):
        """Whether attention sees the block."""
        self._require_block(block)
        return self._residency.slot_of(block) != -1

    def slot_of(self, int block):
        """The block's slot, -1 if it is not resident."""
        self._require_block(block)
        return self._residency.slot_of(block)

    def has_copy(self, int block):
        """Whether the host holds exactly this block's content."""
        self._require_block(block)
        return self._stager.has_copy(block)

    def record_address(self, int block):
        """Address of the payload (payload_bytes long) of the block's host copy.

        It is valid until truncate() or clear() drops the block: whoever reads it on another thread
        must be done by then. Raises StateError if there is no copy.
        """
        cdef unsigned char *record
        self._require_block(block)
        record = self._store.find(block, self._table.version(block))
        if record == NULL:
            raise StateError(f"block {block} has no host copy")
        return <size_t>self._store.payload(record)

    def read(self, int block):
        """The rows of the block's tokens as bytes: per tensor, as in a payload, fill rows each.

        From the device if the block is resident, else from its host copy.
        """
        self._require_idle()
        self._require_block(block)
        return self._stager.read(block)

    # a decode call

    def prepare(self, int n_tokens, *, bint reply=False):
        """Find cells for the next n_tokens and tell the device. commit() or rollback() must follow.

        Returns:
            int32 [n_tokens] cells, read-only, valid until the next prepare().

        Raises:
            CapacityError: no room for them; nothing changed.
        """
        cdef long long n_new
        cdef int n_free, i, index
        cdef BlockId block
        self._require_idle()
        if n_tokens < 1:
            raise ValueError(f"n_tokens is {n_tokens}, but must be at least 1")
        n_new = self._n_new_blocks(n_tokens)
        n_free = self._residency.n_free(reply)
        if n_new > n_free:
            raise CapacityError(
                f"{n_tokens} tokens do not fit: the open block takes {self._open_rest()} and "
                f"{n_free} blocks of {self.block_tokens} are free for "
                f"{'a reply' if reply else 'prefill'}; evict blocks first or decode fewer tokens")
        self._table.grow(self._table.n_tokens + n_tokens)
        self._residency.know(self._table.n_blocks + <int>n_new)
        for block in range(self._table.n_blocks, self._table.n_blocks + <int>n_new):
            self._residency.assign(block, self._residency.lowest_free())
        for i in range(n_tokens):
            index = self._table.n_tokens + i
            self._cells[i] = (self._residency.slot_of(index // self.block_tokens)
                              * self.block_tokens + index % self.block_tokens)
        self.n_pending = n_tokens
        try:
            self._port.place(&self._cells[0], n_tokens)
        except BaseException:
            self._discard(0)
            raise
        return self._cells_array[:n_tokens]

    def commit(self, const int[::1] tokens not None, const int[:, ::1] pos not None):
        """Accept the first len(tokens) prepared tokens, and clear the cells of the others.

        tokens: int32 [n]; pos: int32 [n, 4].
        """
        cdef int n = <int>tokens.shape[0]
        if self.n_pending == 0:
            raise StateError("commit without prepare")
        if n > self.n_pending:
            raise ValueError(f"{n} tokens, but {self.n_pending} are prepared")
        if pos.shape[0] != n or pos.shape[1] != 4:
            raise ValueError(f"pos has shape ({pos.shape[0]}, {pos.shape[1]}), not ({n}, 4)")
        if n:
            self._table.append(&tokens[0], &pos[0, 0], n)
        self._discard(n)

    def rollback(self):
        """Accept none of the prepared tokens, as after a failed decode."""
        if self.n_pending == 0:
            raise StateError("rollback without prepare")
        self._discard(0)

    # tiers

    def provide(self):
        """Get the host memory that seal() will need for the blocks that prepared tokens complete.

        Here it can be had while the device computes. Raises CapacityError, as seal() will.
        """
        cdef int n_complete = (self._table.n_tokens + self.n_pending) // self.block_tokens
        self._store.slabs.provide(n_complete - self._store.n_records)

    def trim(self):
        """Give back the host memory that holds no record of any history; its bytes."""
        cdef size_t n_bytes = self._store.slabs.n_bytes
        self._store.trim()
        return n_bytes - self._store.slabs.n_bytes

    def seal(self):
        """Copy every complete block without a host copy to the host.

        Raises CapacityError, and copies none, if the host limit is reached.
        """
        self._require_idle()
        self._stager.seal_complete()

    def evict(self, blocks):
        """Free the slots of these blocks; those without a host copy are sealed first.

        Blocks that are not resident are passed over. Returns how many left.

        Raises:
            StateError: the open block or the last token's block is among them; nothing changed.
        """
        cdef BlockId block
        cdef int n = 0
        self._require_idle()
        for block in np.unique(block_ids(blocks, "blocks")):
            self._require_block(block)
            if block == self._table.n_blocks - 1:
                raise StateError(f"block {block} holds the last token, so it stays")
            if self._residency.slot_of(block) != -1:
                self._blocks[n] = block
                n += 1
        if n:
            self._stager.evict(&self._blocks[0], n)
        return n

    def apply(self, selection):
        """Make exactly these blocks resident; only differences move. Returns a Transfer.

        selection: int [n], ascending and unique, with the last token's block, at most budget and
        reserve together.

        Raises:
            StateError: the last token's block is missing; nothing changed.
            CapacityError: too many blocks, or a leaving one cannot be sealed; nothing changed.
            TransferError: a copy failed; see Stager.perform.
        """
        cdef int limit = self._residency.n_budget_slots + self._residency.n_reserve_slots
        cdef int n, i
        cdef const int[::1] blocks = block_ids(selection, "selection")
        self._require_idle()
        n = <int>blocks.shape[0]
        for i in range(n):
            self._require_block(blocks[i])
            if i > 0 and blocks[i] <= blocks[i - 1]:
                raise ValueError("selection must be ascending and unique")
        if self._table.n_blocks and (n == 0 or blocks[n - 1] != self._table.n_blocks - 1):
            raise StateError(f"block {self._table.n_blocks - 1} holds the last token, so the "
                             "selection must hold it")
        if n > limit:
            raise CapacityError(f"{n} blocks are selected, but budget and reserve have {limit}; "
                                "select fewer")
        return self._stager.perform(place(blocks, self._residency, ordered=self.ordered))

    def make_room(self, int n_tokens, *, int reply_from_block):
        """Evict the oldest complete blocks of a reply until room(reply=True) holds n_tokens.

        Returns how many left. Raises CapacityError, and none leaves, if that is not enough.
        """
        cdef int slot, n = 0
        cdef long long n_short
        cdef BlockId block
        self._require_idle()
        if n_tokens < 0 or reply_from_block < 0:
            raise ValueError(f"n_tokens={n_tokens}, reply_from_block={reply_from_block}")
        n_short = self._n_new_blocks(n_tokens) - self._residency.n_free(True)
        if n_short <= 0:
            return 0
        for slot in range(self._residency.n_slots):
            block = self._residency.block_at(slot)
            if reply_from_block <= block < self._table.n_blocks - 1:
                self._blocks[n] = block
                n += 1
        if n < n_short:
            raise CapacityError(
                f"{n_tokens} tokens of a reply need {n_short} more blocks, but only {n} blocks "
                f"from block {reply_from_block} on can leave; select fewer blocks of history or "
                "raise the reserve")
        sort_blocks(&self._blocks[0], n)
        self._stager.evict(&self._blocks[0], <int>n_short)
        return n_short

    def truncate(self, int n_tokens):
        """Forget all tokens from n_tokens on, on the device and on the host.

        The block of the last kept token becomes resident, in a free slot or in that of another
        block, which leaves: one that is forgotten anyway, else the least recently selected. If it
        is cut inside, it is open again and its copy is gone.

        Returns:
            a Transfer of what that took; forgotten blocks are not counted.

        Raises:
            CapacityError, TransferError: it could not become resident; no token is forgotten.
        """
        self._require_idle()
        if not 0 <= n_tokens <= self._table.n_tokens:
            raise ValueError(f"n_tokens is {n_tokens}, but must be 0..{self._table.n_tokens}")
        before, start = self.counters, perf_counter()
        if n_tokens == 0:
            self.clear()
        elif n_tokens < self._table.n_tokens:
            self._stager.cut(n_tokens)
        return self._difference(before, start)

    def clear(self):
        """Forget the whole history, prepared tokens included. Records and slots are free again."""
        self._stager.empty()
        self.n_pending = 0
        self._table.cut(0)
        self._store.drop_from(0)
        self._store.trim()

    # several histories

    def new_history(self):
        """An empty history that may take its turn on the device."""
        return History(self._port, self._budget, self.history)

    def branch(self, History source not None, int n_tokens):
        """A new history that begins with the first n_tokens of source; it is not on the device.

        They hold the same records of complete blocks; of a block that is cut inside, the new one
        has its own. source: on the device or not; it stays as it is.

        Raises:
            CapacityError, TransferError: a block could not be stored; there is no new history.
        """
        cdef History target = self.new_history()
        cdef BlockId n_complete = n_tokens // self.block_tokens
        self._require_idle()
        if not 0 <= n_tokens <= source.table.n_tokens:
            raise ValueError(f"n_tokens is {n_tokens}, but must be 0..{source.table.n_tokens}")
        if source is self.history:
            self._stager.take_window(source)
            self._stager.seal_complete()
        target.table.begin_as(source.table, n_tokens)
        target.store.share(source.store, n_complete)
        if n_tokens % self.block_tokens:
            self._stager.copy_open(source, target, n_complete)
        target.take_window(source)
        return target

    def switch(self, History target not None):
        """Put another history on the device, with what was resident when it left.

        Blocks that both hold and that stay visible keep their slots. Returns a Transfer.

        Raises:
            CapacityError, TransferError: the present history could not be stored, and is still
                there; or target could not be brought in: then `history` is a new, empty one, and
                both others are whole on the host.
        """
        cdef History empty = self.new_history()
        self._require_idle()
        before, start = self.counters, perf_counter()
        if target is not self.history:
            self._residency.know(target.table.n_blocks)
            self._stager.park(self.history)
            self._stager.leave(target)
            self._use(target)
            try:
                self._stager.enter(target)
            except BaseException:
                self._stager.empty()
                self._use(empty)
                raise
        return self._difference(before, start)

    def check(self, parked=()):
        """Raises AssertionError that names the first broken invariant; for tests, any time.

        parked: all the histories that are not on the device.
        """
        check_memory(self._port, self._table, self._residency, self._store, self._budget,
                     self.n_pending)
        if not self.n_pending:
            check_parked(self.history, parked, self._residency.n_slots)

    # leaves

    cdef int _use(self, History history) except -1:
        """This history is on the device from now on."""
        self.history = history
        self._table = history.table
        self._store = history.store
        self._stager.use(history)
        return 0

    def _difference(self, before, start):
        """A Transfer of what was done since the counters were `before`."""
        seconds = perf_counter() - start
        names = ("blocks_in", "blocks_out", "bytes_in", "bytes_out")
        n_in, n_out, bytes_in, bytes_out = (
            getattr(self.counters, name) - getattr(before, name) for name in names)
        n_kept = self._residency.n_used - n_in
        return Transfer(n_in, n_out, n_kept, 0, bytes_in, bytes_out, seconds)

    cdef int _require_idle(self) except -1:
        if self.n_pending:
            raise StateError(f"{self.n_pending} tokens are prepared: commit or roll back first")
        return 0

    cdef int _require_block(self, int block) except -1:
        if not 0 <= block < self._table.n_blocks:
            raise ValueError(f"block {block} is not in 0..{self._table.n_blocks - 1}")
        return 0

    cdef int _open_rest(self) noexcept nogil:
        """Tokens that still fit in the open block; 0 if there is none."""
        return self._table.n_blocks * self.block_tokens - self._table.n_tokens

    cdef long long _n_new_blocks(self, long long n_tokens) noexcept nogil:
        """Blocks that n_tokens more need beyond the open one."""
        cdef long long n = n_tokens - self._open_rest()
        return (n + self.block_tokens - 1) // self.block_tokens if n > 0 else 0

    cdef int _discard(self, int n_accepted) except -1:
        """Clear the pending cells from n_accepted on, which the table does not hold."""
        cdef int i = n_accepted, n
        cdef BlockId block
        cdef int n_tokens = self._table.n_tokens + self.n_pending - n_accepted
        while i < self.n_pending:
            n = min(self.n_pending - i, self.block_tokens - self._cells[i] % self.block_tokens)
            self._port.clear(self._cells[i], n)
            i += n
        for block in range(self._table.n_blocks,
                           (n_tokens + self.block_tokens - 1) // self.block_tokens):
            self._residency.release(block)
        self.n_pending = 0
        return 0
