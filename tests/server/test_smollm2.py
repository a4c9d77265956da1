"""The same client on a model that was trained: it answers, stays bound, stops and repeats."""

import json
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from time import monotonic
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


def test_seeds(client: OpenAI) -> None:
    ask: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a short story."}]
    told = [say(client, ask, temperature=1.2, seed=seed) for seed in (7, 8, 7)]
    assert told[0] == told[2] != told[1]


def test_log_probabilities(client: OpenAI) -> None:
    """Each token's, with the likeliest ones beside it: at temperature 0 the first of them."""
    reply = client.chat.completions.create(
        model="any", messages=ASK, max_tokens=40, logprobs=True, top_logprobs=5
    )
    [choice] = reply.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    said = b"".join(bytes(entry.bytes or ()) for entry in entries).decode()
    assert (choice.message.content or "") in said.removesuffix("<|im_end|>")
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert sum(exp(one.logprob) for one in entry.top_logprobs) <= 1 + 1e-4
    sure = next(entry for entry in entries if entry.token.strip() == "Paris")
    assert exp(sure.logprob) > 0.5


def test_two_conversations_take_turns(client: OpenAI) -> None:
    """Each reply is what it is when its conversation is the only one, and little is read again."""
    pets = {"Ann": "a parrot called Coco", "Bob": "a dog called Rex"}

    def talk(names: Sequence[str]) -> dict[str, list[Any]]:
        said: dict[str, list[Any]] = {}
        for name in names:
            turns = said.setdefault(
                name, [{"role": "system", "content": f"You help {name}, who has {pets[name]}."}]
            )
            question = "What is my name?" if len(turns) == 1 else "And what is my pet called?"
            turns.append({"role": "user", "content": question})
            reply = client.chat.completions.create(model="any", messages=turns, max_tokens=30)
            usage = reply.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            assert len(turns) == 2 or cached > usage.prompt_tokens // 2
            turns.append({"role": "assistant", "content": reply.choices[0].message.content})
        return said

    together = talk(["Ann", "Bob", "Ann", "Bob"])
    assert "Rex" in together["Bob"][-1]["content"] and "Coco" in together["Ann"][-1]["content"]
    assert talk(["Ann", "Ann"])["Ann"] == together["Ann"]
    assert talk(["Bob", "Bob"])["Bob"] == together["Bob"]


def test_who_closes_a_stream_can_ask_again_at_once(client: OpenAI) -> None:
    before = say(client, ASK)
    story: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Count from one to a thousand."}
    ]
    stream = client.chat.completions.create(
        model="any", messages=story, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    texts = (chunk.choices[0].delta.content for chunk in stream)
    assert any(texts)
    stream.close()
    began = monotonic()
    assert say(client, ASK) == before
    assert monotonic() - began < 10, "the other one would have taken minutes"


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
