"""Sampling fields of a request, and where its reply ends: the same for every kind of completion."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvmem.chat.fields import (
    FieldError,
    UnsupportedFieldError,
    is_finite_number,
    read_bool,
    read_integer,
    read_list,
    read_number,
)
from kvmem.chat.text import check_tokens
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import RequestError
from kvmem.llama.sampler import describe_sampling
from kvmem.llama.vocab import Vocab

__all__ = [
    "MAX_REPLIES",
    "read_max_tokens",
    "read_n_replies",
    "read_sampling",
    "read_stop",
    "read_time_limit",
    "resolve_sampling",
]

MAX_REPLIES = 16

NUMBER = re.compile(r"-?\d{1,18}")
MAX_SEED = (1 << 32) - 1
MAX_TOKEN = (1 << 31) - 1
MAX_LAST_N = 1 << 20  # -1 asks for the whole history; the sampler wants a number

# llama-server's; what says nothing (false, an empty list) is taken
NOT_BUILT = ("grammar_lazy", "grammar_triggers", "lora")

# field of the request -> (name for the sampler, least, most); those that SamplingParams lacks
EXTRA_NUMBERS: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "typical_p": ("typical_p", 0, 1),
        "top_n_sigma": ("top_n_sigma", -1, 1e6),
        "xtc_probability": ("xtc_probability", 0, 1),
        "xtc_threshold": ("xtc_threshold", 0, 1),
        "dynatemp_range": ("dynatemp_range", 0, 1e6),
        "dynatemp_exponent": ("dynatemp_exponent", -1e6, 1e6),
        "dry_multiplier": ("dry_multiplier", 0, 1e6),
        "dry_base": ("dry_base", 0, 1e6),
        "mirostat_tau": ("mirostat_tau", 0, 1e6),
        "mirostat_eta": ("mirostat_eta", 0, 1e6),
        "adaptive_target": ("adaptive_target", -1, 1),
        "adaptive_decay": ("adaptive_decay", 0, 0.99),
    }
)
EXTRA_INTEGERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "repeat_last_n": (-1, MAX_LAST_N),
        "dry_allowed_length": (0, MAX_LAST_N),
        "dry_penalty_last_n": (-1, MAX_LAST_N),
        "min_keep": (0, MAX_LAST_N),
        "mirostat": (0, 2),
    }
)


def read_max_tokens(body: dict[str, Any], default: int | None) -> int | None:
    """The first of the three names that is set; -1 asks for all there is room for."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = read_integer(body, name, least=-1)
        if value is not None:
            return None if value == -1 else value
    return default


def read_time_limit(body: dict[str, Any]) -> float | None:
    """Seconds that a reply may take; none for 0 or -1."""
    limit_ms = read_integer(body, "t_max_predict_ms", least=-1, most=(1 << 63) - 1)
    return limit_ms / 1e3 if limit_ms is not None and limit_ms > 0 else None


def read_n_replies(body: dict[str, Any]) -> int:
    """llama-server's name for it wins over OpenAI's."""
    wanted = [read_integer(body, name, least=1, most=MAX_REPLIES) for name in ("n_cmpl", "n")]
    return next((n for n in wanted if n is not None), 1)


def read_stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FieldError("stop", "must be a string or a list of strings")
    return tuple(text for text in texts if text)


def read_sampling(body: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Raises FieldError, and UnsupportedFieldError for what changes a reply and is not built."""
    for name in NOT_BUILT:
        if body.get(name) not in (None, False, []):
            raise UnsupportedFieldError(name, "is not supported: leave it out")
    extra: dict[str, object] = {}
    for name, (target, least, most) in EXTRA_NUMBERS.items():
        number = read_number(body, name, least=least, most=most)
        if number is not None:
            extra[target] = number
    for name, (lowest, highest) in EXTRA_INTEGERS.items():
        integer = read_integer(body, name, least=lowest, most=highest)
        if integer is not None:
            extra[name] = MAX_LAST_N if integer == -1 else integer
    bias = _read_logit_bias(body)
    if bias:
        extra["logit_bias"] = bias
    for name in ("samplers", "dry_sequence_breakers"):
        texts = read_list(body, name)
        if texts is not None:
            if not all(isinstance(text, str) and text for text in texts):
                raise FieldError(name, "must be a list of strings")
            extra[name] = texts
    repeat = read_number(body, "repeat_penalty", least=0, most=1e6)
    if repeat == 0:
        raise FieldError("repeat_penalty", "is 0, but must be above 0 (1 turns it off)")
    given = {
        "temperature": read_number(body, "temperature", least=0, most=1e6),
        "top_k": read_integer(body, "top_k"),
        "top_p": read_number(body, "top_p", least=0, most=1),
        "min_p": read_number(body, "min_p", least=0, most=1),
        "repeat_penalty": repeat,
        "presence_penalty": read_number(body, "presence_penalty", least=-1e6, most=1e6),
        "frequency_penalty": read_number(body, "frequency_penalty", least=-1e6, most=1e6),
        "seed": read_integer(body, "seed", least=-1, most=MAX_SEED),
        "ignore_eos": read_bool(body, "ignore_eos"),
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, extra={**defaults.extra, **extra}, **changes)


def resolve_sampling(extra: Mapping[str, Any], vocab: Vocab) -> dict[str, object]:
    """SamplingParams.extra for this model: a text that is biased stands for each of its tokens.

    Raises FieldError: a token or a sampler that there is not.
    """
    resolved = dict(extra)
    if "logit_bias" in extra:
        resolved["logit_bias"] = biases = [
            [token, bias]
            for named, bias in extra["logit_bias"]
            for token in (vocab.tokenize(named) if isinstance(named, str) else [named])
        ]
        check_tokens([token for token, _ in biases], vocab, "logit_bias")
    for name in ("samplers", "dry_sequence_breakers"):
        if name not in extra:
            continue
        try:
            describe_sampling(vocab.model, {name: extra[name]})
        except RequestError as error:
            reason = str(error).removeprefix(f"{name}: ")
            raise FieldError(name, f"cannot be used: {reason}") from None
    return resolved


def _read_logit_bias(body: dict[str, Any]) -> list[list[int | str | float | None]]:
    """{"id": bias} as OpenAI has it, or llama-server's [[id, bias], ...]; false forbids a token.

    What is no number is a text: resolve_sampling knows its tokens.
    """
    value = body.get("logit_bias")
    if value is None:
        return []
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise FieldError("logit_bias", "must be an object from token ids to numbers")
    biases: list[list[int | str | float | None]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FieldError("logit_bias", "must hold pairs of a token id and a number")
        token, bias = pair
        if isinstance(token, bool) or not isinstance(token, int | str):
            raise FieldError("logit_bias", "must name tokens by their ids or texts")
        named = int(token) if isinstance(token, int) or NUMBER.fullmatch(token) else token
        if isinstance(named, int) and not 0 <= named <= MAX_TOKEN:
            raise FieldError("logit_bias", f"must name tokens from 0 to {MAX_TOKEN}")
        if bias is False:
            biases.append([named, None])
        elif not is_finite_number(bias):
            raise FieldError("logit_bias", "must hold numbers (or false, which forbids a token)")
        else:
            biases.append([named, float(bias)])
    return biases
