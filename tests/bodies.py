"""Bodies of requests, mostly as they should be: strategies for hypothesis."""

from typing import Any

from hypothesis import strategies as st

WORDS = st.text(max_size=5)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def fields(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these fields, mostly as they should be."""
    return st.fixed_dictionaries({}, optional={k: v | ANYTHING for k, v in known.items()})


def some_of(
    bodies: st.SearchStrategy[dict[str, Any]], **least: Any
) -> st.SearchStrategy[dict[str, Any]]:
    """At most a dozen of the fields, which more often do as they should, and those of `least`."""
    return st.tuples(bodies, st.integers(0, 12)).map(
        lambda drawn: {**least, **dict(list(drawn[0].items())[: drawn[1]])}
    )


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["hi", "<think>", "</think>", "<tool_response>", "🙂"]
)
PARTS = st.lists(fields(type=st.just("text"), text=TEXTS), max_size=2)
CALLS = st.lists(
    fields(
        id=st.just("1"),
        type=st.sampled_from(["function", "custom"]),
        function=fields(name=st.just("f"), arguments=st.sampled_from(['{"a": 1}', "{", {"a": 1}])),
    ),
    max_size=2,
)
MESSAGES = st.lists(
    fields(
        role=st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]),
        content=TEXTS | PARTS,
        reasoning_content=TEXTS,
        tool_calls=CALLS,
        tool_call_id=st.just("1"),
    ),
    min_size=1,
    max_size=5,
)
SCHEMAS = st.recursive(
    fields(
        type=st.sampled_from(["object", "string", "integer", "array", "null", ["string", "null"]]),
        enum=st.lists(st.sampled_from(["a", 1, None]), max_size=3),
        const=st.sampled_from(["a", 1]),
        pattern=st.sampled_from(["^a$", "^[a-z]{1,3}$", "b", "^(", "^\\d$"]),
        minLength=st.integers(0, 5),
        maxLength=st.integers(0, 5),
        minimum=st.integers(-5, 5),
        format=st.sampled_from(["date", "email"]),
    )
    | st.sampled_from([True, False, {"$ref": "#"}, {"$ref": "#/properties/a"}]),
    lambda inner: fields(
        type=st.just("object"),
        properties=st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3),
        required=st.lists(st.sampled_from(["a", "b"]), max_size=2),
        items=inner,
        anyOf=st.lists(inner, max_size=2),
        oneOf=st.lists(inner, max_size=2),
        allOf=st.lists(inner, max_size=3),
        additionalProperties=inner | st.booleans(),
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    fields(
        type=st.sampled_from(["function", "web_search"]),
        function=fields(
            name=st.sampled_from(["f", "g", "look_up"]), parameters=SCHEMAS, strict=st.booleans()
        ),
    ),
    max_size=3,
)
NUMBERS = st.floats(-1, 2) | st.integers(-2, 9)
LAST_N = st.integers(-1, 64)
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 99),
    **dict.fromkeys(
        ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"), st.floats(0, 1)
    ),
    **dict.fromkeys(
        ("top_n_sigma", "dynatemp_range", "dynatemp_exponent", "repeat_penalty",
         "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "mirostat_tau",
         "mirostat_eta", "adaptive_target", "adaptive_decay"),
        NUMBERS,
    ),
    "repeat_last_n": LAST_N,
    "dry_allowed_length": st.integers(0, 9),
    "dry_penalty_last_n": LAST_N,
    "dry_sequence_breakers": st.lists(TEXTS, max_size=3),
    "mirostat": st.integers(0, 2),
    "min_keep": st.integers(0, 300),
    "seed": st.integers(-1, 9),
    "logit_bias": st.dictionaries(
        st.sampled_from(["1", "278", "he", "99999"]), st.floats(-100, 100) | st.just(False),
        max_size=2,
    )
    | st.lists(st.tuples(st.integers(0, 300), st.floats(-100, 100)), max_size=2),
    "samplers": st.lists(
        st.sampled_from(
            ["top_k", "top_p", "min_p", "typ_p", "temperature", "xtc", "dry", "penalties",
             "top_n_sigma", "adaptive_p", "x"]
        ),
        max_size=4,
    ),
    "ignore_eos": st.booleans(),
    "stop": TEXTS | st.lists(TEXTS, max_size=2),
    "grammar": st.sampled_from(['root ::= "a"', "root ::= root", "("]),
    "grammar_lazy": st.booleans(),
    "json_schema": SCHEMAS,
    "n": st.integers(1, 3),
    "n_cmpl": st.integers(1, 2),
    "cache_prompt": st.booleans(),
    "timings_per_token": st.booleans(),
    "return_progress": st.booleans(),
    "id_slot": st.integers(-1, 1),
    "t_max_predict_ms": st.integers(-1, 5),
    "lora": st.lists(fields(id=st.just(0), scale=st.just(1.0)), max_size=1),
}  # fmt: skip
"""What every kind of completion knows, but for how long its reply may be."""

BODIES = fields(
    **SAMPLING,
    messages=MESSAGES,
    tools=TOOLS,
    tool_choice=st.sampled_from(["auto", "none", "required"])
    | st.just({"type": "function", "function": {"name": "f"}}),
    parallel_tool_calls=st.booleans(),
    response_format=fields(
        type=st.sampled_from(["text", "json_object", "json_schema"]),
        schema=SCHEMAS,
        json_schema=fields(schema=SCHEMAS, strict=st.booleans()),
    ),
    enable_thinking=st.booleans(),
    reasoning_effort=st.sampled_from(["none", "low", "default"]),
    reasoning_format=st.sampled_from(["none", "auto", "deepseek"]),
    chat_template_kwargs=fields(enable_thinking=st.booleans()),
    reasoning_budget_tokens=st.integers(-1, 5),
    thinking_budget_tokens=st.integers(-1, 5),
    reasoning_budget_message=TEXTS,
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 20),
    stream_options=fields(include_usage=st.booleans()),
    kvmem=st.booleans() | fields(report=st.booleans(), conversation_id=WORDS),
    verbose=st.booleans(),
    continue_final_message=st.booleans(),
    add_generation_prompt=st.booleans(),
)
TOKENS = st.lists(st.integers(0, 285) | st.sampled_from([-1, 10**6, 10**30]), max_size=5)
PROMPTS = TEXTS | TOKENS | st.lists(TEXTS | st.integers(0, 285), max_size=3)
COMPLETIONS = fields(
    **SAMPLING,
    prompt=PROMPTS | st.lists(PROMPTS, max_size=2) | fields(prompt_string=TEXTS),
    n_probs=st.integers(0, 20),
    logprobs=st.integers(0, 5) | st.booleans(),
    post_sampling_probs=st.booleans(),
    return_tokens=st.booleans(),
    response_fields=st.lists(st.sampled_from(["content", "timings/cache_n", "x"]), max_size=2),
    echo=st.booleans(),
    best_of=st.integers(0, 2),
    suffix=TEXTS,
)
TOKENIZE = fields(
    content=PROMPTS,
    add_special=st.booleans(),
    parse_special=st.booleans(),
    with_pieces=st.booleans(),
)
DETOKENIZE = fields(tokens=TOKENS)
LIMITS = st.tuples(
    st.sampled_from(["max_tokens", "max_completion_tokens", "n_predict"]), st.integers(0, 3)
).map(lambda item: dict([item])) | st.sampled_from(
    [{"max_tokens": "3"}, {"n_predict": 1.5}, {"max_completion_tokens": -2}]
)
"""How long a reply may be: at most three tokens, or a value that is refused."""
