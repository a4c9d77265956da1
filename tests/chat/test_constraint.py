"""Schemas and grammars that a whole reply is held to."""

from typing import Any

import pytest
from rendering import constraint, render

from kvmem.llama.vocab import Vocab


def test_an_empty_schema_is_any_value(vocab: Vocab) -> None:
    titled = constraint(render(vocab, json_schema={"title": "anything"}))
    assert constraint(render(vocab, json_schema={})) == titled
    assert "value ::=" in titled["grammar"]
    form = {"type": "json_schema", "json_schema": {"schema": {}}}
    assert constraint(render(vocab, response_format=form)) == titled


def test_one_part_of_all_of_is_the_schema(vocab: Vocab) -> None:
    wrapped = render(vocab, json_schema={"allOf": [{"type": "integer"}]})
    assert constraint(wrapped) == constraint(render(vocab, json_schema={"type": "integer"}))


def test_a_grammar_keeps_the_model_from_thinking(vocab: Vocab) -> None:
    rendered = render(vocab, grammar='root ::= "yes"')
    assert rendered.text.endswith("</think>\n\n")
    assert rendered.sampling.extra["grammar"] == 'root ::= "yes"'


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
        {"response_format": {"type": "json_schema", "schema": {"const": 5}}},
        {"response_format": {"type": "json_object", "schema": {"const": 5}}},
        {"json_schema": {"const": 5}},
    ],
)
def test_a_schema_in_each_form(vocab: Vocab, form: dict[str, Any]) -> None:
    found = constraint(render(vocab, **form))
    assert '"5"' in found["grammar"] and not found["lazy"]
