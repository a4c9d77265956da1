"""place: every plan is carried out on a dict, and compared with its twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import place_twin, run_placement
from strategies import Pool, pools, selections_of

from kvmem.kv.place import Placement, place
from kvmem.kv.residency import Residency


def carry_out(placement: Placement, pool: Pool) -> dict[int, int]:
    return run_placement(
        pool.held,
        placement.leaving.tolist(),
        placement.moves.tolist(),
        placement.incoming.tolist(),
    )


def outcome(placement: Placement) -> dict[int, int]:
    return dict(zip(placement.blocks.tolist(), placement.slots.tolist(), strict=True))


def draw_selection(data: st.DataObject, pool: Pool, n_most: int) -> NDArray[np.int32]:
    return data.draw(selections_of(pool, n_most))


@settings(deadline=None)
@given(pools(), st.data(), st.booleans())
def test_a_placement_leads_where_it_says(pool: Pool, data: st.DataObject, ordered: bool) -> None:
    n_most = pool.residency.n_slots - (1 if ordered else 0)
    blocks = draw_selection(data, pool, n_most)
    before = pool.residency.blocks().tolist()
    placement = place(blocks, pool.residency, ordered=ordered)
    assert pool.residency.blocks().tolist() == before, "placing changes nothing"
    assert placement.blocks.tolist() == blocks.tolist()
    assert carry_out(placement, pool) == outcome(placement), "the steps give the slots"
    assert len(set(placement.slots.tolist())) == len(blocks), "one slot a block"
    wanted = set(blocks.tolist())
    assert set(placement.leaving.tolist()) == set(pool.held) - wanted, "the set difference leaves"
    assert {block for block, _ in placement.incoming.tolist()} == wanted - set(pool.held)


@settings(deadline=None)
@given(pools(), st.data())
def test_only_compaction_moves(pool: Pool, data: st.DataObject) -> None:
    blocks = draw_selection(data, pool, pool.residency.n_slots)
    placement = place(blocks, pool.residency)
    slots = place_twin(blocks.tolist(), pool.held, pool.residency.n_slots)
    for block, source, target in placement.moves.tolist():
        assert slots[block] == source == max(slots.values()), "the highest one moves"
        assert source >= pool.residency.n_budget_slots, "out of the budget region nothing does"
        assert target == min(set(range(pool.residency.n_slots)) - set(slots.values())) < source
        slots[block] = target
    assert slots == outcome(placement)
    highest = max(slots.values(), default=-1)
    free = set(range(highest)) - set(slots.values())
    assert highest < pool.residency.n_budget_slots or not free, "it goes on while it helps"


@settings(deadline=None)
@given(pools(), st.data())
def test_ordered_goes_by_position(pool: Pool, data: st.DataObject) -> None:
    blocks = draw_selection(data, pool, pool.residency.n_slots - 1)
    placement = place(blocks, pool.residency, ordered=True)
    assert placement.slots.tolist() == list(range(len(blocks)))
    kept = set(blocks.tolist()) & set(pool.held)
    displaced = [b for b in kept if pool.held[b] != blocks.tolist().index(b)]
    # a ring of displaced blocks costs one move more than it has blocks
    assert len(displaced) <= len(placement.moves) <= len(displaced) + len(displaced) // 2


@settings(deadline=None)
@given(pools(), st.data(), st.booleans())
def test_a_second_call_plans_nothing(pool: Pool, data: st.DataObject, ordered: bool) -> None:
    n_most = pool.residency.n_slots - (1 if ordered else 0)
    blocks = draw_selection(data, pool, n_most)
    held = carry_out(place(blocks, pool.residency, ordered=ordered), pool)
    residency = Residency(
        pool.residency.n_budget_slots, pool.residency.n_reserve_slots, pool.residency.n_slack_slots
    )
    for block, slot in held.items():
        residency.put(block, slot)
    again = place(blocks, residency, ordered=ordered)
    assert outcome(again) == held
    assert not (again.incoming.size or again.leaving.size or again.moves.size)


def test_a_closed_ring_is_opened_with_one_move_more() -> None:
    residency = Residency(4)
    for block, slot in ((0, 1), (1, 2), (2, 0)):
        residency.put(block, slot)
    placement = place(np.arange(3, dtype=np.int32), residency, ordered=True)
    assert len(placement.moves) == 4
    assert carry_out(placement, Pool(residency, {0: 1, 1: 2, 2: 0})) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("blocks", [[1, 1], [2, 1], [-1, 0], [0, 1, 2, 3]])
def test_wrong_selections_are_refused(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        place(np.array(blocks, dtype=np.int32), Residency(2, 1))


def test_ordered_needs_a_slot_to_spare() -> None:
    with pytest.raises(ValueError, match="one to spare"):
        place(np.arange(3, dtype=np.int32), Residency(2, 1), ordered=True)
