"""The quality tool on a tiny model: references, budgets and the control that must fail."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from words import Words

from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.history import EXACT_MASS, EngineHistory, Reply, position_scores
from kvmem.bench.quality import FULL, GOLD, STOCK, Policy, Record, measure
from kvmem.bench.recall import RecallSpec, read_questions, run_recall
from kvmem.bench.summary import DEFAULT_SIZE, Size, gates, summarise
from kvmem.bench.twin import rotated, scored_slices
from kvmem.bench.workload import Prompt, Question, WorkloadSpec, make_prompt
from kvmem.engine.calibration import Calibration
from kvmem.engine.engine import Engine
from kvmem.engine.fingerprint import fingerprint
from kvmem.engine.prompt import Span
from kvmem.errors import ConfigError
from kvmem.kv.layout import Pair
from kvmem.kv.query import Query
from kvmem.kv.rope import unrotate
from kvmem.kv.scorers import Scores

BLOCK = 32
BUDGET_BLOCKS = 16
N_VOCAB = 64


class PlayedHistory:
    """A history whose `heads` scorer knows the facts and whose model answers well if it sees them.

    Rows put the value on top when a gold block is visible, and token 0 when none is.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._visible: NDArray[np.int32] | None = None
        self._question = prompt.questions[0]
        self.block_tokens = BLOCK
        self.block_bytes = 1000
        self.n_blocks = len(prompt.history) // BLOCK

    def _gold(self) -> set[int]:
        (span,) = self._question.gold
        return set(range(span.start // BLOCK, (span.stop - 1) // BLOCK + 1))

    def restrict(self, selection: NDArray[np.int32] | None) -> None:
        self._visible = selection

    def ask(self, question: Question) -> str:
        self._question = question
        return "all" if self._visible is None else f"{len(self._visible)} blocks"

    def score(self, query: str, scorer: str, *, picked: bool = False) -> Scores:
        assert not picked
        if scorer == "recency":
            return position_scores(self.n_blocks)
        assert query in ("all", f"{BUDGET_BLOCKS} blocks")
        return position_scores(self.n_blocks, first=sorted(self._gold()))

    def bytes_per_token(self, scorer: str, *, picked: bool = False) -> float:
        return 0.0 if scorer == "recency" else 33.0

    def twin_error(self, query: str, scores: Scores, *, picked: bool = False) -> float:
        return 1e-5

    def select(self, scores: Scores, question: Question) -> NDArray[np.int32]:
        del question
        return np.sort(np.argsort(scores.blocks)[-BUDGET_BLOCKS:]).astype(np.int32)

    def logits(self, tokens: Sequence[int], n_last: int) -> NDArray[np.float32]:
        n_value = len(self._question.value)
        rows = np.zeros((n_last, N_VOCAB), np.float32)
        seen = self._visible is None or self._gold() <= set(self._visible.tolist())
        for i, token in enumerate((*tokens, self._question.value[-1])[-n_last:]):
            wanted = token % N_VOCAB if seen or i < n_last - n_value else 0
            rows[i, wanted] = 5.0
        return rows

    def greedy(self, tokens: Sequence[int], n: int) -> Reply:
        seen = self._visible is None or self._gold() <= set(self._visible.tolist())
        text = f"It is {self._question.value_text.upper()}." if seen else "I do not know."
        return Reply(text, 0.1)


def played() -> list[Record]:
    words = Words()
    words.tokenize("".join(f" {chr(97 + i)}" for i in range(26)))
    prompt = make_prompt(Harbor(), words, WorkloadSpec(n_tokens=4000), seed=2)
    policies = [
        Policy("heads", "first"),
        Policy("heads", "ideal", neighbours=False),
        Policy("recency", "none"),
    ]
    return list(measure([prompt], cast(Any, PlayedHistory), None, policies=policies, free=True))


def by_policy(records: list[Record], policy: str) -> list[Record]:
    return [record for record in records if record.policy == policy]


def test_each_policy_answers_each_question() -> None:
    records = played()
    names = {record.policy for record in records}
    assert names == {FULL, GOLD, "heads @first", "heads alone @ideal", "recency"}
    assert all(len(by_policy(records, name)) == 8 for name in names)


def test_a_scorer_that_knows_finds_and_answers_and_recency_does_not() -> None:
    records = played()
    for name in ("heads @first", GOLD):
        for record in by_policy(records, name):
            assert record.gold_recall == 1.0
            assert record.selected_blocks == BUDGET_BLOCKS
            assert record.kl_nats == pytest.approx(0.0, abs=1e-9)
            assert record.top1 == 1.0
            assert record.free
    for record in by_policy(records, "heads @first"):
        assert record.gold_rank == 1
    for record in by_policy(records, "recency"):
        assert record.gold_recall == 0.0
        assert record.kl_nats > 0.0
        assert not record.free
        assert record.gold_rank > BUDGET_BLOCKS


def test_rows_carry_n_intervals_and_kle() -> None:
    rows = {row.policy: row for row in summarise(played())}
    assert rows["heads @first"].n == 6
    assert rows["heads @first"].kle == pytest.approx(1.0)
    assert rows["recency"].kle == pytest.approx(0.0)
    assert rows["recency"].gold_recall == (0.0, 0.0, 0.0)
    assert math.isnan(rows[FULL].gold_rank)
    assert rows["heads @first"].of_full == 1.0
    (gate,) = gates(list(rows.values()), DEFAULT_SIZE)
    assert (gate.policy, gate.passed) == ("heads alone @ideal", True)
    assert gates(list(rows.values()), Size(4000, 512, BLOCK)) == []


def test_a_row_has_the_bytes_of_the_median_question() -> None:
    """A history with many rare words has more of them a token."""
    records = by_policy(played(), "heads @first")
    uneven = [
        replace(r, bytes_per_token=n) for r, n in zip(records, (90.0, *[30.0] * 7), strict=True)
    ]
    (row,) = summarise(uneven)
    assert row.bytes_per_token == 30.0


@pytest.fixture(scope="module")
def tiny_records(tiny_llama: Path) -> list[Record]:
    spec = RecallSpec(
        model=tiny_llama,
        n_tokens=3072,
        n_prompts=1,
        n_facts=3,
        budget_tokens=512,
        block_tokens=BLOCK,
        n_threads=1,
    )
    return list(run_recall(spec))


def test_an_engine_runs_all_policies(tiny_records: list[Record]) -> None:
    names = {record.policy for record in tiny_records}
    assert {FULL, STOCK, GOLD, "fused @first", "heads @ideal", "lexical", "recency"} <= names
    assert len(tiny_records) == (3 + 2) * len(names)
    for record in tiny_records:
        if record.policy not in (FULL, STOCK):
            assert record.selected_blocks <= 512 // BLOCK
        assert math.isfinite(record.kl_nats)


def test_full_attention_is_its_own_reference_and_gold_sees_the_facts(
    tiny_records: list[Record],
) -> None:
    for record in by_policy(tiny_records, FULL):
        assert record.kl_nats == 0.0
        assert record.top1 == 1.0
    assert all(record.gold_recall == 1.0 for record in by_policy(tiny_records, GOLD))
    assert all(record.gold_recall < 0.5 for record in by_policy(tiny_records, "recency"))


def test_what_is_visible_changes_the_logits(tiny_records: list[Record]) -> None:
    """A random model answers nothing, but it must see exactly what was selected."""
    assert all(record.kl_nats > 1e-4 for record in by_policy(tiny_records, "recency"))
    # The history was read in pieces under the budget, so stock K and V differ from ours.
    assert all(record.kl_nats > 0 for record in by_policy(tiny_records, STOCK))


def test_calibrated_pairs_and_exact_mass_are_policies(tiny_llama: Path, tmp_path: Path) -> None:
    pairs = Calibration(
        fingerprint=fingerprint(tiny_llama),
        type_k="q8_0",
        type_v="q8_0",
        pairs=((0, 1), (1, 0), (1, 1), (0, 0)),
        slice_tokens=8,
    )
    pairs.save(tmp_path / "all.json")
    spec = RecallSpec(
        model=tiny_llama,
        n_prompts=1,
        n_facts=2,
        n_paraphrased=0,
        stock=False,
        policies=(
            Policy("heads", "first"),
            Policy("heads", "first", picked=True),
            Policy("heads", "first", neighbours=False),
            Policy(EXACT_MASS, "ideal", neighbours=False),
            Policy("recency", "none"),
        ),
        calibration=str(tmp_path / "all.json"),
        n_threads=1,
    )
    records = list(run_recall(spec))
    of = {name: by_policy(records, name) for name in {record.policy for record in records}}
    assert len(of["heads* @first"]) == len(of["heads @first"]) == 2
    assert all(record.new_blocks == 0 for record in of["recency"])
    assert any(record.new_blocks > 0 for record in of["exact mass alone @ideal"])
    with pytest.raises(ConfigError, match="calibration"):
        list(run_recall(replace(spec, calibration="off")))


def test_calibrated_pairs_score_with_an_equal_say(tiny_llama: Path) -> None:
    pairs = Calibration(
        fingerprint="", type_k="q8_0", type_v="q8_0", pairs=((1, 0), (0, 1)), slice_tokens=4
    )
    spec = RecallSpec(model=tiny_llama, n_prompts=1, n_threads=1)
    with Engine(spec.engine(tiered=True)) as engine:
        prompt = make_prompt(
            Harbor(), engine.vocab, WorkloadSpec(n_facts=1, n_paraphrased=0), seed=0
        )
        history = EngineHistory.read(engine, prompt.history, calibration=pairs)
        query = history.ask(prompt.questions[0])
        found = history.score(query, "heads", picked=True).blocks
        fine = history.summaries(slice_tokens=4)
        each = scored_slices(query, fine, [Pair(1, 0), Pair(0, 1)])
    wanted = (each / each.sum(axis=1, keepdims=True)).sum(axis=0).reshape(len(found), -1)
    assert np.allclose(found, wanted.sum(axis=1), rtol=1e-4)


def test_exact_mass_is_what_attention_gives_each_block(tiny_llama: Path) -> None:
    """Its keys and queries carry their positions: turned forward and back they are as before."""
    spec = RecallSpec(model=tiny_llama, n_prompts=1, n_threads=1)
    with Engine(spec.engine(tiered=True)) as engine:
        prompt = make_prompt(
            Harbor(), engine.vocab, WorkloadSpec(n_facts=1, n_paraphrased=0), seed=0
        )
        history = EngineHistory.read(engine, prompt.history)
        history.restrict(None)
        query = history.ask(prompt.questions[0])
        scores = history.score(query, EXACT_MASS)
        layer = engine.tiered.layout.layers[0]
        rows = np.random.default_rng(0).normal(size=(5, 2, layer.head_dim_k)).astype(np.float32)
        pos = np.tile(np.array([7, 400, 2999, 3000, 3001], np.int32)[:, None], (1, 4))
        turned = rotated(rows, pos, layer.rope_k)
        assert not np.allclose(turned, rows, atol=0.1)
        unrotate(turned, pos, layer.rope_k)
        assert np.allclose(turned, rows, atol=1e-5)
    n_rows = query.n_rows * sum(layer.n_head for layer in query.layout.layers)
    assert scores.blocks.sum() == pytest.approx(n_rows, rel=1e-5)
    assert scores.blocks.min() >= 0


def test_a_history_can_be_read_by_what_its_chunks_ask_for(tiny_llama: Path) -> None:
    spec = RecallSpec(
        model=tiny_llama,
        n_prompts=1,
        n_facts=1,
        n_paraphrased=0,
        stock=False,
        policies=(Policy("recency", "none"),),
        n_threads=1,
    )
    plain = list(run_recall(spec))
    chosen = list(run_recall(replace(spec, by_chunk=True)))
    assert [r.gold_recall for r in chosen] == [r.gold_recall for r in plain]
    # the keys and values were computed while other blocks were visible
    assert by_policy(chosen, "recency")[0].kl_nats != by_policy(plain, "recency")[0].kl_nats


def said(history: EngineHistory, query: Query) -> dict[str, NDArray[np.float32]]:
    names = ("heads", "cosine", EXACT_MASS, "lexical")
    found = {name: history.score(query, name).blocks for name in names}
    return {**found, "heads*": history.score(query, "heads", picked=True).blocks}


@pytest.mark.parametrize("part", ["keys", "words"])
def test_a_part_that_is_mixed_up_speaks_for_other_blocks(tiny_llama: Path, part: str) -> None:
    pairs = Calibration(
        fingerprint="", type_k="q8_0", type_v="q8_0", pairs=((1, 0), (0, 1)), slice_tokens=4
    )
    with Engine(RecallSpec(model=tiny_llama, n_threads=1).engine(tiered=True)) as engine:
        prompt = make_prompt(Harbor(), engine.vocab, WorkloadSpec(), seed=0)
        history = EngineHistory.read(engine, prompt.history, calibration=pairs)
        history.restrict(None)
        query = history.ask(prompt.questions[0])
        before = said(history, query)
        order = history.mix_up(5, keys=part == "keys", words=part == "words")
        after = said(history, query)
        assert not np.array_equal(order, np.arange(len(order)))
        for name, blocks in before.items():
            is_mixed = (name == "lexical") == (part == "words")
            assert np.allclose(after[name], blocks[order] if is_mixed else blocks, rtol=1e-4), name
        history.mix_up(5, keys=False, words=False)
        for name, blocks in said(history, query).items():
            assert np.allclose(blocks, before[name], rtol=1e-6), name


def test_a_control_loses_what_it_mixes_up_and_nothing_else(root: Path) -> None:
    """On the trained hybrid, whose heads find facts; words find them on any model."""
    spec = RecallSpec(
        model=root / "bench/recall_model/recall-qwen35.gguf",
        questions=root / "bench/recall_model/heldout.jsonl",
        n_tokens=1024,
        n_prompts=2,
        budget_tokens=256,
        block_tokens=16,
        n_threads=1,
    )
    policies = (Policy("heads", "first"), Policy("lexical", "none"))
    with Engine(spec.engine(tiered=True)) as engine:
        prompts = read_questions(spec, engine.model, engine.vocab)

        def gold_recall(*parts: str) -> list[float]:
            def read(prompt: Prompt) -> EngineHistory:
                history = EngineHistory.read(engine, prompt.history)
                history.mix_up(prompt.seed, keys="keys" in parts, words="words" in parts)
                return history

            rows = {
                row.policy: row
                for row in summarise([*measure(prompts, read, None, policies=policies)])
            }
            return [rows[policy.name].gold_recall.mean for policy in policies]

        heads, lexical = gold_recall()
        assert min(heads, lexical) >= 0.7  # seen: .77 and .99
        without_keys, same_words = gold_recall("keys")
        assert without_keys <= heads / 2
        assert same_words == lexical
        same_heads, without_words = gold_recall("words")
        assert same_heads == heads
        assert without_words <= lexical / 2


def test_a_history_may_end_inside_a_block(tiny_llama: Path) -> None:
    """What stands in the open block is visible, and no scorer ranks it."""
    spec = RecallSpec(model=tiny_llama, n_tokens=3000, n_threads=1)
    policies = (Policy("lexical", "none"), Policy("heads", "first"), Policy(EXACT_MASS, "ideal"))
    with Engine(spec.engine(tiered=True)) as engine:
        prompt = make_prompt(Harbor(), engine.vocab, WorkloadSpec(n_tokens=3000), seed=0)
        last = replace(prompt.questions[0], gold=(Span(2990, 2996),))
        both = replace(prompt.questions[1], gold=(Span(70, 74), Span(2990, 2996)))
        prompt = replace(prompt, questions=(last, both))
        history = EngineHistory.read(engine, prompt.history)
        for _ in range(2):
            records = list(measure([prompt], lambda prompt: history, None, policies=policies))
            scored = [record for record in records if record.policy not in (FULL, GOLD)]
            assert [math.isnan(record.gold_rank) for record in scored] == [True] * 3 + [False] * 3
            assert all(record.gold_recall >= 6 / 10 for record in records)
            rows = {row.policy: row for row in summarise(records)}
            assert rows["lexical"].gold_rank == scored[3].gold_rank
            history.mix_up(0)


def test_large_blocks_leave_room_for_the_question(tiny_llama: Path) -> None:
    spec = RecallSpec(
        model=tiny_llama,
        n_prompts=1,
        n_facts=1,
        n_paraphrased=0,
        block_tokens=128,
        stock=False,
        policies=(Policy("lexical", "none"),),
        n_threads=1,
    )
    found = {record.policy: record.selected_blocks for record in run_recall(spec)}
    assert 2 <= found["lexical"] <= 512 // 128 - 1


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"budget_tokens": 3072}, "budget_tokens"),
        ({"n_prompts": 0}, "n_prompts"),
        ({"generator": "poems"}, "generator"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, object], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting):
        RecallSpec(model=tmp_path, **fields)  # type: ignore[arg-type]
