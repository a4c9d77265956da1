"""Generated histories: exact length, equal for equal seeds, facts where the spans say."""

import random
import re
from collections import Counter

import pytest
from words import Words

from kvmem.bench.generators.agent import Agent
from kvmem.bench.generators.base import Generator
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.generators.office import Office
from kvmem.bench.workload import WorkloadSpec, make_prompt, make_prompts
from kvmem.errors import ConfigError

GENERATORS: list[Generator] = [Harbor(), Office(), Agent()]
SEVERAL = {"values", "hop", "count"}
COMMON = {"the", "a", "is", "of", "at", "for", "to", "under", "in", "has", "will"}
SPEC = WorkloadSpec(n_tokens=4000)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
@pytest.mark.parametrize("n_tokens", [3072, 4000, 4001])
def test_the_history_has_exactly_the_length_and_ends_a_turn(
    generator: Generator, n_tokens: int, words: Words
) -> None:
    prompt = make_prompt(generator, words, WorkloadSpec(n_tokens=n_tokens), seed=1)
    assert len(prompt.history) == n_tokens
    assert words.text(prompt.history).endswith("<|im_end|>\n")


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_gold_spans_hold_the_value_and_lie_outside_head_and_tail(
    generator: Generator, words: Words
) -> None:
    for prompt in make_prompts(generator, words, SPEC, range(4)):
        assert len(prompt.questions) == 6 + 2
        for question in prompt.questions:
            said = [words.text(prompt.history[span.start : span.stop]) for span in question.gold]
            assert (len(said) > 1) == (question.kind in SEVERAL)
            if question.kind == "count":
                assert question.value_text == str(len(said))
            elif question.kind == "values":
                assert all(text.split()[-1] in question.value_text for text in said)
            else:
                assert question.value_text in said[-1]
            for span in question.gold:
                assert span.start >= 0.05 * SPEC.n_tokens
                assert span.stop <= SPEC.n_tokens - 512
            starts = [span.start for span in question.gold]
            assert starts == sorted(starts)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_equal_seeds_give_equal_prompts_and_others_differ(
    generator: Generator, words: Words
) -> None:
    first = make_prompt(generator, words, SPEC, seed=7)
    assert make_prompt(generator, words, SPEC, seed=7) == first
    assert make_prompt(generator, words, SPEC, seed=8).history != first.history


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_every_statement_is_said_once(generator: Generator, words: Words) -> None:
    prompt = make_prompt(generator, words, SPEC, seed=3)
    text = words.text(prompt.history)
    for question in prompt.questions:
        for span in question.gold:
            statement = words.text(prompt.history[span.start : span.stop])
            assert text.count(statement) == 1


def test_a_paraphrased_question_shares_no_rare_word_with_its_fact(words: Words) -> None:
    for generator in GENERATORS:
        for prompt in make_prompts(generator, words, SPEC, range(6)):
            said_where = Counter(re.findall(r"[a-z]+", words.text(prompt.history).lower()))
            kinds = Counter(question.shares_word for question in prompt.questions)
            assert kinds == {True: 6, False: 2}
            for question in prompt.questions:
                span = question.gold[0]
                statement = words.text(prompt.history[span.start : span.stop])
                asked = set(re.findall(r"[a-z]+", question.text.lower()))
                said = set(re.findall(r"[a-z]+", statement.lower()))
                rare = {word for word in (asked & said) - COMMON if said_where[word] < 5}
                assert bool(rare) is question.shares_word


def test_look_alikes_have_the_form_of_the_fact_and_can_be_left_out(words: Words) -> None:
    alone = WorkloadSpec(n_tokens=4000, n_lookalikes=0)
    n_asked = 0
    for seed in range(6):
        with_them = make_prompt(Harbor(), words, SPEC, seed=seed)
        without = make_prompt(Harbor(), words, alone, seed=seed)
        for prompt, n_said in ((with_them, 3), (without, 1)):
            n_codes = sum(question.kind == "code" for question in prompt.questions)
            assert words.text(prompt.history).count("access code for the") == n_said * n_codes
            n_asked += n_codes
    assert n_asked


def test_a_correction_comes_after_the_old_value(words: Words) -> None:
    seen = 0
    for seed in range(6):
        prompt = make_prompt(Harbor(), words, SPEC, seed=seed)
        text = words.text(prompt.history)
        for question in prompt.questions:
            if question.kind == "updated":
                ship = re.search(r"ship (.*)\?", question.text)
                assert ship
                old = text.index(f"The berth number of the ship {ship[1]} is ")
                assert old < text.index(f"the berth number of the ship {ship[1]} is now")
                seen += 1
    assert seen


def test_the_answer_is_prefix_and_value_in_turn(words: Words) -> None:
    prompt = make_prompt(Harbor(), words, WorkloadSpec(n_tokens=4000, plain=True), seed=0)
    for question in prompt.questions:
        assert words.text(question.tokens).endswith("<|im_start|>assistant\n")
        answer = words.text(question.prefix + question.value)
        assert answer.endswith(f" {question.value_text}")


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_a_plain_history_ends_with_an_answered_turn(generator: Generator, words: Words) -> None:
    for seed in range(20):
        prompt = make_prompt(generator, words, WorkloadSpec(n_tokens=2000, plain=True), seed)
        assert len(prompt.history) == 2000
        *_, asked, answer = words.text(prompt.history).removesuffix("\n").split("<|im_start|>")
        assert asked.startswith("user\n") and asked.endswith("<|im_end|>\n")
        assert answer in {f"assistant\n{said}<|im_end|>" for said in answers(generator)}


def answers(generator: Generator) -> set[str]:
    """What the assistant says to prose."""
    rng = random.Random(0)
    turns = [generator.prose(rng)[-1] for _ in range(500)]
    assert {turn.role for turn in turns} == {"assistant"}
    return {"".join(turn.pieces) for turn in turns}


def test_what_cannot_be_generated_is_refused() -> None:
    for n_facts in (0, 7):
        with pytest.raises(ConfigError, match="n_facts"):
            WorkloadSpec(n_facts=n_facts)
    with pytest.raises(ConfigError, match="n_paraphrased"):
        WorkloadSpec(n_paraphrased=6)
    with pytest.raises(ConfigError, match="n_lookalikes"):
        WorkloadSpec(n_lookalikes=3)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_the_shortest_history_is_named_and_can_be_made(generator: Generator, words: Words) -> None:
    with pytest.raises(ConfigError, match="n_tokens is 1024, but must be at least 1213"):
        WorkloadSpec(n_tokens=1024)
    for seed in range(5):
        prompt = make_prompt(generator, words, WorkloadSpec(n_tokens=1213), seed)
        assert len(prompt.history) == 1213


class Letters:
    """A vocabulary that needs many tokens: a turn is longer than what is kept free of facts."""

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        del parse_special
        return list(map(ord, text))


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_no_fact_is_cut_off_at_the_end_of_a_history(generator: Generator) -> None:
    n_refused = 0
    for n_tokens in (1300, 2048, 3072, 4096):
        for seed in range(6):
            try:
                prompt = make_prompt(generator, Letters(), WorkloadSpec(n_tokens=n_tokens), seed)
            except ConfigError:
                n_refused += 1
                continue
            stops = [span.stop for question in prompt.questions for span in question.gold]
            assert max(stops) < n_tokens
    assert 0 < n_refused < 24
