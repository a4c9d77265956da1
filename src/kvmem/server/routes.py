"""The endpoints: /health, /v1/models, /v1/chat/completions, each also without /v1."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.request import RequestDefaults, parse_chat_request
from kvmem.errors import ContextLengthError
from kvmem.server.body import read_json
from kvmem.server.reply import EventStream, cancel_on_disconnect, first_event, read_whole
from kvmem.server.sse import ReplyShape
from kvmem.server.worker import EngineWorker

__all__ = ["OPEN_PATHS", "Api"]

OPEN_PATHS = ("/health", "/v1/health")  # need no key


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
        backend = self._worker.backend
        model = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvmem",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "meta": backend.describe(),
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """A chat completion, whole or streamed. The client's `model` is not looked at."""
        body = await read_json(request)
        backend = self._worker.backend
        asked = parse_chat_request(body, self._defaults)
        rendered = await run_in_threadpool(backend.render, asked)
        prompt = rendered.prompt
        if len(prompt.tokens) >= backend.n_ctx:
            raise ContextLengthError(len(prompt.tokens), backend.n_ctx)
        reader = rendered.reader()
        shape = ReplyShape(
            model=self._model_name,
            include_usage=asked.include_usage,
            include_memory=asked.include_memory,
            show_progress=asked.show_progress,
            shown_prompt=rendered.text if asked.show_prompt else None,
        )
        generation = self._worker.submit(prompt, rendered.params())
        if asked.stream:
            return EventStream(generation, await first_event(generation), shape, reader)
        async with generation, cancel_on_disconnect(request, generation):
            reply = await read_whole(generation, reader)
        return JSONResponse(shape.whole(reply, reader))
