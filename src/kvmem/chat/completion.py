"""Requests for plain completions: a text, or tokens, to be gone on with.

llama-server's own form and OpenAI's old one differ in few names; what is read here serves both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvmem.chat.fields import (
    FieldError,
    UnsupportedFieldError,
    read_bool,
    read_integer,
    read_list,
    read_object,
    read_text,
)
from kvmem.chat.json_schema import put_rules, require_grammar, require_schema
from kvmem.chat.request import RequestDefaults
from kvmem.chat.sampling import (
    read_max_tokens,
    read_n_replies,
    read_sampling,
    read_stop,
    read_time_limit,
    resolve_sampling,
)
from kvmem.chat.text import MixedText, read_mixed_text, tokenize_mixed
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.errors import RequestError
from kvmem.llama.grammar import schema_grammar
from kvmem.llama.model import Model
from kvmem.llama.sampler import describe_sampling
from kvmem.llama.vocab import Vocab

__all__ = [
    "CompletionRequest",
    "RenderedCompletion",
    "parse_completion_request",
    "render_completion",
]

MAX_PROBS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion as asked for.

    prompts: each gets `n` replies of its own. is_list: whether they came as a list.
    schema: JSON schema, and grammar: GBNF, that replies must follow.
    max_tokens: None for the room in the workspace. time_limit_s: as GenerateParams has it.
    uses_cache: what is known of a prompt need not be read again.
    n_probs: likeliest tokens to report beside each chosen one; 0 for no report.
    are_chances: report chances after sampling in place of log probabilities before.
    fields: of llama-server's reply, the only ones that are wanted; empty for all.
    """

    prompts: tuple[MixedText, ...]
    is_list: bool = False
    n: int = 1
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    time_limit_s: float | None = None
    uses_cache: bool = True
    n_probs: int = 0
    are_chances: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_tokens: bool = False
    with_timings: bool = False
    with_progress: bool = False
    fields: tuple[str, ...] = ()

    def params(self, vocab: Vocab) -> GenerateParams:
        """How each reply is made. Raises FieldError: sampling, grammar or schema cannot be used."""
        extra = resolve_sampling(self.sampling.extra, vocab)
        if grammar := self._grammar(vocab.model):
            extra["grammar"] = grammar
        return GenerateParams(
            sampling=replace(self.sampling, extra=extra),
            max_tokens=self.max_tokens,
            time_limit_s=self.time_limit_s,
            n_logprobs=self.n_probs if self.n_probs and not self.are_chances else None,
            n_chances=self.n_probs if self.n_probs and self.are_chances else None,
        )

    def _grammar(self, model: Model) -> str | None:
        if self.grammar is not None:
            require_grammar(model, self.grammar)
            return self.grammar
        if self.schema is None:
            return None
        normal = require_schema(model, self.schema, "json_schema")
        try:
            return put_rules(schema_grammar(normal.schema), normal.ranges)
        except RequestError as error:
            raise FieldError("json_schema", f"cannot be enforced: {error}") from None


def parse_completion_request(
    body: dict[str, Any], defaults: RequestDefaults | None = None
) -> CompletionRequest:
    """Read the body of a completion. Raises FieldError; UnsupportedFieldError is one."""
    defaults = defaults or RequestDefaults()
    prompts, is_list = _read_prompts(body)
    schema = read_object(body, "json_schema")
    grammar = read_text(body, "grammar") or None
    if schema is not None and grammar is not None:
        raise FieldError("json_schema", "and grammar exclude each other: give one")
    for name, harmless in (("suffix", ""), ("best_of", 1), ("echo", False)):
        value = body.get(name)
        if value is not None and (type(value) is not type(harmless) or value != harmless):
            raise UnsupportedFieldError(name, "is not supported")
    n_probs = read_integer(body, "n_probs", least=0, most=MAX_PROBS)
    if n_probs is None and not isinstance(body.get("logprobs"), bool):
        n_probs = read_integer(body, "logprobs", least=0, most=MAX_PROBS)
    fields = read_list(body, "response_fields") or []
    if not all(isinstance(name, str) for name in fields):
        raise FieldError("response_fields", "must be a list of strings")
    return CompletionRequest(
        prompts=prompts,
        is_list=is_list,
        n=read_n_replies(body),
        schema=schema,
        grammar=grammar,
        sampling=read_sampling(body, defaults.sampling),
        max_tokens=read_max_tokens(body, defaults.max_tokens),
        time_limit_s=read_time_limit(body),
        uses_cache=body.get("cache_prompt") is not False,
        n_probs=n_probs or 0,
        are_chances=read_bool(body, "post_sampling_probs") or False,
        stop=read_stop(body),
        stream=read_bool(body, "stream") or False,
        with_tokens=read_bool(body, "return_tokens") or False,
        with_timings=read_bool(body, "timings_per_token") or False,
        with_progress=read_bool(body, "return_progress") or False,
        fields=tuple(fields),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedCompletion:
    """A request as the model sees it: for each reply that is wanted, its prompt.

    texts: the prompts as text. settings: what the sampling fields come to.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    params: tuple[GenerateParams, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


def render_completion(request: CompletionRequest, vocab: Vocab) -> RenderedCompletion:
    """Raises FieldError: a prompt, a token, the grammar or a sampling field cannot be used."""
    params = request.params(vocab)
    prompts = [
        Prompt(
            tokens=tuple(tokens),
            query_fallback="a plain completion has no question",
            is_read_anew=not request.uses_cache and number == 0,
        )
        for tokens in _tokenize(request, vocab)
        for number in range(request.n)  # the first one reads it for all
    ]
    settings = describe_sampling(vocab.model, params.sampling.as_dict())
    return RenderedCompletion(
        prompts=tuple(prompts),
        texts=tuple(vocab.detokenize(prompt.tokens) for prompt in prompts),
        params=tuple(params.vary(i % request.n) for i in range(len(prompts))),
        settings={
            **settings,
            "n_predict": -1 if request.max_tokens is None else request.max_tokens,
            "max_tokens": -1 if request.max_tokens is None else request.max_tokens,
            "stop": list(request.stop),
            "stream": request.stream,
            "n_probs": request.n_probs,
            "post_sampling_probs": request.are_chances,
            "timings_per_token": request.with_timings,
        },
    )


def _tokenize(request: CompletionRequest, vocab: Vocab) -> Iterator[list[int]]:
    """The tokens of each prompt. Raises FieldError: it has none, or one that there is not."""
    for index, text in enumerate(request.prompts):
        path = f"prompt[{index}]" if request.is_list else "prompt"
        tokens = tokenize_mixed(text, vocab, path, add_special=True)
        if not tokens:
            raise FieldError(path, "is empty, and this model has no token to begin with")
        yield tokens


def _read_prompts(body: dict[str, Any]) -> tuple[tuple[MixedText, ...], bool]:
    """A list of token ids is one prompt, and so is one of ids and texts; others hold prompts."""
    value = body.get("prompt")
    if value is None:
        raise FieldError("prompt", "must be given")
    has_ids = isinstance(value, list) and any(
        isinstance(part, int) and not isinstance(part, bool) for part in value
    )
    if not isinstance(value, list) or has_ids:
        return (read_mixed_text(value, "prompt"),), False
    if not value:
        raise FieldError("prompt", "must not be an empty list")
    return tuple(read_mixed_text(one, f"prompt[{i}]") for i, one in enumerate(value)), True
