"""The agent's tasks against a running server: kvmem serve, llama-server, or any other that speaks
OpenAI's chat completions. It measures what a client sees.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvmem.bench.agent import AgentRecord, AgentSpec, Report
from kvmem.bench.generators.harbor import Harbor
from kvmem.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import httpx2

__all__ = ["run_remote"]

SAMPLE_CHARS = 4000
"""Of a first request that tells how many characters a token has."""


@dataclass(slots=True)
class _Answer:
    """What came back. first_s: when the first piece of text came."""

    text: str = ""
    first_s: float | None = None
    end_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)


def run_remote(
    spec: AgentSpec,
    url: str,
    *,
    api_key: str | None = None,
    report: Report = lambda what, done, total: None,
) -> Iterator[AgentRecord]:
    """Play the task against the server at `url`, such as http://127.0.0.1:8080.

    The history is as long as the server counts it, and so near n_tokens, not equal.

    Raises:
        ConfigError: the HTTP client is not installed.
        EngineError: the server did not answer, refused a request, or told no usage.
    """
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            "url", url, "used where httpx2 is installed: pip install 'kvmem[bench]'"
        ) from error
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=None) as client:
            yield from _play(spec, client, report)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise EngineError(f"the server at {url} did not answer: {error}") from error


def _play(spec: AgentSpec, client: "httpx2.Client", report: Report) -> Iterator[AgentRecord]:
    rng = random.Random(0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": Harbor().opening()}]
    n_chars, held = len(messages[0]["content"]), 0
    sample = _text(random.Random(1), SAMPLE_CHARS)
    told = _ask(client, [{"role": "user", "content": sample}], max_tokens=1).usage
    chars_per_token = SAMPLE_CHARS / int(told["prompt_tokens"])
    for turn in range(spec.rounds):
        text = _text(rng, int(spec.new_tokens(turn) * chars_per_token))
        messages += _messages(spec, turn, text)
        n_chars += len(text)
        answer = _ask(client, messages, spec.reply_tokens)
        assert answer.first_s is not None
        n_prompt = int(answer.usage["prompt_tokens"])
        n_reply = int(answer.usage["completion_tokens"])
        details = answer.usage.get("prompt_tokens_details") or {}
        timings = answer.timings
        yield AgentRecord(
            task=spec.task,
            system="server",
            round=turn,
            prompt_tokens=n_prompt,
            cached_tokens=int(details.get("cached_tokens", held)),
            replayed_tokens=None,
            reply_tokens=n_reply,
            prompt_s=answer.first_s,
            decode_s=answer.end_s - answer.first_s,
            decision="",
            phases=None,
            bytes_in=None,
            drafted_tokens=timings.get("draft_n"),
            accepted_tokens=timings.get("draft_n_accepted"),
            device_bytes=None,
            host_bytes=None,
            rss_bytes=None,
            gpu_bytes=None,
        )
        chars_per_token = n_chars / n_prompt
        held = n_prompt  # what a server that does not tell must have kept
        messages.append(_said(spec, turn, answer.text))
        n_chars += len(answer.text)
        report("history", n_prompt, spec.n_tokens)


def _text(rng: random.Random, n_chars: int) -> str:
    pieces: list[str] = []
    n = 0
    while n < n_chars:
        for turn in Harbor().turns(rng):
            pieces += turn.pieces
            n += sum(map(len, turn.pieces))
    return "".join(pieces)[: max(1, n_chars)]


def _messages(spec: AgentSpec, turn: int, text: str) -> list[dict[str, Any]]:
    if turn == 0 or spec.task == "chat":
        question = f"\n\nQuestion {turn + 1}: what was said last of the harbour?"
        return [{"role": "user", "content": text + question}]
    return [{"role": "tool", "tool_call_id": f"call{turn - 1}", "content": text}]


def _said(spec: AgentSpec, turn: int, text: str) -> dict[str, Any]:
    """The reply as the next request has it: in `tools` with a call of one."""
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if spec.task == "tools":
        call = {"name": "read_file", "arguments": json.dumps({"path": f"log{turn}.txt"})}
        said["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": call}]
    return said


def _ask(client: "httpx2.Client", messages: list[dict[str, Any]], max_tokens: int) -> _Answer:
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = _Answer()
    started = perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise EngineError(
                f"the server answered {response.status_code}: {response.read()[:300]!r}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            answer.usage = event.get("usage") or answer.usage
            answer.timings = event.get("timings") or answer.timings
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                said = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                if (said or delta.get("tool_calls")) and answer.first_s is None:
                    answer.first_s = perf_counter() - started
                answer.text += delta.get("content") or ""
    answer.end_s = perf_counter() - started
    if answer.first_s is None:
        answer.first_s = answer.end_s
    if not {"prompt_tokens", "completion_tokens"} <= answer.usage.keys():
        raise EngineError("the server told no usage: it must know stream_options.include_usage")
    return answer
