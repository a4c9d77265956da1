"""The server in this process over the real engine, for tests that look into both."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engines import Call, RecordingContext, make_config
from server_fake import until
from starlette.testclient import TestClient

from kvmem.chat.request import parse_chat_request
from kvmem.config import ServerConfig
from kvmem.engine import engine as engine_module
from kvmem.engine.memory import TieredMemory
from kvmem.server.app import create_app
from kvmem.server.backend import EngineBackend

Message = dict[str, str]


def letters(n_tokens: int, seed: int = 0) -> str:
    """Text of about n tokens: single letters, and a space before each."""
    return "".join(f" {chr(97 + (seed * 13 + i * i * 7 + i) % 26)}" for i in range(n_tokens // 2))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as the client has it. read: tokens that were not cached. memory: the report."""

    text: str
    end: str
    n_prompt: int
    n_cached: int
    n_drafted: int
    memory: dict[str, Any] = field(repr=False)

    @property
    def read(self) -> int:
        return self.n_prompt - self.n_cached


@dataclass(frozen=True, slots=True)
class Served:
    """A client of a server, and the engine behind it with the calls that it made."""

    client: TestClient
    backend: EngineBackend
    context: RecordingContext

    @property
    def calls(self) -> list[Call]:
        return self.context.calls

    @property
    def memory(self) -> TieredMemory:
        return self.backend.engine.tiered

    def chat(self, *messages: Message, **fields: Any) -> Answer:
        """Greedy, without thinking and without an end before max_tokens."""
        response = self.client.post("/v1/chat/completions", json=_body(messages, fields))
        assert response.status_code == 200, response.text
        whole = response.json()
        choice, usage, timings = whole["choices"][0], whole["usage"], whole["timings"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["prompt_n"] == usage["prompt_tokens"] - n_cached
        return Answer(
            choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"],
            n_cached, timings.get("draft_n", 0), whole["kvmem"],
        )  # fmt: skip

    def tokens(self, *messages: Message, **fields: Any) -> tuple[int, ...]:
        """The prompt that these messages become."""
        rendered = self.backend.render(parse_chat_request(_body(messages, fields)))
        return tuple(rendered.prompt.tokens)


def _body(messages: tuple[Message, ...], fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": list(messages), "temperature": 0, "enable_thinking": False,
        "ignore_eos": True, "max_tokens": 8, "kvmem": True, **fields,
    }  # fmt: skip


@contextmanager
def served(path: Path, **memory: Any) -> Iterator[Served]:
    """``memory``: as make_config of engines has it, n_drafts among it."""
    made: list[EngineBackend] = []

    def load(progress: Any) -> EngineBackend:
        made.append(EngineBackend(make_config(path, **memory), progress=progress))
        return made[0]

    with patch.object(engine_module, "Context", RecordingContext):
        client = TestClient(create_app(load, ServerConfig(alias="tiny")))
        client.__enter__()
        try:
            until(lambda: client.get("/health").status_code == 200)
        except BaseException:
            client.__exit__(None, None, None)
            raise
    try:
        engine = made[0].engine
        context = engine.memory.context
        assert isinstance(context, RecordingContext)
        context.calls, context.watched = [], engine.memory
        yield Served(client, made[0], context)
    finally:
        client.__exit__(None, None, None)
