"""Replies as JSON: whole, or as the chunks of an event stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvmem.chat.reply import CallDelta, Delta, ReplyMessage, ReplyReader
from kvmem.engine.events import Done
from kvmem.engine.logprobs import TokenLogprob, TokenLogprobs
from kvmem.engine.stats import RequestStats
from kvmem.llama.runtime import build_number

__all__ = [
    "COMMENT",
    "END",
    "Reply",
    "ReplyShape",
    "choices_usage",
    "encode",
    "sum_usage",
    "system_fingerprint",
    "timings_of",
    "usage_of",
]

COMMENT = b":\n\n"
END = b"data: [DONE]\n\n"
# outside of ASCII; some clients (httpx) take them for ends of lines. They stand in texts alone
LINE_ENDS = {point: f"\\u{point:04x}" for point in (0x85, 0x2028, 0x2029)}


@cache
def system_fingerprint() -> str:
    """What OpenAI calls `system_fingerprint`: as llama-server has it, the build of llama.cpp."""
    return f"b{build_number()}-kvmem"


def encode(body: dict[str, Any]) -> bytes:
    """One event of the stream."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.translate(LINE_ENDS).encode() + b"\n\n"


def usage_of(
    stats: RequestStats, *, stopped_after: int | None = None, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Token counts, in OpenAI's spelling and in DeepSeek's.

    stopped_after: tokens up to a stop text, where one ended the reply: a few more may have been
        decoded until that was seen, which `timings` count and nobody gets.
    """
    n_tokens = stats.completion_tokens if stopped_after is None else stopped_after
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": n_tokens,
        "total_tokens": stats.prompt_tokens + n_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_cache_hit_tokens": stats.cached_tokens,
        "prompt_cache_miss_tokens": stats.prompt_tokens - stats.cached_tokens,
    }


def choices_usage(usage: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of several replies to one prompt: that counts once, as the first found it, and all
    that was said to it counts.
    """
    said = sum(one["completion_tokens"] for one in usage)
    details = sum(one["completion_tokens_details"]["reasoning_tokens"] for one in usage)
    return {
        **usage[0],
        "completion_tokens": said,
        "total_tokens": usage[0]["prompt_tokens"] + said,
        "completion_tokens_details": {"reasoning_tokens": details},
    }


def sum_usage(usage: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts for several prompts as one."""
    return {
        name: sum_usage([one[name] for one in usage])
        if isinstance(value, dict)
        else sum(one[name] for one in usage)
        for name, value in usage[0].items()
    }


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """llama-server's timings; retrieval and replay count as prompt. Drafts where there were any."""
    read = stats.prompt_tokens - stats.cached_tokens
    decoded = stats.completion_tokens
    drafts = {"draft_n": stats.draft_n, "draft_n_accepted": stats.draft_n_accepted}
    steps = decoded - 1  # the first token costs no step: it comes from the prompt's last batch
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": read,
        "prompt_ms": stats.prompt_s * 1e3,
        "prompt_per_token_ms": stats.prompt_s * 1e3 / read if read else 0.0,
        "prompt_per_second": stats.prompt_per_s,
        "predicted_n": decoded,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_token_ms": stats.decode_s * 1e3 / steps if steps > 0 else 0.0,
        "predicted_per_second": stats.decode_per_s,
        **(drafts if stats.draft_n else {}),
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, as it was read."""

    message: ReplyMessage
    logprobs: Sequence[TokenLogprobs]
    done: Done
    reader: ReplyReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What all parts of one reply have in common.

    include_usage: send the chunk with usage. include_memory: add the memory report at the end.
    prompt: its text, if it is to stand in the reply.
    """

    model: str
    prompt: str | None = None
    include_usage: bool = False
    include_memory: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The reply of a request without `stream`: a choice for each that was wanted."""
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, reply) for index, reply in enumerate(replies)],
            **self._usage([(reply.done, reply.reader) for reply in replies]),
            **self._tail(replies[0].done, replies[0].reader),
        }

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(reply.message),
            "finish_reason": reply.reader.finish_reason(reply.done.reason),
        }
        if reply.logprobs:
            choice["logprobs"] = _logprobs(reply.logprobs)
        return choice

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": None}, None)

    def progress(self, index: int, told: dict[str, Any]) -> dict[str, Any]:
        """A chunk that says only how far the prompt is read."""
        return {**self._chunk(index, {}, None), **told}

    def chunks(
        self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any]]:
        """One chunk for each kind of thing that a delta has, and each call; logprobs with the
        first.
        """
        fields: list[dict[str, Any]] = []
        if delta.reasoning:
            fields.append({"reasoning_content": delta.reasoning})
        if delta.content:
            fields.append({"content": delta.content})
        fields += [{"tool_calls": [_call_delta(call)]} for call in delta.calls]
        if logprobs and not fields:
            fields.append({"content": ""})
        chunks = [self._chunk(index, item, None) for item in fields]
        if logprobs:
            chunks[0]["choices"][0]["logprobs"] = _logprobs(logprobs)
        return chunks

    def finish(self, index: int, done: Done, reader: ReplyReader) -> dict[str, Any]:
        """The last chunk of a choice."""
        finish = self._chunk(index, {}, reader.finish_reason(done.reason))
        return finish if self.include_usage else {**finish, **self._tail(done, reader)}

    def usage(self, ends: Sequence[tuple[Done, ReplyReader]]) -> dict[str, Any]:
        """The chunk with usage, after all choices."""
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            **self._usage(ends),
            **self._tail(*ends[0]),
        }

    def _usage(self, ends: Sequence[tuple[Done, ReplyReader]]) -> dict[str, Any]:
        counts = [
            usage_of(
                done.stats,
                stopped_after=reader.n_tokens if reader.is_stopped else None,
                reasoning_tokens=reader.reasoning_tokens,
            )
            for done, reader in ends
        ]
        return {"usage": choices_usage(counts)}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": system_fingerprint(),
        }

    def _tail(self, done: Done, reader: ReplyReader) -> dict[str, Any]:
        tail: dict[str, Any] = {"timings": timings_of(done.stats)}
        if self.prompt is not None:
            tail["__verbose"] = {"prompt": self.prompt}
        if self.include_memory:
            report = done.stats.memory.as_dict()
            tail["kvmem"] = {**report, "notes": [*report["notes"], *reader.notes]}
        return tail


def _message(message: ReplyMessage) -> dict[str, Any]:
    """Content is null only beside calls; what there is none of is left out."""
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [_call(call) for call in message.calls]
    return fields


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = [
        {**_logprob(item.chosen), "top_logprobs": [_logprob(entry) for entry in item.top]}
        for item in logprobs
    ]
    return {"content": content}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.piece.decode("utf-8", "replace"),
        "logprob": entry.logprob,
        "bytes": list(entry.piece),
    }
