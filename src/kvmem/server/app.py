"""The ASGI application."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from kvmem.chat.request import RequestDefaults
from kvmem.config import ServerConfig
from kvmem.errors import KvmemError
from kvmem.server.backend import Backend
from kvmem.server.completions import CompletionApi
from kvmem.server.errors import error_response, http_error_response
from kvmem.server.monitor import MonitorApi
from kvmem.server.request_log import RequestLog
from kvmem.server.routes import Api
from kvmem.server.security import ApiKeys, Hosts, Origins
from kvmem.server.tokens import TokenApi
from kvmem.server.worker import EngineWorker, Load

__all__ = ["create_app"]


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
    Its `state.halt()` tells all clients that the server is stopping: call it before connections
    are closed. `state.is_in_use()`, once it has ended: a thread cannot be waited for.
    """
    worker = EngineWorker(
        load, queue_limit=config.queue_limit, on_ready=on_ready, on_failure=on_failure
    )
    defaults = defaults or RequestDefaults()
    api = Api(worker, config.alias or "kvmem", defaults)
    completions = CompletionApi(worker, config.alias or "kvmem", defaults)
    tokens = TokenApi(worker, defaults)
    monitor = MonitorApi(worker, config, defaults)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)  # Starlette's threads may all be rendering

    routes = [*api.routes(), *completions.routes(), *tokens.routes(), *monitor.routes()]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestLog, routes=frozenset(route.path for route in routes)),
            *_host_check(config),
            Middleware(Origins, allowed=config.cors_origins),  # before keys: a preflight has none
            Middleware(ApiKeys, keys=config.api_keys),
        ],
        exception_handlers={
            KvmemError: _on_kvmem_error,
            HTTPException: _on_http_error,
            Exception: _on_unknown_error,
        },
        lifespan=lifespan,
    )
    app.state.halt = worker.halt
    app.state.is_in_use = lambda: worker.is_in_use
    return app


def _host_check(config: ServerConfig) -> list[Middleware]:
    """None where a key is asked for, or where any page may ask anyway."""
    if config.api_keys or "*" in config.cors_origins:
        return []
    pages = (urlsplit(origin).hostname or "" for origin in config.cors_origins)
    allowed = (*config.allowed_hosts, *pages)
    return [Middleware(Hosts, own=config.host, allowed=allowed)]


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
    # Starlette raises it once more, and the HTTP server logs it
    error.add_note(f"while answering {request.method} {request.url.path}")
    return error_response(error)
