"""Several histories that take turns on one device, under random calls and failing copies."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import HistoryTwin
from strategies import faults, seeds

from kvmem.errors import CapacityError, TransferError
from kvmem.kv.budget import HostBudget
from kvmem.kv.history import History
from kvmem.kv.port import ArrayPort
from kvmem.kv.working_set import WorkingSet

ROW_BYTES = (3, 5, 2)
RECORD_BYTES = 4096
TABLE_BYTES = 64 * 1024
MAX_HISTORIES = 5


class HistoriesMachine(RuleBasedStateMachine):
    """After every step all bytes of all histories are those of their twins."""

    @initialize(
        block_tokens=st.integers(1, 4),
        budget_blocks=st.integers(2, 4),
        reserve_blocks=st.integers(1, 3),
        ordered=st.booleans(),
        n_records=st.sampled_from([4, 15, 60, 60, 60]),
        n_tokens=st.integers(0, 40),
        seed=seeds,
    )
    def start(
        self,
        block_tokens: int,
        budget_blocks: int,
        reserve_blocks: int,
        ordered: bool,
        n_records: int,
        n_tokens: int,
        seed: int,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.limit_blocks = budget_blocks + reserve_blocks
        self.block_tokens = block_tokens
        self.port = ArrayPort(self.limit_blocks + 1, block_tokens, ROW_BYTES)
        self.budget = HostBudget(TABLE_BYTES + n_records * RECORD_BYTES)
        self.ws = WorkingSet(
            self.port,
            block_tokens=block_tokens,
            budget_blocks=budget_blocks,
            reserve_blocks=reserve_blocks,
            slack_blocks=1,
            budget=self.budget,
            ordered=ordered,
        )
        self.twin = HistoryTwin(block_tokens, ROW_BYTES)
        # what is not on the device, its twin, and what was resident of it
        self.parked: list[tuple[History, HistoryTwin, list[int]]] = []
        self.read(n_tokens)

    @rule(n_tokens=st.integers(1, 20), reply=st.booleans())
    def read(self, n_tokens: int, reply: bool = False) -> None:
        """Token by token; when there is no room, all but the newest block leave."""
        for _ in range(n_tokens):
            try:
                if not self.ws.room(reply):
                    self.ws.evict(self.ws.resident().tolist()[:-1])
                if not self.ws.room(reply):
                    return
                self.ws.prepare(1, reply=reply)
            except CapacityError:
                return
            tokens = self.random.integers(0, 1000, 1, dtype=np.int32)
            pos = self.random.integers(0, 1000, (1, 4), dtype=np.int32)
            rows = self.random.integers(0, 256, (1, sum(ROW_BYTES)), dtype=np.uint8)
            self.port.decode(tokens, pos, rows)
            self.ws.commit(tokens, pos)
            self.twin.append(tokens.tolist(), pos, rows)

    @precondition(lambda self: self.twin.tokens)
    @rule(seed=seeds, fault=faults)
    def apply(self, seed: int, fault: int) -> None:
        random = np.random.default_rng(seed)
        n = random.integers(0, min(self.limit_blocks - 1, self.twin.n_blocks), endpoint=True)
        chosen = set(random.permutation(self.twin.n_blocks)[:n].tolist())
        self.attempt(lambda: self.ws.apply(sorted(chosen | {self.twin.n_blocks - 1})), fault)

    @precondition(lambda self: self.twin.tokens)
    @rule(seed=seeds, fault=faults)
    def truncate(self, seed: int, fault: int) -> None:
        n_tokens = int(np.random.default_rng(seed).integers(0, len(self.twin.tokens)))
        if self.attempt(lambda: self.ws.truncate(n_tokens), fault):
            self.twin.cut(n_tokens)

    @precondition(lambda self: len(self.parked) < MAX_HISTORIES)
    @rule(which=st.integers(0, 9), seed=seeds, fault=faults)
    def branch(self, which: int, seed: int, fault: int) -> None:
        histories = [(self.ws.history, self.twin), *(one[:2] for one in self.parked)]
        source, twin = histories[which % len(histories)]
        n_tokens = int(np.random.default_rng(seed).integers(0, len(twin.tokens), endpoint=True))
        fresh: list[History] = []
        if self.attempt(lambda: fresh.append(self.ws.branch(source, n_tokens)), fault):
            twin = deepcopy(twin)
            twin.cut(n_tokens)
            assert fresh[0].n_shared >= n_tokens // self.block_tokens
            self.parked.append((fresh[0], twin, fresh[0].resident_when_it_left().tolist()))

    @precondition(lambda self: self.parked)
    @rule(which=st.integers(0, 9), fault=faults)
    def switch(self, which: int, fault: int) -> None:
        target, twin, window = self.parked[which % len(self.parked)]
        before, present = self.ws.history, self.twin
        resident = self.ws.resident().tolist()
        slots = {block: self.ws.slot_of(block) for block in resident}
        copies_before = self.ws.counters.blocks_in
        is_done = self.attempt(lambda: self.ws.switch(target), fault)
        if not is_done and self.ws.history is before:
            return
        self.parked.append((before, present, resident))
        if not is_done:
            assert self.ws.history is not target, "what is not whole on the device is not there"
            self.twin = HistoryTwin(self.block_tokens, ROW_BYTES)
            return
        assert self.ws.history is target
        self.parked = [one for one in self.parked if one[0] is not target]
        self.twin = twin
        assert self.ws.resident().tolist() == window
        both = [b for b in window if b in slots and present.is_complete(b) and twin.is_complete(b)]
        stayed = [b for b in both if self.ws.slot_of(b) == slots[b]]
        same = [b for b in both if self.is_one_record(before, target, b)]
        assert set(same) <= set(stayed), "shared blocks keep their slots"
        assert self.ws.counters.blocks_in - copies_before == len(window) - len(same)

    def is_one_record(self, one: History, other: History, block: int) -> bool:
        first = one.store.addresses()
        return block < len(first) and first[block] in other.store.addresses()

    @precondition(lambda self: self.parked)
    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        history, _, _ = self.parked.pop(which % len(self.parked))
        history.forget()
        assert (history.n_tokens, history.n_records, history.table_bytes) == (0, 0, 0)

    def attempt(self, call: object, fault: int) -> bool:
        """Whether the call was done; if a copy failed, or the host is full, nothing is lost."""
        assert callable(call)
        self.port.fail(fault)
        try:
            call()
        except CapacityError:
            return False
        except TransferError:
            assert fault
            return False
        finally:
            self.port.fail(0)
        return True

    @invariant()
    def memory_is_sound(self) -> None:
        self.ws.check([history for history, _, _ in self.parked])
        tables = sum(history.table_bytes for history, _, _ in self.parked)
        assert self.budget.used == self.ws.host_bytes + tables <= self.budget.limit

    @invariant()
    def histories_are_their_twins(self) -> None:
        assert self.ws.tokens.tolist() == self.twin.tokens
        for block in range(self.twin.n_blocks):
            assert self.ws.read(block) == self.twin.block_bytes(block), f"block {block}"
        for history, twin, _ in self.parked:
            assert history.tokens.tolist() == twin.tokens
            for block in range(twin.n_blocks):
                assert history.read(block) == twin.block_bytes(block), f"parked block {block}"

    @invariant()
    def attention_sees_the_resident_tokens(self) -> None:
        seen = {}
        for block in self.ws.resident().tolist():
            first = self.ws.slot_of(block) * self.block_tokens
            for i, index in enumerate(self.twin.span(block)):
                seen[first + i] = index
        assert self.port.visible().tolist() == sorted(seen)
        for cell, index in seen.items():
            assert self.port.rows(cell).tobytes() == self.twin.rows[index]


TestHistories = HistoriesMachine.TestCase
TestHistories.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
