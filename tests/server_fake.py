"""A stand-in for the engine that plays a script, and a client that can hang up."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from kvmem.chat.completion import CompletionRequest, RenderedCompletion
from kvmem.chat.render import ChatRenderer, RenderedChat
from kvmem.chat.request import ChatRequest, RequestDefaults
from kvmem.chat.text import tokenize_mixed
from kvmem.config import ServerConfig
from kvmem.engine.conversations import ConversationInfo
from kvmem.engine.events import Done, Event, PromptProgress, StopReason, TokenEvent
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams
from kvmem.engine.stats import RequestStats
from kvmem.llama.context import CancelToken
from kvmem.server.app import create_app
from kvmem.server.routes import META

WAIT_S = 10.0
ENDLESS = [b"x"] * 10_000


@dataclass
class Script:
    """What one generation does.

    pieces: bytes of each token. fail_at: raise `error` before this token (-1: before progress).
    hold_at: before this token, wait until `release` is set or the request is cancelled.
    """

    pieces: Sequence[bytes] = (b"Hello", b" world")
    error: Exception | None = None
    fail_at: int = 0
    hold_at: int | None = None
    release: threading.Event = field(default_factory=threading.Event)


class FakeTokenizer:
    """Each byte is a token, and 256 is what the model wants at the start."""

    n_tokens = 257

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        return [256] * add_special + list(text.encode())

    def piece(self, token: int, *, special: bool = True) -> bytes:
        return b"<s>" if token == 256 else bytes([token])


class FakeBackend:
    """Each generation plays the next script, or the last again.

    renderer: a real template, which the replies are read by; without one a prompt's tokens are
        its words, and a reply is its text.
    """

    def __init__(
        self, *scripts: Script, n_ctx: int = 64, renderer: ChatRenderer | None = None
    ) -> None:
        self.n_ctx = n_ctx
        self.tokenizer = FakeTokenizer()
        self._renderer = renderer
        self.scripts = list(scripts) or [Script()]
        self.requests: list[ChatRequest] = []
        self.params: list[GenerateParams] = []
        self.ends: list[str] = []
        self.started = threading.Semaphore(0)
        self.holding = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.closed = False

    def render(self, request: ChatRequest, *, limit_tokens: int | None = None) -> RenderedChat:
        self.requests.append(request)
        if self._renderer is not None:
            return self._renderer.render(request)
        text = " ".join(message.text for message in request.messages)
        spans: list[RoleSpan] = []
        for message in request.messages:
            start = spans[-1].span.stop if spans else 0
            stop = start + len(message.text.split())
            spans.append(RoleSpan(message.role, Span(start, stop)))
        return RenderedChat(
            text=text,
            prompt=Prompt(
                tokens=tuple(range(len(text.split()))),
                spans=tuple(spans),
                conversation_id=request.conversation_id,
            ),
            stops=request.stop,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            n_logprobs=request.n_logprobs,
        )

    def render_completion(self, request: CompletionRequest) -> RenderedCompletion:
        tokenizer: Any = self.tokenizer
        prompts = [
            Prompt(tokens=tuple(tokenize_mixed(text, tokenizer, "prompt", add_special=True)))
            for text in request.prompts
            for _ in range(request.n)
        ]
        params = GenerateParams(sampling=request.sampling, max_tokens=request.max_tokens)
        texts = [b"".join(map(tokenizer.piece, prompt.tokens)).decode() for prompt in prompts]
        return RenderedCompletion(
            prompts=tuple(prompts),
            texts=tuple(texts),
            params=(params,) * len(prompts),
            settings={"n_predict": request.max_tokens},
        )

    def generate(
        self, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.params.append(params)
        self.started.release()
        end: str = "failed"
        try:
            for event in self._play(script, prompt, params, cancel):
                if isinstance(event, Done):
                    end = event.reason
                yield event
        finally:
            self.ends.append(end)
            self.ended.release()

    def _play(
        self, script: Script, prompt: Prompt, params: GenerateParams, cancel: CancelToken
    ) -> Iterator[Event]:
        if script.error is not None and script.fail_at < 0:
            raise script.error
        n = len(prompt.tokens)
        stats = RequestStats(prompt_tokens=n, cached_tokens=n // 2, prompt_s=0.5, decode_s=0.25)
        reason: StopReason = "stop"
        yield PromptProgress(n // 2, n)
        for index, piece in enumerate(script.pieces):
            if index == script.hold_at:
                self.holding.release()
                while not (script.release.wait(0.01) or cancel.is_set()):
                    pass
            if cancel.is_set():
                reason = "cancelled"
                break
            if script.error is not None and script.fail_at == index:
                raise script.error
            if index == params.max_tokens:
                reason = "length"
                break
            stats.completion_tokens += 1
            yield TokenEvent(index, piece)
        yield Done(reason, stats)

    def describe(self) -> dict[str, Any]:
        return {**dict.fromkeys(META, 0), "n_ctx": self.n_ctx}

    def default_sampling(self, defaults: RequestDefaults) -> dict[str, Any]:
        return defaults.sampling.as_dict()

    def conversations(self) -> tuple[ConversationInfo, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


def app_of(
    backend: FakeBackend, *, defaults: RequestDefaults | None = None, **config: Any
) -> Starlette:
    return create_app(lambda _: backend, ServerConfig(alias="tiny", **config), defaults=defaults)


def acquire(semaphore: threading.Semaphore) -> None:
    """Wait for it, or fail the test."""
    assert semaphore.acquire(timeout=WAIT_S)


def until(condition: Callable[[], object]) -> None:
    """Wait, without a fixed time, for what another thread does soon."""
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not happen")


class Call:
    """One HTTP exchange, straight over ASGI: what came back is readable while it runs.

    reads: cleared, the client takes nothing more. is_cut: more of the body was to come.
    """

    def __init__(
        self,
        app: Starlette,
        body: dict[str, Any],
        *,
        path: str = "/v1/chat/completions",
        is_cut: bool = False,
    ) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        data = json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": is_cut})
        self.status: int | None = None
        self.body = b""
        self.reads = asyncio.Event()
        self.reads.set()
        self._news = asyncio.Event()
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "headers": [], "root_path": "",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.body += message.get("body", b"")
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


@asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[Starlette]:
    """The application between start-up and shutdown."""
    async with app.router.lifespan_context(app):
        yield app


def body(text: str = "one two", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await test

    asyncio.run(limited())


async def ready(app: Any) -> None:
    """The worker has loaded its backend: a request is served."""
    while (call := Call(app, body(max_tokens=0))).status != 200:
        await call.task
        if call.status == 200:
            return


def arrived(backend: FakeBackend, n: int) -> Callable[[], bool]:
    return lambda: len(backend.requests) == n
