"""Replies as JSON: whole, or as the chunks of an event stream."""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from kvmem.engine.events import Done
from kvmem.engine.stats import RequestStats

__all__ = ["COMMENT", "END", "ReplyShape", "encode", "timings_of", "usage_of"]

COMMENT = b":\n\n"
END = b"data: [DONE]\n\n"


def encode(body: dict[str, Any]) -> bytes:
    """One event of the stream."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def usage_of(stats: RequestStats) -> dict[str, Any]:
    """Token counts, in OpenAI's spelling and in DeepSeek's."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "prompt_cache_hit_tokens": stats.cached_tokens,
        "prompt_cache_miss_tokens": stats.prompt_tokens - stats.cached_tokens,
    }


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """llama-server's timings; retrieval and replay count as prompt."""
    read = stats.prompt_tokens - stats.cached_tokens
    decoded = stats.completion_tokens
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": read,
        "prompt_ms": stats.prompt_s * 1e3,
        "prompt_per_token_ms": stats.prompt_s * 1e3 / read if read else 0.0,
        "prompt_per_second": stats.prompt_per_s,
        "predicted_n": decoded,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_token_ms": stats.decode_s * 1e3 / decoded if decoded else 0.0,
        "predicted_per_second": stats.decode_per_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What all parts of one reply have in common.

    include_usage: send the chunk with usage. include_memory: add the memory report at the end.
    """

    model: str
    include_usage: bool = False
    include_memory: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """The reply of a request without `stream`."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": done.reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(done.stats),
            **self._tail(done),
        }

    def role(self) -> dict[str, Any]:
        """The first chunk."""
        return self._chunk({"role": "assistant", "content": None}, None)

    def content(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self, done: Done) -> list[dict[str, Any]]:
        """The chunk with the finish reason, and the one with usage if it was asked for."""
        finish = self._chunk({}, done.reason)
        if not self.include_usage:
            return [{**finish, **self._tail(done)}]
        usage = {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": usage_of(done.stats),
            **self._tail(done),
        }
        return [finish, usage]

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _tail(self, done: Done) -> dict[str, Any]:
        tail: dict[str, Any] = {"timings": timings_of(done.stats)}
        if self.include_memory:
            tail["kvmem"] = done.stats.memory.as_dict()
        return tail
