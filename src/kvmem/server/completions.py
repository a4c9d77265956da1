"""Plain completions: llama-server's own endpoint, and OpenAI's older one."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.completion import CompletionRequest, parse_completion_request
from kvmem.chat.request import RequestDefaults
from kvmem.chat.text import MixedText
from kvmem.engine.events import PromptProgress
from kvmem.errors import ContextLengthError
from kvmem.server import sse
from kvmem.server.backend import Backend
from kvmem.server.body import read_object_body
from kvmem.server.completion_reader import Piece, Tick, read_completion, read_whole_completion
from kvmem.server.completion_shape import NativeShape, OpenAiShape
from kvmem.server.event_stream import (
    FIRST_EVENT_S,
    Begun,
    EventLines,
    begin_stream,
    comments_until,
    end_on_disconnect,
    last_words,
)
from kvmem.server.work import Work, check_n_replies
from kvmem.server.worker import EngineWorker, Generation

__all__ = ["CompletionApi"]

Shape = NativeShape | OpenAiShape


class CompletionApi:
    """The handlers, and what they share."""

    def __init__(self, worker: EngineWorker, model_name: str, defaults: RequestDefaults) -> None:
        self._worker = worker
        self._model_name = model_name
        self._defaults = defaults

    def routes(self) -> list[Route]:
        table = (
            ("/completion", self.native),
            ("/completions", self.native),
            ("/v1/completions", self.openai),
        )
        return [Route(path, handler, methods=["POST"]) for path, handler in table]

    async def native(self, request: Request) -> Response:
        """As llama-server's /completion."""
        return await self._answer(request, NativeShape)

    async def openai(self, request: Request) -> Response:
        """As OpenAI's /v1/completions, with llama-server's extras."""
        return await self._answer(request, OpenAiShape)

    async def _answer(self, request: Request, kind: type[Shape]) -> Response:
        asked = parse_completion_request(
            await read_object_body(request, self._worker), self._defaults
        )
        check_n_replies("prompt", len(asked.prompts) * asked.n, self._worker)
        backend = self._worker.backend
        work = Work(self._worker, request)
        if asked.stream:
            beginning = await begin_stream(
                work,
                self._begin(asked, backend, work, kind),
                n_letters=max(map(_n_letters, asked.prompts)),
                n_ctx=backend.n_ctx,
            )
            return EventLines(work, beginning, _lines(beginning, asked))
        async with end_on_disconnect(request, work):
            begun = await self._begin(asked, backend, work, kind)
            replies = [await read_whole_completion(one, asked.stop) for one in begun.replies]
        return JSONResponse(begun.shape.whole(replies))

    async def _begin(
        self, asked: CompletionRequest, backend: Backend, work: Work, kind: type[Shape]
    ) -> Begun[Generation, Shape]:
        rendered = await self._worker.in_thread(backend.render_completion, asked)
        for prompt in rendered.prompts:
            if len(prompt.tokens) >= backend.n_ctx:
                raise ContextLengthError(len(prompt.tokens), backend.n_ctx)
        generations = work.submit([*zip(rendered.prompts, rendered.params, strict=True)])
        shape = kind(self._model_name, asked, rendered)
        first = await generations[0].next(FIRST_EVENT_S) if asked.stream else None
        return Begun(generations, shape, first)


def _n_letters(text: MixedText) -> int:
    return sum(len(part) for part in text if isinstance(part, str))


async def _lines(
    beginning: asyncio.Task[Begun[Generation, Shape]], asked: CompletionRequest
) -> AsyncIterator[bytes]:
    try:
        async for comment in comments_until(beginning):
            yield comment
        begun = beginning.result()
        first, shape = begun.first, begun.shape
        for index, generation in enumerate(begun.replies):
            async for item in read_completion(generation, asked.stop, first=first):
                if isinstance(item, Tick):
                    yield sse.COMMENT
                elif isinstance(item, PromptProgress):
                    if (chunk := shape.progress(index, item)) is not None:
                        yield sse.encode(chunk)
                elif isinstance(item, Piece):
                    yield sse.encode(shape.piece(index, item))
                else:
                    yield sse.encode(shape.last(index, item))
            first = None
        if shape.ends_with_done:
            yield sse.END
    except Exception as error:
        yield last_words(error)
