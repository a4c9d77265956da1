"""Replies as JSON: whole, or as the chunks of an event stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvmem.chat.reply import CallDelta, Delta, ReplyMessage, ReplyReader
from kvmem.engine.events import Done, PromptProgress
from kvmem.engine.logprobs import TokenLogprob, TokenLogprobs
from kvmem.engine.stats import RequestStats
from kvmem.llama.runtime import build_number

__all__ = [
    "COMMENT",
    "END",
    "Progress",
    "Reply",
    "ReplyShape",
    "encode",
    "fingerprint",
    "timings_of",
    "usage_of",
]

COMMENT = b":\n\n"
END = b"data: [DONE]\n\n"


class Progress:
    """How far the reading of one prompt is, in llama-server's words."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._reused: int | None = None

    def of(self, event: PromptProgress) -> dict[str, Any]:
        """`prompt_progress`, for the part of a stream that tells it."""
        if self._reused is None:  # the first one says what was reused
            self._reused = event.n_done
        fields = {
            "total": event.n_total,
            "cache": self._reused,
            "processed": event.n_done,
            "time_ms": int((time.perf_counter() - self._began) * 1e3),
        }
        return {"prompt_progress": fields}


@cache
def fingerprint() -> str:
    """What OpenAI calls `system_fingerprint`: as llama-server has it, the build of llama.cpp."""
    return f"b{build_number()}-kvmem"


def encode(body: dict[str, Any]) -> bytes:
    """One event of the stream."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def usage_of(stats: RequestStats, *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts, in OpenAI's spelling and in DeepSeek's."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_cache_hit_tokens": stats.cached_tokens,
        "prompt_cache_miss_tokens": stats.prompt_tokens - stats.cached_tokens,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What all parts of one reply have in common.

    include_usage: send the chunk with usage. include_memory: add the memory report at the end.
    show_progress: send a chunk for each step of reading the prompt.
    shown_prompt: put it into the reply, where llama-server has it.
    """

    model: str
    include_usage: bool = False
    include_memory: bool = False
    show_progress: bool = False
    shown_prompt: str | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, reply: Reply, reader: ReplyReader) -> dict[str, Any]:
        """The reply of a request without `stream`."""
        done = reply.done
        choice: dict[str, Any] = {
            "index": 0,
            "message": _message(reply.message),
            "finish_reason": reader.finish_reason(done.reason),
        }
        if reply.logprobs:
            choice["logprobs"] = _logprobs(reply.logprobs)
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(done.stats, reasoning_tokens=reader.reasoning_tokens),
            **self._tail(done, reader),
        }

    def role(self) -> dict[str, Any]:
        """The first chunk."""
        return self._chunk({"role": "assistant", "content": None}, None)

    def progress(self, step: PromptProgress, n_cached: int, seconds: float) -> dict[str, Any]:
        """How far the prompt is read."""
        progress = {
            "total": step.n_total,
            "cache": n_cached,
            "processed": step.n_done,
            "time_ms": seconds * 1e3,
        }
        return {**self._chunk({}, None), "prompt_progress": progress}

    def chunks(self, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
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
        chunks = [self._chunk(item, None) for item in fields]
        if logprobs:
            chunks[0]["choices"][0]["logprobs"] = _logprobs(logprobs)
        return chunks

    def last(self, done: Done, reader: ReplyReader) -> list[dict[str, Any]]:
        """The chunk with the finish reason, and the one with usage if it was asked for."""
        finish = self._chunk({}, reader.finish_reason(done.reason))
        if not self.include_usage:
            return [{**finish, **self._tail(done, reader)}]
        usage = {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": usage_of(done.stats, reasoning_tokens=reader.reasoning_tokens),
            **self._tail(done, reader),
        }
        return [finish, usage]

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
        }

    def _tail(self, done: Done, reader: ReplyReader) -> dict[str, Any]:
        tail: dict[str, Any] = {"timings": timings_of(done.stats)}
        if self.shown_prompt is not None:
            tail["__verbose"] = {"prompt": self.shown_prompt}
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
