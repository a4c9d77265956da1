"""Bodies of chat requests, mostly as they should be: strategies for hypothesis."""

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
BODIES = fields(
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
    grammar=st.sampled_from(['root ::= "a"', "root ::= root", "("]),
    enable_thinking=st.booleans(),
    reasoning_effort=st.sampled_from(["none", "low", "default"]),
    chat_template_kwargs=fields(enable_thinking=st.booleans()),
    reasoning_budget_tokens=st.integers(-1, 5),
    temperature=st.floats(0, 2),
    logit_bias=st.dictionaries(st.sampled_from(["1", "278"]), st.floats(-100, 100), max_size=2),
    stop=st.lists(TEXTS, max_size=2),
    seed=st.integers(-1, 9),
    continue_final_message=st.booleans(),
    add_generation_prompt=st.booleans(),
    samplers=st.lists(st.sampled_from(["top_k", "temperature", "x"]), max_size=2),
)
