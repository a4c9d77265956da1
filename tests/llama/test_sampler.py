"""Samplers: greedy, seeded, biased, constrained; what upstream would abort on is an exception."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem.errors import RequestError, StateError
from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.sampler import Sampler
from kvmem.llama.vocab import Vocab

PROMPT = "<|im_start|>user\nthe light of the tower<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocab:
    return Vocab(model)


@pytest.fixture(scope="module")
def context(model: Model, vocab: Vocab) -> Iterator[Context]:
    """A context whose last batch left one row of logits."""
    with Context(model, n_ctx=256) as context:
        tokens = np.array(vocab.tokenize(PROMPT), np.int32)
        context.decode(tokens, np.arange(len(tokens), dtype=np.int32))
        yield context


def draws(sampler: Sampler, context: Context, n: int) -> list[int]:
    return [sampler.sample(context) for _ in range(n)]


def test_temperature_zero_is_the_largest_logit(model: Model, context: Context) -> None:
    with Sampler(model, {"temperature": 0}) as sampler:
        assert draws(sampler, context, 3) == [int(context.logits().argmax())] * 3


def test_equal_seeds_draw_alike_and_others_do_not(model: Model, context: Context) -> None:
    runs = []
    for seed in (7, 7, 8):
        with Sampler(model, {"seed": seed, "temperature": 2.0, "top_k": 0}) as sampler:
            assert sampler.seed == seed
            runs.append(draws(sampler, context, 12))
    assert runs[0] == runs[1] != runs[2]


def test_without_a_seed_one_is_drawn(model: Model) -> None:
    with Sampler(model) as one, Sampler(model, {"seed": -1}) as other:
        assert one.seed != other.seed


def test_draws_follow_the_softmax(model: Model, context: Context) -> None:
    """2,000 draws without truncation against the float64 softmax: total variation below 0.1."""
    params = {"seed": 1, "temperature": 0.5, "samplers": ["temperature"]}
    logits = context.logits().astype(np.float64) / 0.5
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    with Sampler(model, params) as sampler:
        counts = Counter(draws(sampler, context, 2000))
    seen = np.zeros_like(expected)
    seen[list(counts)] = np.array(list(counts.values())) / 2000
    assert np.abs(seen - expected).sum() / 2 < 0.1


def test_logit_bias_forbids_and_forces(model: Model, context: Context) -> None:
    best, second = np.argsort(context.logits())[::-1][:2].tolist()
    with Sampler(model, {"temperature": 0, "logit_bias": [[best, None]]}) as sampler:
        assert sampler.sample(context) == second
    with Sampler(model, {"temperature": 0, "logit_bias": [[0, 1000.0]]}) as sampler:
        assert sampler.sample(context) == 0


def test_ignore_eos_beats_a_bias_towards_every_end_token(
    model: Model, vocab: Vocab, context: Context
) -> None:
    bias = [[t, 100.0] for t in range(vocab.n_tokens) if vocab.is_eog(t)]
    assert len(bias) >= 2
    with Sampler(model, {"temperature": 0, "logit_bias": bias}) as sampler:
        assert vocab.is_eog(sampler.sample(context))
    with Sampler(model, {"temperature": 0, "logit_bias": bias, "ignore_eos": True}) as sampler:
        assert not vocab.is_eog(sampler.sample(context))


def test_the_repeat_penalty_sees_prompt_and_reply(model: Model, context: Context) -> None:
    best = int(context.logits().argmax())
    for is_generated in (True, False):
        with Sampler(model, {"temperature": 0, "presence_penalty": 1000.0}) as sampler:
            assert sampler.sample(context) == best
            sampler.accept(best, is_generated=is_generated)
            assert sampler.sample(context) != best


def test_a_grammar_binds_and_refuses_what_it_did_not_choose(
    model: Model, vocab: Vocab, context: Context
) -> None:
    with Sampler(model, {"temperature": 0, "grammar": 'root ::= "yes" | "no"'}) as sampler:
        first = sampler.sample(context)
        assert vocab.piece(first) in (b"y", b"n")
        with pytest.raises(RequestError, match="was not chosen under the grammar"):
            sampler.accept(vocab.eos)
        sampler.accept(first)
        assert vocab.piece(sampler.sample(context)) in (b"e", b"es", b"o")


def test_a_grammar_that_biases_contradict_is_a_request_error(
    model: Model, vocab: Vocab, context: Context
) -> None:
    forbidden = [[vocab.tokenize(letter)[0], None] for letter in "yn"]
    params = {"temperature": 0, "grammar": 'root ::= "yes" | "no"', "logit_bias": forbidden}
    with (
        Sampler(model, params) as sampler,
        pytest.raises(RequestError, match="no token fits the grammar"),
    ):
        sampler.accept(sampler.sample(context))


def test_a_prompt_is_accepted_at_once(model: Model, context: Context) -> None:
    best = int(context.logits().argmax())
    with Sampler(model, {"temperature": 0, "presence_penalty": 1000.0}) as sampler:
        sampler.accept_prompt(np.array([], np.int32))
        assert sampler.sample(context) == best
        sampler.accept_prompt(np.array([1, best], np.int32))
        assert sampler.sample(context) != best
        with pytest.raises(RequestError, match="token -1 is not in the vocabulary"):
            sampler.accept_prompt(np.array([-1], np.int32))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"presence_penalty": 3.0},
        {"repeat_penalty": 1.7, "frequency_penalty": 1.0, "repeat_last_n": 200},
        {"dry_multiplier": 4.0, "dry_base": 1.5, "dry_allowed_length": 1},
        {"dry_multiplier": 4.0, "dry_penalty_last_n": 300, "dry_sequence_breakers": ["\n"]},
    ],
    ids=str,
)
def test_the_end_of_a_prompt_is_all_that_a_sampler_remembers(
    model: Model, context: Context, params: dict[str, Any]
) -> None:
    """As if each token of the prompt had been accepted by itself."""
    prompt = np.random.default_rng(0).integers(0, 30, 1000).astype(np.int32)
    seed = {"temperature": 1.5, "seed": 3, **params}
    with Sampler(model, seed) as at_once, Sampler(model, seed) as one_by_one:
        at_once.accept_prompt(prompt)
        for token in prompt.tolist():
            one_by_one.accept(token, is_generated=False)
        for _ in range(20):
            token = at_once.sample(context)
            assert one_by_one.sample(context) == token
            assert at_once.candidates(1000) == one_by_one.candidates(1000)
            at_once.accept(token)
            one_by_one.accept(token)


def constraint_of(vocab: Vocab, text: str, trigger: str) -> dict[str, Any]:
    [token] = vocab.tokenize(trigger)
    triggers = [{"type": 0, "value": trigger, "token": token}]
    return {"grammar": text, "lazy": True, "triggers": triggers}


def test_a_lazy_grammar_waits_for_its_trigger(model: Model, vocab: Vocab, context: Context) -> None:
    lazy = constraint_of(vocab, 'root ::= "<tool_call>" "ok"', "<tool_call>")
    [trigger] = vocab.tokenize("<tool_call>")
    for bias, expected in (([], None), ([[trigger, 1000.0]], b"o")):
        with Sampler(model, {"temperature": 0, "constraint": lazy, "logit_bias": bias}) as sampler:
            first = sampler.sample(context)
            sampler.accept(first)
            if expected is None:
                assert first == int(context.logits().argmax())
            else:
                assert first == trigger
                assert vocab.piece(sampler.sample(context)) == expected


def test_a_budget_counts_from_the_generation_prompt(
    model: Model, vocab: Vocab, context: Context
) -> None:
    reasoning = {"start": "<think>", "ends": ["</think>"], "budget": 2, "message": "x"}
    params = {
        "temperature": 0, "reasoning": reasoning, "logit_bias": [[vocab.tokenize("a")[0], 1000.0]],
    }  # fmt: skip
    for prompt, expected in (("<think>", "aax</think>a"), ("", "aaaaa")):
        with Sampler(model, {**params, "generation_prompt": prompt}) as sampler:
            said = []
            for _ in expected.replace("</think>", "e"):
                said.append(sampler.sample(context))
                sampler.accept(said[-1])
        assert vocab.detokenize(said) == expected


def test_a_clone_goes_on_alike_and_apart(model: Model, context: Context) -> None:
    params = {"seed": 5, "temperature": 2.0, "presence_penalty": 3.0}
    with Sampler(model, params) as sampler:
        sampler.accept(sampler.sample(context))
        copy = sampler.clone()
        assert draws(copy, context, 8) == draws(sampler, context, 8)
        sampler.close()
        assert isinstance(copy.sample(context), int)
        copy.close()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"temprature": 1}, "temprature: unknown sampling parameter"),
        ({"temperature": "hot"}, 'temperature: a number is needed, not "hot"'),
        ({"temperature": float("inf")}, "cannot be written as JSON"),
        ({"top_k": 1e12}, "top_k: the number 1000000000000.0 is out of range"),
        ({"seed": -2}, "seed: the number -2 is out of range"),
        ({"mirostat": 3}, "mirostat: 0, 1 or 2 is needed, not 3"),
        ({"repeat_penalty": 0}, "must be finite and greater than 0"),
        ({"logit_bias": [[1 << 20, 1.0]]}, "token 1048576 is not in the vocabulary"),
        ({"logit_bias": [["a", 1.0]]}, "logit_bias: "),
        ({"samplers": ["guess"]}, "samplers: an unknown sampler is named"),
        ({"samplers": ["top_k", "penalties", "top_k"]}, "samplers: the sampler top_k is named tw"),
        ({"samplers": ["temp", "temperature"]}, "the sampler temperature is named twice"),
        ({"samplers": ["top_k", "infill"]}, "samplers: the sampler infill compares all tokens"),
        ({"dry_sequence_breakers": ["x"] * 129}, "dry_sequence_breakers: at most 128 .* 129"),
        ({"grammar": "root ::= " + "(" * 60_000 + "[a]" + ")" * 60_000}, "more than 16384 rules"),
        ({"grammar": "root ::= " + "(" * 9_000 + "[a]" + ")" * 9_000}, "in more than 8192 ways"),
        ({"grammar": "root ::= ("}, "grammar: line 1, rule root: a parenthesis"),
        ({"grammar": 'root ::= "a"{5,3}'}, "minimum above its maximum"),
        ({"ignore_eos": 1}, "ignore_eos: "),
        ({"constraint": {"grammar": "root ::= [a]"}}, "constraint: "),
        (
            {"constraint": {"grammar": "root ::= [a]", "lazy": True, "triggers": []}},
            "a lazy grammar needs a trigger",
        ),
        (
            {
                "constraint": {
                    "grammar": "root ::= [a]",
                    "lazy": True,
                    "triggers": [{"type": 9, "value": "", "token": 0}],
                }
            },
            "no trigger has the type 9",
        ),
        ({"reasoning": {"start": "", "ends": ["x"]}}, "a start and an end are needed"),
        ({"reasoning": {"start": "<think>"}}, "reasoning: "),
    ],
)
def test_wrong_parameters_are_named(model: Model, params: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Sampler(model, params)


def test_rows_and_tokens_that_do_not_exist(model: Model, context: Context) -> None:
    with Sampler(model) as sampler:
        for row in (0, 500, -2):
            with pytest.raises(RequestError, match=f"row {row} of the last batch has no logits"):
                sampler.sample(context, row)
        for token in (-1, 1 << 20):
            with pytest.raises(RequestError, match=f"token {token} is not in the vocabulary"):
                sampler.accept(token)


def test_close_is_idempotent_and_final(model: Model, context: Context) -> None:
    sampler = Sampler(model)
    sampler.close()
    sampler.close()
    for use in (lambda: sampler.sample(context), lambda: sampler.accept(1), sampler.clone):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_sampler_notices_that_its_model_is_gone(tiny_llama: Path) -> None:
    model = Model(tiny_llama)
    sampler = Sampler(model)
    model.close()
    with pytest.raises(StateError, match="is closed"):
        sampler.accept(1)
    sampler.close()
