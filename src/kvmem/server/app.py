"""The ASGI application."""

import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmem.chat.request import RequestDefaults
from kvmem.config import ServerConfig
from kvmem.errors import KvmemError
from kvmem.server.backend import Backend
from kvmem.server.completions import CompletionApi
from kvmem.server.errors import error_response, http_error_response
from kvmem.server.routes import OPEN_PATHS, Api
from kvmem.server.tokens import TokenApi
from kvmem.server.worker import EngineWorker, Load

__all__ = ["create_app"]

_log = logging.getLogger(__name__)


def create_app(
    load: Load,
    config: ServerConfig,
    *,
    defaults: RequestDefaults | None = None,
    on_ready: Callable[[Backend], object] | None = None,
    on_failure: Callable[[BaseException], object] | None = None,
) -> Starlette:
    """The server around one backend, which is loaded when the application starts.

    config: alias must be set; host and port are the business of whoever runs the application.
    on_ready, on_failure: called in another thread, when the backend is loaded or cannot be.
    """
    worker = EngineWorker(
        load, queue_limit=config.queue_limit, on_ready=on_ready, on_failure=on_failure
    )
    defaults = defaults or RequestDefaults()
    api = Api(worker, config.alias or "kvmem", defaults)
    completions = CompletionApi(worker, config.alias or "kvmem", defaults)
    tokens = TokenApi(worker, defaults)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(worker.stop)

    return Starlette(
        routes=[*api.routes(), *completions.routes(), *tokens.routes()],
        middleware=[Middleware(ApiKeys, keys=config.api_keys)],
        exception_handlers={
            KvmemError: _on_kvmem_error,
            HTTPException: _on_http_error,
            Exception: _on_unknown_error,
        },
        lifespan=lifespan,
    )


class ApiKeys:
    """Lets through who brings a key, as bearer or X-Api-Key; all, where no key is set."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        response = http_error_response(401, "give a valid key as Authorization: Bearer")
        await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # every key is compared: the time tells nothing
        return any([hmac.compare_digest(given.strip().encode(), key) for key in self._keys])


async def _on_kvmem_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.url.path} here"
    response = http_error_response(error.status_code, message)
    response.headers.update(error.headers or {})
    return response


async def _on_unknown_error(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error)
