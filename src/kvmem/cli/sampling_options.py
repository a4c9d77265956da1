"""The options of sampling, as a dataclass like those of kvmem.cli.options."""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from kvmem.chat.fields import FieldError
from kvmem.chat.request import RequestDefaults
from kvmem.chat.thinking import EFFORTS, Thinking, read_template_kwargs
from kvmem.cli.flags import flag, llama_flag
from kvmem.config import MAX_COUNT
from kvmem.engine.sampling import SamplingParams
from kvmem.errors import ConfigError

__all__ = ["SamplingOptions"]

SAMPLING_PANEL = "Sampling (what a request may change)"
MAX_FLOAT = float(np.finfo(np.float32).max)  # llama.cpp's are of 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen where a request says nothing."""

    n_predict: Annotated[
        int,
        llama_flag("-n", "--predict", "--n-predict", env="N_PREDICT", panel=SAMPLING_PANEL,
               help="Most tokens of a reply; -1 for the room in the workspace."),
    ] = -1  # fmt: skip
    temperature: Annotated[
        float | None,
        llama_flag("--temp", "--temperature", env="TEMPERATURE", panel=SAMPLING_PANEL,
               help="0 is greedy. Left out, as those below: what Qwen's model card advises with "
               "and without thinking, where the template knows it; else llama.cpp's default."),
    ] = None  # fmt: skip
    top_k: Annotated[
        int | None, llama_flag("--top-k", env="TOP_K", panel=SAMPLING_PANEL, help="0 turns it off.")
    ] = None
    top_p: Annotated[
        float | None,
        llama_flag("--top-p", env="TOP_P", panel=SAMPLING_PANEL, help="1 turns it off."),
    ] = None
    min_p: Annotated[
        float | None,
        llama_flag("--min-p", env="MIN_P", panel=SAMPLING_PANEL, help="0 turns it off."),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        llama_flag("--repeat-penalty", env="REPEAT_PENALTY", panel=SAMPLING_PANEL,
               help="1 turns it off."),
    ] = None  # fmt: skip
    presence_penalty: Annotated[
        float | None,
        llama_flag("--presence-penalty", env="PRESENCE_PENALTY", panel=SAMPLING_PANEL,
               help="0 turns it off."),
    ] = None  # fmt: skip
    frequency_penalty: Annotated[
        float | None,
        llama_flag("--frequency-penalty", env="FREQUENCY_PENALTY", panel=SAMPLING_PANEL,
               help="0 turns it off."),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        flag("-s", "--seed", panel=SAMPLING_PANEL, help="Left out or -1: a random one."),
    ] = None
    enable_thinking: Annotated[
        bool | None,
        flag("--enable-thinking/--no-think", panel=SAMPLING_PANEL,
              help="Whether models that can think do so. Left out: as the template has it."),
    ] = None  # fmt: skip
    reasoning: Annotated[
        Literal["on", "off", "auto"],
        llama_flag("-rea", "--reasoning", env="REASONING", panel=SAMPLING_PANEL,
               help="llama-server's name for the same."),
    ] = "auto"  # fmt: skip
    reasoning_effort: Annotated[
        str | None,
        llama_flag("--reasoning-effort", env="REASONING_EFFORT", panel=SAMPLING_PANEL,
               help="How hard to think, for templates that know it: none (off), minimal, low, "
               "medium, high, xhigh, max, default."),
    ] = None  # fmt: skip
    reasoning_budget: Annotated[
        int,
        llama_flag("--reasoning-budget", env="THINK_BUDGET", panel=SAMPLING_PANEL,
               help="Most tokens of thinking, which is then ended; 0 ends it at once, -1 for no "
               "limit."),
    ] = -1  # fmt: skip
    reasoning_budget_message: Annotated[
        str,
        llama_flag("--reasoning-budget-message", env="THINK_BUDGET_MESSAGE", panel=SAMPLING_PANEL,
               help="Text that the model says before it ends thinking for want of budget."),
    ] = ""  # fmt: skip
    template_kwargs: Annotated[
        str | None,
        llama_flag("--chat-template-kwargs", env="CHAT_TEMPLATE_KWARGS", panel=SAMPLING_PANEL,
               help='Variables of the chat template, a JSON object: {"enable_thinking": false}.'),
    ] = None  # fmt: skip

    def defaults(self) -> RequestDefaults:
        """Raises ConfigError: a value out of range."""
        for name, value, least, most in (
            ("temperature", self.temperature, 0.0, MAX_FLOAT),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repeat_penalty", self.repeat_penalty, 0.0, MAX_FLOAT),
            ("presence_penalty", self.presence_penalty, -MAX_FLOAT, MAX_FLOAT),
            ("frequency_penalty", self.frequency_penalty, -MAX_FLOAT, MAX_FLOAT),
        ):
            if value is None:
                continue
            if not math.isfinite(value):
                raise ConfigError(name, value, "a finite number")
            if not least <= value <= most:
                rule = f"at least {least:g}" if value < least else f"at most {most:g}"
                raise ConfigError(name, value, f"from 0 to {most:g}" if most == 1 else rule)
        if self.repeat_penalty is not None and not self.repeat_penalty > 0:
            raise ConfigError("repeat_penalty", self.repeat_penalty, "above 0")
        if self.seed is not None and not -1 <= self.seed < 1 << 32:
            raise ConfigError("seed", self.seed, "from 0 to 4294967295, or -1 for a random one")
        if self.n_predict < -1:
            raise ConfigError("n_predict", self.n_predict, "at least 0, or -1 for no limit")
        for name, count in (
            ("n_predict", self.n_predict),
            ("top_k", self.top_k or 0),
            ("reasoning_budget", self.reasoning_budget),
        ):
            if abs(count) > MAX_COUNT:
                raise ConfigError(name, count, f"at most {MAX_COUNT}")
        return RequestDefaults(
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repeat_penalty=self.repeat_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=self.seed,
            ),
            max_tokens=None if self.n_predict == -1 else self.n_predict,
            thinking=self._thinking(),
        )

    def _thinking(self) -> Thinking:
        if self.reasoning_budget < -1:
            rule = "at least 0, or -1 for no limit"
            raise ConfigError("reasoning_budget", self.reasoning_budget, rule)
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            rule = f"one of {', '.join(EFFORTS)}"
            raise ConfigError("reasoning_effort", self.reasoning_effort, rule)
        return Thinking(
            enabled=self._enabled(),
            effort=self.reasoning_effort,
            budget=None if self.reasoning_budget == -1 else self.reasoning_budget,
            message=self.reasoning_budget_message,
            kwargs=self._template_kwargs(),
        )

    def _enabled(self) -> bool | None:
        by_llama = {"on": True, "off": False, "auto": None}[self.reasoning]
        if by_llama is not None and self.enable_thinking not in (None, by_llama):
            name = "--enable-thinking" if self.enable_thinking else "--no-think"
            raise ConfigError("reasoning", self.reasoning, f"given without {name}")
        return by_llama if by_llama is not None else self.enable_thinking

    def _template_kwargs(self) -> dict[str, Any]:
        text = self.template_kwargs
        if text is None:
            return {}
        try:
            kwargs = json.loads(text)
        except ValueError:
            kwargs = None
        if not isinstance(kwargs, dict):
            raise ConfigError("chat_template_kwargs", text, "a JSON object")
        try:
            read_template_kwargs(kwargs)
        except FieldError as error:
            raise ConfigError("chat_template_kwargs", text, f"right: {error}") from None
        return kwargs
