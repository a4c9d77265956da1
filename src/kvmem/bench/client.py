"""The agent's tasks against a running server: kvmem serve, llama-server, or any other that speaks
OpenAI's chat completions. It measures what a client sees.
"""

import json
import random
from collections.abc import Iterator

from kvmem.bench.agent import CODE_REQUEST, AgentRecord, AgentSpec
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.progress import Report, silent
from kvmem.bench.wire import Message, Wire, make_characters, open_wire

__all__ = ["run_remote"]


def run_remote(
    spec: AgentSpec,
    url: str,
    *,
    api_key: str | None = None,
    report: Report = silent,
) -> Iterator[AgentRecord]:
    """Play the task against the server at `url`, such as http://127.0.0.1:8080.

    The history is as long as the server counts it, and so near n_tokens, not equal.

    Raises:
        ConfigError: the HTTP client is not installed.
        EngineError: the server did not answer, refused a request, or told no usage.
    """
    with open_wire(url, api_key) as wire:
        yield from _play(spec, wire, report)


def _play(spec: AgentSpec, wire: Wire, report: Report) -> Iterator[AgentRecord]:
    rng = random.Random(0)
    messages: list[Message] = [{"role": "system", "content": Harbor().opening()}]
    n_chars, held = len(messages[0]["content"]), 0
    chars_per_token = wire.characters_per_token()
    for turn in range(spec.rounds):
        text = make_characters(rng, int(spec.new_tokens(turn) * chars_per_token))
        messages += _messages(spec, turn, text)
        n_chars += len(text)
        answer = wire.ask(messages, spec.reply_of(turn))
        cached = answer.cached_tokens
        yield AgentRecord(
            task=spec.task,
            system="server",
            round=turn,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=held if cached is None else cached,
            replayed_tokens=None,
            reply_tokens=answer.reply_tokens,
            prompt_s=answer.first_s,
            decode_s=answer.end_s - answer.first_s,
            decision="",
            phases=None,
            bytes_in=None,
            drafted_tokens=answer.timings.get("draft_n"),
            accepted_tokens=answer.timings.get("draft_n_accepted"),
            device_bytes=None,
            host_bytes=None,
            rss_bytes=None,
            gpu_bytes=None,
        )
        chars_per_token = n_chars / answer.prompt_tokens
        held = answer.prompt_tokens  # what a server that does not tell must have kept
        messages.append(_said(spec, turn, answer.text))
        n_chars += len(answer.text)
        report("history", answer.prompt_tokens, spec.n_tokens)


def _messages(spec: AgentSpec, turn: int, text: str) -> list[Message]:
    if turn == 0 or spec.task == "chat":
        question = f"\n\nQuestion {turn + 1}: what was said last of the harbour?"
        asked = CODE_REQUEST if spec.asks_for_code(turn) else question
        return [{"role": "user", "content": text + asked}]
    return [{"role": "tool", "tool_call_id": f"call{turn - 1}", "content": text}]


def _said(spec: AgentSpec, turn: int, text: str) -> Message:
    """The reply as the next request has it: in `tools` with a call of one."""
    said: Message = {"role": "assistant", "content": text}
    if spec.task == "tools":
        call = {"name": "read_file", "arguments": json.dumps({"path": f"log{turn}.txt"})}
        said["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": call}]
    return said
