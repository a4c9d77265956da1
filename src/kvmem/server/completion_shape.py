"""Completions as JSON, in llama-server's words and in OpenAI's."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kvmem.chat.completion import CompletionRequest, RenderedCompletion
from kvmem.engine.events import PromptProgress
from kvmem.engine.logprobs import TokenChance, TokenChances, TokenLogprob, TokenLogprobs
from kvmem.server.completion_reader import Piece, WholeReply
from kvmem.server.pace import Pace
from kvmem.server.sse import choices_usage, sum_usage, system_fingerprint, timings_of, usage_of

__all__ = ["NativeShape", "OpenAiShape"]


class NativeShape:
    """llama-server's /completion: a list where the prompt was one, and no [DONE] at the end."""

    ends_with_done = False

    def __init__(self, model: str, asked: CompletionRequest, rendered: RenderedCompletion) -> None:
        self._model = model
        self._asked = asked
        self._rendered = rendered
        self._paces = _paces(asked, rendered)

    def whole(self, replies: Sequence[WholeReply]) -> Any:
        """All replies, without `stream`."""
        bodies = [self._final(i, reply, reply.piece.text) for i, reply in enumerate(replies)]
        return bodies if self._asked.is_list or self._asked.n > 1 else bodies[0]

    def progress(self, index: int, event: PromptProgress) -> dict[str, Any] | None:
        """So much of the prompt is read; None where the client does not want to know."""
        told = self._paces[index].read(event)
        return {**self._part(index, Piece()), **told} if told else None

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Some text."""
        told = self._paces[index].said(len(piece.tokens))
        return {**self._part(index, piece), **_native_probabilities(piece.logprobs), **told}

    def last(self, index: int, reply: WholeReply) -> dict[str, Any]:
        """The end of a stream: everything but the text."""
        return self._final(index, reply, "")

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_evaluated": len(self._rendered.prompts[index].tokens),
        }

    def _final(self, index: int, reply: WholeReply, text: str) -> dict[str, Any]:
        stats = reply.done.stats
        asked = self._asked
        end = _stop_type(reply)
        body: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": reply.piece.tokens if asked.with_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage_of(stats, stopped_after=reply.stopped_after)[
                "completion_tokens"
            ],
            "tokens_evaluated": stats.prompt_tokens,
            "generation_settings": dict(self._rendered.settings),
            "prompt": self._rendered.texts[index],
            "has_new_line": reply.has_new_line,
            # by the workspace, that is: the limit of the request would not be called so
            "truncated": end == "limit" and stats.completion_tokens != asked.max_tokens,
            "stop_type": end,
            "stopping_word": reply.stopped_by,
            "tokens_cached": stats.prompt_tokens + stats.completion_tokens - 1,
            "timings": timings_of(stats),
        }
        if not asked.stream:
            body |= _native_probabilities(reply.piece.logprobs)
        if not asked.fields:
            return body
        return dict(_select(body, asked.fields))


class OpenAiShape:
    """OpenAI's text completions."""

    ends_with_done = True

    def __init__(self, model: str, asked: CompletionRequest, rendered: RenderedCompletion) -> None:
        self._asked = asked
        self._paces = _paces(asked, rendered)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint(),
        }

    def whole(self, replies: Sequence[WholeReply]) -> dict[str, Any]:
        """All replies, without `stream`: one choice each."""
        choices = [
            _choice(i, reply.piece, _finish_reason(reply)) for i, reply in enumerate(replies)
        ]
        usage = [usage_of(reply.done.stats, stopped_after=reply.stopped_after) for reply in replies]
        n = self._asked.n
        each = [choices_usage(usage[i : i + n]) for i in range(0, len(usage), n)]
        body = {**self._head, "choices": choices, "usage": sum_usage(each)}
        if len(replies) == 1:
            body["timings"] = timings_of(replies[0].done.stats)
        return body

    def progress(self, index: int, event: PromptProgress) -> dict[str, Any] | None:
        """So much of the prompt is read; None where the client does not want to know."""
        told = self._paces[index].read(event)
        choices = [_choice(index, Piece(), None)]
        return {**self._head, "choices": choices, **told} if told else None

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Some text."""
        told = self._paces[index].said(len(piece.tokens))
        return {**self._head, "choices": [_choice(index, piece, None)], **told}

    def last(self, index: int, reply: WholeReply) -> dict[str, Any]:
        """The end of a stream: everything but the text."""
        stats = reply.done.stats
        return {
            **self._head,
            "choices": [_choice(index, Piece(), _finish_reason(reply))],
            "usage": usage_of(stats, stopped_after=reply.stopped_after),
            "timings": timings_of(stats),
        }


def _paces(asked: CompletionRequest, rendered: RenderedCompletion) -> list[Pace]:
    return [
        Pace(with_progress=asked.with_progress, with_timings=asked.with_timings)
        for _ in rendered.prompts
    ]


def _choice(index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
    logprobs = {"content": _probabilities(piece.logprobs)} if piece.logprobs else None
    return {"text": piece.text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def _finish_reason(reply: WholeReply) -> str:
    return "stop" if reply.stopped_by else reply.done.reason


def _stop_type(reply: WholeReply) -> str:
    if reply.stopped_by:
        return "word"
    return "eos" if reply.done.reason == "stop" else "limit"


def _native_probabilities(logprobs: Sequence[TokenLogprobs | TokenChances]) -> dict[str, Any]:
    return {"completion_probabilities": _probabilities(logprobs)} if logprobs else {}


def _probabilities(found: Sequence[TokenLogprobs | TokenChances]) -> list[dict[str, Any]]:
    return [
        {
            **_probability(item.chosen),
            "top_logprobs" if isinstance(item, TokenLogprobs) else "top_probs": [
                _probability(entry) for entry in item.top
            ],
        }
        for item in found
    ]


def _probability(entry: TokenLogprob | TokenChance) -> dict[str, Any]:
    number = (
        {"logprob": entry.logprob} if isinstance(entry, TokenLogprob) else {"prob": entry.chance}
    )
    return {
        "id": entry.token,
        "token": entry.piece.decode("utf-8", "replace"),
        "bytes": list(entry.piece),
        **number,
    }


def _select(body: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """The named fields that there are; `a/b` is the field b of the field a."""
    found = []
    for name in names:
        value: Any = body
        for step in name.split("/"):
            if not isinstance(value, Mapping) or step not in value:
                break
            value = value[step]
        else:
            found.append((name, value))
    return found
