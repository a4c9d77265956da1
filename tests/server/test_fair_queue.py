"""Who is next, and who has left."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from kvmem.server.fair_queue import FairQueue


def drain(waiting: FairQueue[str]) -> list[str]:
    taken = []
    while len(waiting):
        item = waiting.get()
        assert item is not None
        taken.append(item)
    return taken


def test_a_flood_of_one_session_does_not_hold_up_another() -> None:
    waiting: FairQueue[str] = FairQueue()
    for i in range(5):
        waiting.put(f"a{i}", "a")
    waiting.put("b0", "b")
    assert waiting.get() == "a0"
    waiting.put("c0", "c")
    waiting.put("b1", "b")
    assert drain(waiting) == ["b0", "c0", "a1", "b1", "a2", "a3", "a4"]


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_of_one_session_the_order_stays_and_none_waits_for_more_than_a_turn_each(
    keys: list[str],
) -> None:
    waiting: FairQueue[str] = FairQueue()
    for i, key in enumerate(keys):
        waiting.put(f"{key}{i:02}", key)
    taken = drain(waiting)
    for key in "abcd":
        own = [item for item in taken if item[0] == key]
        assert own == sorted(own)
        for n, item in enumerate(own):  # before its n-th, each other one has had n + 1 at most
            before = [other[0] for other in taken[: taken.index(item)]]
            assert all(before.count(other) <= n + 1 for other in "abcd" if other != key)


def test_who_leaves_is_gone_and_closing_tells_the_rest() -> None:
    waiting: FairQueue[str] = FairQueue()
    items = ["one", "two", "three"]
    for item in items:
        waiting.put(item, item)
    assert waiting.remove(items[1])
    assert not waiting.remove(items[1])
    assert len(waiting) == 2
    got: list[str | None] = []
    assert waiting.get() == "one"
    assert waiting.close() == ["three"]
    thread = threading.Thread(target=lambda: got.append(waiting.get()))
    thread.start()
    thread.join(10)
    assert got == [None]


def test_who_has_left_costs_its_session_no_turn() -> None:
    waiting: FairQueue[str] = FairQueue()
    tries = [f"a{i}" for i in range(9)]
    for item in tries:  # a user who tries again and again
        waiting.put(item, "a")
    waiting.put("b0", "b")
    waiting.put("b1", "b")
    for item in tries[:-2]:
        assert waiting.remove(item)
    assert drain(waiting) == ["a7", "b0", "a8", "b1"]
    waiting.put("a9", "a")
    waiting.put("b2", "b")
    assert drain(waiting) == ["a9", "b2"]


def test_closing_wakes_who_waits() -> None:
    waiting: FairQueue[str] = FairQueue()
    got: list[str | None] = []
    thread = threading.Thread(target=lambda: got.append(waiting.get()))
    thread.start()
    waiting.close()
    thread.join(10)
    assert got == [None]
