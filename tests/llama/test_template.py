"""Chat templates: rendering by llama.cpp, errors as exceptions, one handle."""

from pathlib import Path
from typing import Any

import pytest
import tiny_vocab

from kvmem.errors import ModelError, RequestError, StateError
from kvmem.llama.model import Model
from kvmem.llama.template import ChatTemplate

USER = {"role": "user", "content": "hi"}
EFFORT = "{{ reasoning_effort }}|{{ messages[0].content }}"


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    with Model(tiny_llama) as model:
        yield model


def test_the_models_own_template_is_used(model: Model) -> None:
    with ChatTemplate(model) as template:
        result = template.render({"messages": [USER], "enable_thinking": False})
        assert result["prompt"] == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert result["generation_prompt"] == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert template.info()["source"] == tiny_vocab.CHATML_TOOLS


def test_a_given_source_replaces_it_and_needs_no_model(model: Model) -> None:
    for owner in (model, None):
        with ChatTemplate(owner, tiny_vocab.CHATML) as template:
            prompt = template.render({"messages": [USER], "add_generation_prompt": False})["prompt"]
            assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_template_outlives_its_model(tiny_llama: Path) -> None:
    with Model(tiny_llama) as short_lived:
        template = ChatTemplate(short_lived)
    assert "hi" in template.render({"messages": [USER]})["prompt"]
    template.close()


def test_tools_reach_the_prompt_and_give_a_lazy_grammar(model: Model) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "d",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
    with ChatTemplate(model) as template:
        result = template.render({"messages": [USER], "tools": [tool]})
    assert '"look_up"' in result["prompt"]
    assert result["grammar"] and result["grammar_lazy"]
    assert "<tool_call>" in result["preserved_tokens"]


def test_kwargs_keep_their_json_types() -> None:
    with ChatTemplate(None, EFFORT) as template:
        request = {"messages": [USER], "kwargs": {"reasoning_effort": "high"}}
        assert template.render(request)["prompt"] == "high|hi"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({}, "messages"),
        ({"messages": 3}, "Expected 'messages' to be an array"),
        ({"messages": [{"role": "user"}]}, "Expected 'content' or 'tool_calls'"),
        ({"messages": [USER], "tools": [{"type": "x"}]}, "Unsupported tool type"),
        ({"messages": [USER], "tool_choice": "maybe"}, "Invalid tool_choice"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, "JSON"),
    ],
)
def test_what_cannot_be_rendered_is_a_request_error(
    model: Model, request_: dict[str, Any], reason: str
) -> None:
    with ChatTemplate(model) as template, pytest.raises(RequestError, match=reason):
        template.render(request_)


def test_a_template_that_raises_gives_its_own_words() -> None:
    source = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{- raise_exception('system comes first') }}{%- endif %}{{- m.content }}{%- endfor %}"
    )
    with ChatTemplate(None, source) as template:
        late = {"messages": [USER, {"role": "system", "content": "late"}]}
        with pytest.raises(RequestError, match="system comes first"):
            template.render(late)


def test_a_broken_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="the chat template cannot be used"):
        ChatTemplate(None, "{% if %}")
    with pytest.raises(ModelError, match="neither a model nor a template"):
        ChatTemplate(None)


def test_close_is_idempotent_and_final(model: Model) -> None:
    template = ChatTemplate(model)
    template.close()
    template.close()
    with pytest.raises(StateError, match="closed"):
        template.render({"messages": [USER]})
