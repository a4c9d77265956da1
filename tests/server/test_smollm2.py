"""The same client on a model that was trained: it answers, stays bound, stops and repeats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from live import serving
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

pytestmark = pytest.mark.slow

ARGS = ("--port", "0", "-c", "2048", "-t", "1", "--temp", "0", "--alias", "smol")
QUESTION = "What is the capital of France? Answer in one short sentence."
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(demo_model: Path) -> Iterator[OpenAI]:
    with serving("-m", str(demo_model), *ARGS) as server:
        host, port = server.address()
        with OpenAI(base_url=f"http://{host}:{port}/v1", api_key="any", timeout=120) as client:
            yield client


def say(client: OpenAI, messages: list[ChatCompletionMessageParam], **fields: Any) -> str:
    reply = client.chat.completions.create(model="any", messages=messages, max_tokens=40, **fields)
    text: str | None = reply.choices[0].message.content
    assert text is not None
    return text


def test_it_answers_alike_whole_and_streamed(client: OpenAI) -> None:
    whole = say(client, ASK)
    assert "Paris" in whole
    with client.chat.completions.stream(model="any", messages=ASK, max_tokens=40) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == whole
    assert streamed.finish_reason == "stop"


def test_a_second_turn_reads_what_is_new(client: OpenAI) -> None:
    first = say(client, ASK)
    turns: list[ChatCompletionMessageParam] = [
        *ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "And of Italy?"},
    ]  # fmt: skip
    reply = client.chat.completions.create(model="any", messages=turns, max_tokens=30)
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > reply.usage.prompt_tokens // 2


class Capital(BaseModel):
    city: str
    continent: Literal["Europe", "Asia", "Africa"]


def test_structured_output(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="any", messages=ASK, response_format=Capital, max_tokens=80
    )
    parsed = reply.choices[0].message.parsed
    assert parsed is not None and parsed.continent in ("Europe", "Asia", "Africa")


def test_a_grammar_and_a_stop_text(client: OpenAI) -> None:
    assert say(client, ASK, extra_body={"grammar": 'root ::= "Paris" | "Rome"'}) in (
        "Paris",
        "Rome",
    )
    whole = say(client, ASK)
    assert say(client, ASK, stop=["Paris"]) == whole[: whole.index("Paris")]


def test_tools_of_a_template_without_a_place_for_them(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    reply = client.chat.completions.create(
        model="any", messages=ASK, max_tokens=40, extra_body={"tools": [tool], "kvmem": True}
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    notes = json.loads(reply.to_json())["kvmem"]["notes"]
    assert any("no place for tools" in note for note in notes)
