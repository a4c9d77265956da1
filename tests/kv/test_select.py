"""select against its twin, and the promises one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from oracles import select_twin
from strategies import Choice, choices

from kvmem.errors import CapacityError
from kvmem.kv.select import block_ids, select


def run(choice: Choice, budget_blocks: int | None = None) -> list[int] | None:
    try:
        selection = select(
            choice.scores,
            choice.n_blocks,
            budget_blocks or choice.budget_blocks,
            choice.pins,
            choice.sink_blocks,
            choice.recent_blocks,
            edge=choice.edge,
            edge_threshold=choice.edge_threshold,
        )
    except CapacityError:
        return None
    assert selection.dtype == np.int32
    return [int(block) for block in selection]


@settings(deadline=None)
@given(choices())
def test_select_equals_twin(choice: Choice) -> None:
    expected = select_twin(
        choice.scores.tolist(),
        choice.n_blocks,
        choice.budget_blocks,
        choice.pins,
        choice.sink_blocks,
        choice.recent_blocks,
        choice.edge,
        choice.edge_threshold,
    )
    assert run(choice) == expected


@settings(deadline=None)
@given(choices())
def test_select_keeps_its_promises(choice: Choice) -> None:
    selection = run(choice)
    if selection is None:
        assert len({*choice.pins, choice.n_blocks - 1}) > choice.budget_blocks
        return
    assert selection == sorted(set(selection)), "ascending and unique"
    assert len(selection) == min(choice.budget_blocks, choice.n_blocks), (
        "the budget is used, never passed"
    )
    assert {*choice.pins, choice.n_blocks - 1} <= set(selection), "pins and the newest block are in"
    larger = run(choice, choice.budget_blocks + 1)
    assert larger is not None
    assert set(selection) <= set(larger), "a larger budget only adds"


def test_ties_go_to_the_newer_block() -> None:
    assert select(np.zeros(6), 6, 3, sink_blocks=0).tolist() == [3, 4, 5]
    assert select(np.array([1, 1, 2, 1, 0, 0.0]), 6, 3, sink_blocks=0).tolist() == [2, 3, 5]


def test_a_neighbour_comes_when_its_side_of_the_border_is_hot() -> None:
    scores = np.array([0, 0, 0, 9, 0, 0, 5, 0, 0], dtype=np.float32)
    edge = np.zeros((9, 2), dtype=np.float32)
    plain = select(scores, 9, 3, sink_blocks=0)
    assert plain.tolist() == [3, 6, 8]
    edge[4, 1] = edge[2, 0] = 1  # far sides: of no interest
    assert (
        select(scores, 9, 3, sink_blocks=0, edge=edge, edge_threshold=1).tolist() == plain.tolist()
    )
    edge[4, 0] = 1
    near = select(scores, 9, 3, sink_blocks=0, edge=edge, edge_threshold=1)
    assert near.tolist() == [3, 4, 8], "it comes before the next best score"
    edge[5, 0] = 1  # a neighbour of a neighbour
    assert 5 not in select(scores, 9, 4, sink_blocks=0, edge=edge, edge_threshold=1)


def test_rising_scores_keep_sink_and_tail() -> None:
    assert select(np.arange(10), 10, 4).tolist() == [0, 7, 8, 9]
    assert select(np.arange(10), 10, 4, pins=[3]).tolist() == [0, 3, 8, 9]
    assert select(np.arange(10), 10, 4, sink_blocks=0).tolist() == [6, 7, 8, 9]
    assert select(np.arange(3), 3, 4).tolist() == [0, 1, 2]
    assert select([], 0, 4).tolist() == []


def test_too_many_pins_name_the_numbers() -> None:
    with pytest.raises(CapacityError, match="4 blocks must stay, but the budget is 3 blocks"):
        select(np.zeros(9), 9, 3, pins=[1, 2, 3])
    with pytest.raises(CapacityError, match="2 blocks"):
        select(np.zeros(9), 9, 1, pins=[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": np.array([0, np.nan, 1])}, "block 1 is NaN"),
        ({"scores": np.zeros(4)}, "shape"),
        ({"pins": [3]}, "block 3, but there are 3"),
        ({"pins": [-1]}, "no block ids"),
        ({"pins": [0.5]}, "pins must be a row of block ids"),
        ({"budget_blocks": 0}, "budget_blocks=0"),
        ({"edge": np.zeros((2, 2))}, "edge has shape"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"scores": np.zeros(3), "n_blocks": 3, "budget_blocks": 2}
    with pytest.raises(ValueError, match=message):
        select(**(good | arguments))  # type: ignore[arg-type]


def test_block_ids_takes_whole_numbers_only() -> None:
    assert block_ids(range(3), "x").dtype == np.int32
    assert block_ids([], "x").tolist() == []
    for wrong in (np.array([1.0]), np.array([[1]]), np.array([2**31]), ["a"]):
        with pytest.raises(ValueError, match="x"):
            block_ids(wrong, "x")  # type: ignore[arg-type]
