"""How tokens are chosen, and when a reply ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from kvmem.errors import RequestError

__all__ = ["GenerateParams", "SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings; a None field takes llama.cpp's default.

    temperature: 0 is greedy. extra: further fields of llama.sampler.Sampler, by its names.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    extra: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def as_dict(self) -> dict[str, object]:
        """The fields that are set, as llama.sampler.Sampler takes them."""
        named = {
            name: value
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repeat_penalty",
                "presence_penalty",
                "frequency_penalty",
                "seed",
            )
            if (value := getattr(self, name)) is not None
        }
        if self.ignore_eos:
            named["ignore_eos"] = True
        return {**named, **self.extra}


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """How one reply is made.

    max_tokens: None for what the workspace holds.
    time_limit_s: end the reply that is longer than this after its first token, once it has a line
        break; None for no limit.
    stop_tokens: end the reply like an end token does.
    n_logprobs: likeliest tokens to report beside each chosen one; None for no report.
    n_chances: the same after sampling, by what is left to choose from; then nothing is drafted.
    """

    sampling: SamplingParams = GREEDY
    max_tokens: int | None = None
    time_limit_s: float | None = None
    stop_tokens: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    n_chances: int | None = None

    def vary(self, number: int) -> Self:
        """For the reply of this number to one prompt: with a seed of its own, where one is set."""
        seed = self.sampling.seed
        if number == 0 or seed is None or seed == -1:
            return self
        return replace(self, sampling=replace(self.sampling, seed=(seed + number) % (1 << 32)))

    def __post_init__(self) -> None:
        for name in ("max_tokens", "time_limit_s", "n_logprobs", "n_chances"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestError(f"{name} is {value}, but must be at least 0")
