"""`kvmem demo` on a tiny model: three ways to hold one history, told apart."""

from pathlib import Path

import pytest
from kept import kept_demos

from kvmem.bench.demo import Asked, DemoSpec, Result, Sight, run_demo, strip
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.workload import WorkloadSpec, make_prompt
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab


def test_the_strip_has_a_character_for_each_block() -> None:
    """Ten blocks of history; of the newest three one lies behind it, with the question."""
    asked = Asked(
        question="?",
        value="1",
        answer="1",
        right=True,
        gold=(3, 4),
        sight=Sight(visible=(0, 3, 5, 7, 8, 9, 10), sink_stop=2, newest_start=8, device_bytes=1),
        decode_per_s=1,
    )
    assert strip(asked, 10) == "=..#!+.+=="


def test_what_is_always_visible_is_visible_whatever_is_asked(results: list[Result]) -> None:
    ours, _, _ = results
    for asked in ours.asked:
        shown = strip(asked, ours.n_blocks)
        visible = {block for block in asked.sight.visible if block < ours.n_blocks}
        assert {i for i, mark in enumerate(shown) if mark in "=+#"} == visible
        assert {i for i, mark in enumerate(shown) if mark == "="} == {0, *range(189, 192)}
    # the recent part is counted from the question's block: the fourth last of the history is not in
    assert not all(188 in asked.sight.visible for asked in ours.asked)


@pytest.fixture(scope="module")
def results(tiny_llama: Path) -> list[Result]:
    spec = DemoSpec(
        model=tiny_llama,
        n_tokens=6144,
        budget_tokens=512,
        reserve_tokens=256,
        room_tokens=512,
        n_threads=1,
    )
    steps: list[str] = []
    shown: list[Asked] = []
    results = list(
        run_demo(
            spec,
            report=lambda what, done, total: steps.append(what),
            on_asked=lambda asked, n_blocks: shown.append(asked),
        )
    )
    assert shown == list(results[0].asked)
    assert set(steps) == {"kvmem reads", "full cache reads"}
    return results


def test_all_ways_answer_the_same_six_questions(results: list[Result]) -> None:
    assert [result.name for result in results] == ["kvmem", "newest blocks", "full cache"]
    questions = [[asked.question for asked in result.asked] for result in results]
    assert len(questions[0]) == 6
    assert questions[0] == questions[1] == questions[2]


def test_what_is_visible_is_bounded_and_chosen(results: list[Result]) -> None:
    ours, newest, full = results
    for asked in ours.asked + newest.asked:
        # The question and its answer may lie in a block or two behind the history.
        assert len([block for block in asked.sight.visible if block < ours.n_blocks]) <= 512 // 32
    assert all(asked.sight.visible == tuple(range(full.n_blocks)) for asked in full.asked)
    # Words are shared between question and fact, so that even a random model's scores find some.
    found = [set(asked.gold) & set(asked.sight.visible) for asked in ours.asked]
    assert sum(map(bool, found)) >= 4
    assert not any(set(asked.gold) & set(asked.sight.visible) for asked in newest.asked)


def test_the_device_holds_less_than_the_full_cache(results: list[Result]) -> None:
    ours, newest, full = results
    assert ours.device_bytes == newest.device_bytes
    assert ours.device_bytes * 6 <= full.device_bytes


def test_five_seeds_give_six_kinds_of_facts_each(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = Vocab(model)
        for seed in range(5):
            prompt = make_prompt(Harbor(), vocab, WorkloadSpec(n_tokens=8192, plain=True), seed)
            assert len({question.kind for question in prompt.questions}) == 6


def test_the_kept_demos_over_five_seeds_meet_their_bar() -> None:
    """Five of six on each of the five seeds; the newest blocks alone at most two on any."""
    rights = kept_demos()
    assert list(rights) == [0, 1, 2, 3, 4]
    for name in ("kvmem", "full cache"):
        assert min(right[name] for right in rights.values()) >= 5
    assert max(right["newest blocks"] for right in rights.values()) <= 2
