"""The endpoints: /health, /v1/models, /v1/chat/completions, each also without /v1."""

from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.request import ChatRequest, RequestDefaults, parse_chat_request
from kvmem.errors import ContextLengthError
from kvmem.server.backend import Backend
from kvmem.server.body import read_json
from kvmem.server.event_stream import FIRST_EVENT_S, Begun, begin_stream, end_on_disconnect
from kvmem.server.pace import Pace
from kvmem.server.reply import Choice, EventStream, read_whole
from kvmem.server.sse import ReplyShape
from kvmem.server.work import Work, check_n_replies
from kvmem.server.worker import EngineWorker

__all__ = ["META", "Api"]

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
            "meta": {key: about[key] for key in META},
        }

    async def chat(self, request: Request) -> Response:
        """A chat completion, whole or streamed. The client's `model` is not looked at."""
        body = await read_json(request, self._worker)
        backend = self._worker.backend
        asked = parse_chat_request(body, self._defaults)
        check_n_replies("n", asked.n, self._worker)
        work = Work(self._worker, request)
        if asked.stream:
            beginning = await begin_stream(
                work,
                self._begin(asked, backend, work),
                n_letters=sum(len(part) for one in asked.messages for part in one.parts),
                n_ctx=backend.n_ctx,
            )
            return EventStream(work, beginning)
        async with end_on_disconnect(request, work):
            begun = await self._begin(asked, backend, work)
            replies = [await read_whole(one.generation, one.reader) for one in begun.replies]
        return JSONResponse(begun.shape.whole(replies))

    async def _begin(
        self, asked: ChatRequest, backend: Backend, work: Work
    ) -> Begun[Choice, ReplyShape]:
        rendered = await self._worker.in_thread(backend.render, asked, limit_tokens=backend.n_ctx)
        prompt = rendered.prompt
        again = replace(prompt, is_read_anew=False)  # the first reply has read it
        if len(prompt.tokens) >= backend.n_ctx:
            raise ContextLengthError(len(prompt.tokens), backend.n_ctx)
        params = rendered.params()
        readers = rendered.readers(asked.n)
        generations = work.submit(
            [(again if number else prompt, params.vary(number)) for number in range(asked.n)]
        )
        choices = [
            Choice(
                generation,
                reader,
                Pace(with_progress=asked.show_progress, with_timings=asked.show_timings),
            )
            for generation, reader in zip(generations, readers, strict=True)
        ]
        shape = ReplyShape(
            model=self._model_name,
            prompt=rendered.text if asked.show_prompt else None,
            include_usage=asked.include_usage,
            include_memory=asked.include_memory,
        )
        first = await choices[0].generation.next(FIRST_EVENT_S) if asked.stream else None
        return Begun(choices, shape, first)
