"""WorkingSet under random calls and failing copies, against a history of plain lists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import HistoryTwin
from strategies import faults, seeds

from kvmem.errors import CapacityError, StateError, TransferError
from kvmem.kv.budget import Charge, HostBudget
from kvmem.kv.port import ArrayPort
from kvmem.kv.working_set import WorkingSet

ROW_BYTES = (3, 5, 2)
RECORD_BYTES = 4096
TABLE_BYTES = 32 * 1024


class WorkingSetMachine(RuleBasedStateMachine):
    """After every step all bytes of all blocks are those of the twin."""

    @initialize(
        block_tokens=st.integers(1, 4),
        budget_blocks=st.integers(2, 4),
        reserve_blocks=st.integers(1, 3),
        slack_blocks=st.integers(0, 2),
        spare_slots=st.integers(0, 1),
        ordered=st.booleans(),
        n_records=st.sampled_from([2, 6, 15, 60, 60, 60]),
        n_tokens=st.integers(0, 60),
        seed=seeds,
    )
    def start(
        self,
        block_tokens: int,
        budget_blocks: int,
        reserve_blocks: int,
        slack_blocks: int,
        spare_slots: int,
        ordered: bool,
        n_records: int,
        n_tokens: int,
        seed: int,
    ) -> None:
        self.random = np.random.default_rng(seed)
        slack_blocks = max(slack_blocks, int(ordered))
        self.n_budget, self.n_reserve = budget_blocks, reserve_blocks
        n_slots = budget_blocks + reserve_blocks + slack_blocks
        self.port = ArrayPort(n_slots + spare_slots, block_tokens, ROW_BYTES)
        self.budget = HostBudget(TABLE_BYTES + n_records * RECORD_BYTES)
        self.ws = WorkingSet(
            self.port,
            block_tokens=block_tokens,
            budget_blocks=budget_blocks,
            reserve_blocks=reserve_blocks,
            slack_blocks=slack_blocks,
            budget=self.budget,
            ordered=ordered,
        )
        self.ordered = ordered
        self.block_tokens = block_tokens
        self.twin = HistoryTwin(block_tokens, ROW_BYTES)
        self.resident: set[int] = set()
        self.copies: set[int] = set()
        self.charged: list[Charge] = []
        self.read(n_tokens)

    # what the twin expects

    def rest(self) -> int:
        return -len(self.twin.tokens) % self.block_tokens

    def n_new_blocks(self, n_tokens: int) -> int:
        return max(0, -(-(n_tokens - self.rest()) // self.block_tokens))

    def n_free(self, reply: bool) -> int:
        return self.n_budget + (self.n_reserve if reply else 0) - len(self.resident)

    def resync(self) -> None:
        """After a failed copy the twin takes over what is where; bytes and history it does not."""
        resident = {int(block) for block in self.ws.resident()}
        copies = {block for block in range(self.ws.n_blocks) if self.ws.has_copy(block)}
        assert self.copies <= copies
        assert self.ws.n_tokens == len(self.twin.tokens)
        self.resident, self.copies = resident, copies

    def is_short_of_host(self, n_seals: int, free_bytes: int) -> bool:
        return n_seals * RECORD_BYTES > free_bytes

    # decode calls

    @rule(
        n_tokens=st.integers(1, 14),
        n_rejected=st.integers(0, 3),
        reply=st.booleans(),
        ends=st.sampled_from(["commit"] * 6 + ["fails", "rollback"]),
    )
    def decode(self, n_tokens: int, n_rejected: int, reply: bool, ends: str) -> None:
        n_accepted = n_tokens - (min(n_rejected, n_tokens - 1) if reply else 0)
        before = len(self.twin.tokens)
        fits = self.n_new_blocks(n_tokens) <= max(0, self.n_free(reply))
        assert fits == (n_tokens <= self.ws.room(reply))
        tables_free = self.budget.free
        try:
            cells = self.ws.prepare(n_tokens, reply=reply)
        except CapacityError:
            assert not fits or tables_free < TABLE_BYTES
            return
        assert fits
        self.ws.check()
        tokens = self.random.integers(0, 1000, n_tokens, dtype=np.int32)
        pos = self.random.integers(0, 1000, (n_tokens, 4), dtype=np.int32)
        rows = self.random.integers(0, 256, (n_tokens, sum(ROW_BYTES)), dtype=np.uint8)
        n_done = 0 if ends == "rollback" else n_tokens // 2 if ends == "fails" else n_tokens
        self.port.decode(tokens[:n_done], pos[:n_done], rows[:n_done])
        self.ws.check()
        if ends != "commit":
            self.ws.rollback()
            return
        visible = set(self.port.visible().tolist())
        assert set(cells.tolist()) <= visible
        self.ws.commit(tokens[:n_accepted], pos[:n_accepted])
        self.twin.append(tokens[:n_accepted].tolist(), pos[:n_accepted], rows[:n_accepted])
        self.resident |= set(range(before // self.block_tokens, self.twin.n_blocks))

    @rule(n_tokens=st.integers(1, 30))
    def read(self, n_tokens: int) -> None:
        """Prefill as an engine does: what is full leaves, but for the newest block."""
        while n_tokens > 0:
            if not self.ws.room():
                leaving = self.resident - {self.twin.n_blocks - 1}
                free_bytes, n_seals = self.budget.free, len(leaving - self.copies)
                try:
                    self.ws.evict(leaving)
                except CapacityError:
                    assert self.is_short_of_host(n_seals, free_bytes)
                    return
                self.copies |= leaving
                self.resident -= leaving
            n = min(n_tokens, self.ws.room())
            if not n:
                return
            self.decode(n, 0, False, "commit")
            n_tokens -= n

    @rule(n_tokens=st.integers(1, 3), sure=st.integers(0, 9))
    def call_out_of_order(self, n_tokens: int, sure: int) -> None:
        """While tokens are prepared, nothing else is taken."""
        assume(sure == 9)
        if n_tokens > self.ws.room():
            return
        try:
            self.ws.prepare(n_tokens)
        except CapacityError:
            return
        calls: list[Callable[[], object]] = [
            self.ws.seal,
            self.ws.room,
            lambda: self.ws.truncate(0),
            lambda: self.ws.apply([]),
        ]
        for call in calls:
            try:
                call()
            except StateError:
                continue
            raise AssertionError("taken while tokens are prepared")
        self.ws.rollback()

    # tiers

    @rule(fault=faults)
    def seal(self, fault: int) -> None:
        blocks = {b for b in range(self.twin.n_blocks) if self.twin.is_complete(b)}
        free_bytes, n_seals = self.budget.free, len(blocks - self.copies)
        n_before = self.ws.counters.blocks_sealed
        self.port.fail(fault)
        try:
            self.ws.seal()
        except CapacityError:
            assert self.is_short_of_host(n_seals, free_bytes)
            return
        except TransferError:
            assert 0 < fault <= n_seals
            return
        finally:
            self.port.fail(0)
        self.copies |= blocks
        assert self.ws.counters.blocks_sealed == n_before + n_seals

    def some_blocks(self, seed: int, *, at_most: int) -> set[int]:
        """Drawn evenly: hypothesis alone hardly draws sets that differ from what is resident."""
        random = np.random.default_rng(seed)
        n = random.integers(0, min(at_most, self.twin.n_blocks), endpoint=True)
        return set(random.permutation(self.twin.n_blocks)[:n].tolist())

    @precondition(lambda self: self.resident)
    @rule(seed=seeds, fault=faults, has_last=st.sampled_from([False] * 9 + [True]))
    def evict(self, seed: int, fault: int, has_last: bool) -> None:
        last = self.twin.n_blocks - 1
        blocks = self.some_blocks(seed, at_most=self.twin.n_blocks) - {last}
        if has_last:
            blocks.add(last)
        leaving = blocks & self.resident
        free_bytes, n_seals = self.budget.free, len(leaving - self.copies)
        self.port.fail(fault)
        try:
            n_left = self.ws.evict(blocks)
        except StateError:
            assert last in blocks
            return
        except CapacityError:
            assert self.is_short_of_host(n_seals, free_bytes)
            return
        except TransferError:
            assert 0 < fault <= n_seals
            return
        finally:
            self.port.fail(0)
        assert last not in blocks
        assert n_left == len(leaving)
        self.copies |= leaving
        self.resident -= leaving

    @precondition(lambda self: self.twin.tokens)
    @rule(seed=seeds, fault=faults, has_last=st.sampled_from([True] * 9 + [False]))
    def apply(self, seed: int, fault: int, has_last: bool) -> None:
        last = self.twin.n_blocks - 1
        chosen = self.some_blocks(seed, at_most=self.n_budget + self.n_reserve)
        selection = (chosen | {last}) if has_last else (chosen - {last})
        leaving, incoming = self.resident - selection, selection - self.resident
        free_bytes, n_seals = self.budget.free, len(leaving - self.copies)
        self.port.fail(fault)
        try:
            transfer = self.ws.apply(sorted(selection))
        except StateError:
            assert not has_last
            return
        except CapacityError:
            assert len(selection) > self.n_budget + self.n_reserve or self.is_short_of_host(
                n_seals, free_bytes
            )
            return
        except TransferError:
            assert fault
            self.port.fail(0)
            self.resync()
            return
        finally:
            self.port.fail(0)
        assert (transfer.n_in, transfer.n_out) == (len(incoming), len(leaving))
        assert transfer.n_kept == len(selection) - len(incoming)
        assert transfer.bytes_in == len(incoming) * self.ws.payload_bytes
        assert transfer.bytes_out == n_seals * self.ws.payload_bytes
        self.copies |= leaving
        self.resident = set(selection)
        again = self.ws.apply(sorted(selection))
        assert (again.n_in, again.n_out, again.n_moved) == (0, 0, 0)
        slots = [self.ws.slot_of(block) for block in sorted(selection)]
        if self.ordered:
            assert slots == list(range(len(slots)))
        elif len(selection) <= self.n_budget:
            assert max(slots) < self.n_budget

    @precondition(lambda self: self.twin.tokens)
    @rule(n_tokens=st.integers(0, 12), n_reply_blocks=st.integers(1, 8), fault=faults)
    def make_room(self, n_tokens: int, n_reply_blocks: int, fault: int) -> None:
        last = self.twin.n_blocks - 1
        first = max(0, self.twin.n_blocks - n_reply_blocks)
        evictable = sorted(b for b in self.resident if first <= b < last)
        n_needed = self.n_new_blocks(n_tokens)
        n_leave = max(0, n_needed - self.n_free(True)) if n_needed else 0
        leaving = set(evictable[:n_leave])
        free_bytes, n_seals = self.budget.free, len(leaving - self.copies)
        self.port.fail(fault)
        try:
            n_left = self.ws.make_room(n_tokens, reply_from_block=first)
        except CapacityError:
            assert n_leave > len(evictable) or self.is_short_of_host(n_seals, free_bytes)
            return
        except TransferError:
            assert 0 < fault <= n_seals
            return
        finally:
            self.port.fail(0)
        assert n_left == n_leave
        self.copies |= leaving
        self.resident -= leaving
        assert self.ws.room(reply=True) >= n_tokens

    @precondition(lambda self: self.twin.tokens)
    @rule(seed=seeds, fault=faults)
    def truncate(self, seed: int, fault: int) -> None:
        n_tokens = int(
            np.random.default_rng(seed).integers(0, len(self.twin.tokens), endpoint=True)
        )
        last = (n_tokens - 1) // self.block_tokens
        was_resident = n_tokens == 0 or last in self.resident
        free_bytes = self.budget.free
        self.port.fail(fault)
        try:
            self.ws.truncate(n_tokens)
        except CapacityError:
            assert not was_resident and self.is_short_of_host(1, free_bytes)
            return
        except TransferError:
            assert fault and not was_resident
            self.port.fail(0)
            self.resync()
            return
        finally:
            self.port.fail(0)
        self.twin.cut(n_tokens)
        complete = {b for b in range(self.twin.n_blocks) if self.twin.is_complete(b)}
        self.copies &= complete
        if was_resident:
            self.resident &= set(range(self.twin.n_blocks))
        else:
            before = self.resident & set(range(self.twin.n_blocks))
            self.resync()
            assert last in self.resident
            assert len(before - self.resident) <= 1, "more than one block left"
        assert n_tokens % self.block_tokens == 0 or not self.ws.has_copy(last)

    @rule(is_prepared=st.booleans(), sure=st.integers(0, 19))
    def clear(self, is_prepared: bool, sure: int) -> None:
        assume(sure == 19)
        if is_prepared and self.ws.room():
            self.ws.prepare(1)
        self.ws.clear()
        self.twin.cut(0)
        self.resident, self.copies = set(), set()

    @rule(n_bytes=st.integers(1, 3 * RECORD_BYTES), sure=st.integers(0, 4))
    def summaries_grow(self, n_bytes: int, sure: int) -> None:
        """Somebody else takes from the same limit."""
        assume(sure == 4)
        try:
            self.charged.append(Charge(self.budget, n_bytes, "summaries"))
        except CapacityError:
            assert n_bytes > self.budget.free

    @rule()
    def summaries_go(self) -> None:
        self.charged.clear()

    # what must always hold

    @invariant()
    def memory_is_sound(self) -> None:
        self.ws.check()
        charged = sum(charge.n_bytes for charge in self.charged)
        assert self.budget.used == self.ws.host_bytes + charged <= self.budget.limit
        assert set(self.ws.resident().tolist()) == self.resident
        copies = {block for block in range(self.ws.n_blocks) if self.ws.has_copy(block)}
        assert copies == self.copies
        assert self.ws.n_sealed == len(copies)
        assert self.ws.counters.bytes_out == self.ws.counters.blocks_sealed * self.ws.payload_bytes

    @invariant()
    def history_is_the_twins(self) -> None:
        assert self.ws.tokens.tolist() == self.twin.tokens
        assert [tuple(one) for one in self.ws.pos.tolist()] == self.twin.pos
        assert self.ws.n_blocks == self.twin.n_blocks
        for block in range(self.twin.n_blocks):
            assert self.ws.read(block) == self.twin.block_bytes(block), f"block {block}"

    @invariant()
    def attention_sees_the_resident_tokens(self) -> None:
        seen = {}
        for block in self.resident:
            first = self.ws.slot_of(block) * self.block_tokens
            for i, index in enumerate(self.twin.span(block)):
                seen[first + i] = index
        assert self.port.visible().tolist() == sorted(seen)
        assert self.ws.n_cells_used == len(seen)
        assert self.ws.highest_used_cell == max(seen, default=-1)
        for cell, index in seen.items():
            pos = self.twin.pos[index]
            assert self.port.meta(cell) == (pos, self.twin.tokens[index], pos[2], pos[1])
            assert self.port.rows(cell).tobytes() == self.twin.rows[index]


TestWorkingSet = WorkingSetMachine.TestCase
TestWorkingSet.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
