"""What a reply is held to: sampling by the thinking state, grammars, and the budget of thinking."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvmem.chat.fields import FieldError, UnsupportedFieldError
from kvmem.chat.reply import ThinkingTags
from kvmem.chat.request import ChatRequest
from kvmem.chat.sampling import resolve_sampling
from kvmem.engine.sampling import SamplingParams
from kvmem.llama.vocab import Vocab

__all__ = ["ANSWERING_DEFAULTS", "THINKING_DEFAULTS", "bind", "find_thinking"]

# What Qwen3.8's model card advises, with and without thinking. A temperature of 0 is greedy:
# nothing that was not asked for may then change the choice.
THINKING_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repeat_penalty": 1.0,
    }
)
ANSWERING_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {**THINKING_DEFAULTS, "temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5}
)


def bind(
    request: ChatRequest,
    fields: Mapping[str, Any],
    rendered: Mapping[str, Any],
    *,
    vocab: Vocab,
    thinks: bool,
) -> SamplingParams:
    """The sampling of a reply, with all that the request and the template bind it to.

    fields, rendered: what the template was given, and the result. thinks: the template knows it.

    Raises:
        FieldError: what is demanded cannot be enforced.
    """
    sampling = request.sampling
    if thinks and sampling.temperature != 0:
        card = THINKING_DEFAULTS if fields.get("enable_thinking", True) else ANSWERING_DEFAULTS
        missing: dict[str, Any] = {k: v for k, v in card.items() if getattr(sampling, k) is None}
        sampling = replace(sampling, **missing)
    thinking = find_thinking(rendered)
    bound: dict[str, object] = {"generation_prompt": rendered["generation_prompt"]}
    if request.grammar is not None:
        if thinking.is_open:
            raise FieldError(
                "grammar", "binds the whole reply, but this template has the model think first"
            )
        bound["grammar"] = request.grammar
    elif rendered["grammar"]:
        bound["constraint"] = {
            "grammar": rendered["grammar"],
            "lazy": rendered["grammar_lazy"],
            "triggers": rendered["triggers"],
        }
    elif request.schema is not None or request.tool_choice.mode == "required":
        what = "tool_choice" if request.schema is None else "response_format"
        raise UnsupportedFieldError(what, "cannot be enforced with this chat template")
    if thinking.start and thinking.ends:
        bound["reasoning"] = {
            "start": thinking.start,
            "ends": thinking.ends,
            "budget": _budget(request.thinking.budget, rendered, thinking, vocab),
            "message": request.thinking.message,
        }
    return replace(sampling, extra={**resolve_sampling(sampling.extra, vocab), **bound})


def find_thinking(rendered: Mapping[str, Any]) -> ThinkingTags:
    """The tags of a rendered prompt, and whether a thought is open at its end."""
    start, ends = rendered["thinking_start"], tuple(rendered["thinking_ends"])
    _, opened, after = rendered["generation_prompt"].rpartition(start) if start else ("", "", "")
    is_open = bool(opened) and not any(end in after for end in ends)
    return ThinkingTags(start=start, ends=ends, is_open=is_open)


def _budget(
    budget: int | None, rendered: Mapping[str, Any], thinking: ThinkingTags, vocab: Vocab
) -> int:
    """The sampler's budget, -1 for none.

    The sampler counts what the prompt says after opening a thought, often a line break.
    """
    if not budget:
        return -1 if budget is None else 0
    _, _, said = rendered["generation_prompt"].rpartition(thinking.start)
    return budget + (len(vocab.tokenize(said)) if thinking.is_open else 0)
