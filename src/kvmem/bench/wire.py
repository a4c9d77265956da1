"""A server as a client sees it: OpenAI's chat completions, streamed, with the time of each part."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvmem.bench.generators.harbor import Harbor
from kvmem.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import httpx2

__all__ = ["Answer", "Message", "Wire", "make_characters", "open_wire"]

Message = dict[str, Any]

SAMPLE_CHARS = 40_000
PIECE_CHARS = 400
"""Of so much text a tenth, in such pieces, is the first request: it tells how long a token is."""


@dataclass(slots=True)
class Answer:
    """What came back. first_s: when the first piece of text came; both from the request on.

    cached_tokens: None where the server does not tell. timings: the server's own, where it has
    them.
    """

    text: str = ""
    first_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    reply_tokens: int = 0
    timings: dict[str, Any] = field(default_factory=dict)


class Wire:
    """Made by `open_wire`."""

    def __init__(self, client: "httpx2.Client") -> None:
        self._client = client

    def characters_per_token(self) -> float:
        """By a first request, which also wakes the server up."""
        text = make_characters(random.Random(1), SAMPLE_CHARS)
        # stories, logs and code differ: some of each
        sample = "".join(text[i : i + PIECE_CHARS] for i in range(0, len(text), 10 * PIECE_CHARS))
        told = self.ask([{"role": "user", "content": sample}], 1)
        return len(sample) / told.prompt_tokens

    def ask(self, messages: list[Message], max_tokens: int) -> Answer:
        """One request, greedy and without an end before max_tokens, where the server knows that.

        Raises EngineError: it was refused, broke off, or told no usage.
        """
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        usage: dict[str, Any] = {}
        started = perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise EngineError(
                    f"the server answered {response.status_code}: {response.read()[:300]!r}"
                )
            for event in _events(response.iter_lines()):
                usage = event.get("usage") or usage
                answer.timings = event.get("timings") or answer.timings
                for choice in event.get("choices", ()):
                    delta = choice.get("delta") or {}
                    said = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    if (said or delta.get("tool_calls")) and not answer.first_s:
                        answer.first_s = perf_counter() - started
                    answer.text += delta.get("content") or ""
        answer.end_s = perf_counter() - started
        answer.first_s = answer.first_s or answer.end_s
        if not {"prompt_tokens", "completion_tokens"} <= usage.keys():
            raise EngineError("the server told no usage: it must know stream_options.include_usage")
        answer.prompt_tokens = int(usage["prompt_tokens"])
        answer.reply_tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            answer.cached_tokens = int(details["cached_tokens"])
        return answer


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if event.get("error"):
            raise EngineError(f"the server broke off: {event['error']}")
        yield event


@contextmanager
def open_wire(url: str, api_key: str | None = None) -> Iterator[Wire]:
    """A connection to the server at `url`, such as http://127.0.0.1:8080.

    Raises:
        ConfigError: the HTTP client is not installed.
        EngineError: the server does not answer, or not in HTTP.
    """
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            "url", url, "used where httpx2 is installed: pip install 'kvmem[bench]'"
        ) from error
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # llama-server ends a connection that has streamed: one that is kept may be gone when it is used
    limits = httpx2.Limits(max_keepalive_connections=0)
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=None, limits=limits) as client:
            yield Wire(client)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise EngineError(f"the server at {url} did not answer: {error}") from error


def make_characters(rng: random.Random, n_chars: int) -> str:
    """Text of the demo's generator, n_chars long."""
    pieces: list[str] = []
    n = 0
    while n < n_chars:
        for turn in Harbor().turns(rng):
            pieces += turn.pieces
            n += sum(map(len, turn.pieces))
    return "".join(pieces)[: max(1, n_chars)]
