"""Plain completions: llama-server's own endpoint, and OpenAI's older one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.completion import CompletionRequest, parse_completion_request
from kvmem.chat.fields import FieldError
from kvmem.chat.request import RequestDefaults
from kvmem.engine.events import Event, PromptProgress
from kvmem.errors import ContextLengthError
from kvmem.server import sse
from kvmem.server.body import read_object_body
from kvmem.server.completion_reader import Piece, Tick, read_completion, read_whole_completion
from kvmem.server.completion_shape import NativeShape, OpenAiShape
from kvmem.server.reply import EventLines, cancel_on_disconnect, first_event, last_words
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
        asked = parse_completion_request(await read_object_body(request), self._defaults)
        most = self._worker.queue_limit
        if len(asked.prompts) * asked.n > most:  # they would never fit, so no 503
            raise FieldError("prompt", f"asks for {len(asked.prompts) * asked.n} replies, but one "
                             f"request may ask for {most}: send several")  # fmt: skip
        backend = self._worker.backend
        rendered = await run_in_threadpool(backend.render_completion, asked)
        for prompt in rendered.prompts:
            if len(prompt.tokens) >= backend.n_ctx:
                raise ContextLengthError(len(prompt.tokens), backend.n_ctx)
        shape = kind(self._model_name, asked, rendered)
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(self._worker.submit(prompt, params))
                for prompt, params in zip(rendered.prompts, rendered.params, strict=True)
            ]
            if asked.stream:
                first = await first_event(generations[0])
                stack.pop_all()  # from here on the stream ends them
                return EventLines(generations, _lines(generations, first, asked, shape))
            await stack.enter_async_context(cancel_on_disconnect(request, *generations))
            replies = [await read_whole_completion(one, asked.stop) for one in generations]
        return JSONResponse(shape.whole(replies))


async def _lines(
    generations: Sequence[Generation],
    first: Event | None,
    asked: CompletionRequest,
    shape: Shape,
) -> AsyncIterator[bytes]:
    yield sse.COMMENT  # headers go out with it
    try:
        for index, generation in enumerate(generations):
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
