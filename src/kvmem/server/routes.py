"""The endpoints: /health, /v1/models, /v1/chat/completions, each also without /v1."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.request import RequestDefaults, parse_chat_request
from kvmem.errors import ContextLengthError
from kvmem.server.body import read_json
from kvmem.server.pace import Pace
from kvmem.server.reply import Choice, EventStream, cancel_on_disconnect, first_event, read_whole
from kvmem.server.sse import ReplyShape
from kvmem.server.worker import EngineWorker

__all__ = ["Api"]

META = (
    "architecture", "n_ctx", "n_ctx_train", "n_embd", "n_params", "n_vocab", "size", "vocab_type",
)  # fmt: skip


class Api:
    """The handlers, and what they share."""

    def __init__(self, worker: EngineWorker, model_name: str, defaults: RequestDefaults) -> None:
        self._worker = worker
        self._model_name = model_name
        self._defaults = defaults

    def routes(self) -> list[Route]:
        table = (
            ("/health", self.health, "GET"),
            ("/models", self.models, "GET"),
            ("/models/{name:path}", self.model, "GET"),
            ("/chat/completions", self.chat, "POST"),
        )
        return [
            Route(prefix + path, handler, methods=[method])
            for path, handler, method in table
            for prefix in ("", "/v1")
        ]

    async def health(self, request: Request) -> Response:
        """200 once the model is loaded, 503 before."""
        _ = self._worker.backend
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model, by our name for it. Answers during a generation too."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The same alone; a 404 under any other name."""
        about = self._model()
        if request.path_params["name"] != self._model_name:
            raise HTTPException(404)
        return JSONResponse(about)

    def _model(self) -> dict[str, Any]:
        about = self._worker.backend.describe()
        return {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvmem",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "meta": {key: about[key] for key in META if key in about},
        }

    async def chat(self, request: Request) -> Response:
        """A chat completion, whole or streamed. The client's `model` is not looked at."""
        body = await read_json(request)
        backend = self._worker.backend
        asked = parse_chat_request(body, self._defaults)
        # a parser reads one reply, so each has its own
        rendered = [await run_in_threadpool(backend.render, asked) for _ in range(asked.n)]
        prompt = rendered[0].prompt
        again = replace(prompt, is_read_anew=False)  # the first reply has read it
        if len(prompt.tokens) >= backend.n_ctx:
            raise ContextLengthError(len(prompt.tokens), backend.n_ctx)
        shape = ReplyShape(
            model=self._model_name,
            prompt=rendered[0].text if asked.show_prompt else None,
            include_usage=asked.include_usage,
            include_memory=asked.include_memory,
        )
        async with AsyncExitStack() as stack:
            choices = [
                Choice(
                    await stack.enter_async_context(
                        self._worker.submit(again if number else prompt, one.params().vary(number))
                    ),
                    one.reader(),
                    Pace(with_progress=asked.show_progress, with_timings=asked.show_timings),
                )
                for number, one in enumerate(rendered)
            ]
            generations = [choice.generation for choice in choices]
            if asked.stream:
                first = await first_event(generations[0])
                stack.pop_all()  # from here on the stream ends them
                return EventStream(choices, first, shape)
            await stack.enter_async_context(cancel_on_disconnect(request, *generations))
            replies = [await read_whole(one.generation, one.reader) for one in choices]
        return JSONResponse(shape.whole(replies))
