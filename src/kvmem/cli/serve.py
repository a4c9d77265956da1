"""`kvmem serve`: the HTTP server."""

import errno
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from typer import Option

from kvmem.cli import faults, logs
from kvmem.cli.calibrate import calibrate_missing
from kvmem.cli.options import EngineOptions
from kvmem.cli.plan import make_plan, plan_of, render_plan
from kvmem.cli.sampling_options import SamplingOptions
from kvmem.cli.server_options import ServerOptions
from kvmem.cli.takes import takes
from kvmem.config import EngineConfig, ServerConfig
from kvmem.errors import ConfigError
from kvmem.server.app import create_app
from kvmem.server.backend import Backend, EngineBackend, check_template
from kvmem.server.worker import LoadProgress

__all__ = ["serve"]

# After a signal every client is told; who has not read it by then is cut off. Ten seconds after it
# the process is gone: the rest is for the batch that runs, and for giving the memory back.
SHUTDOWN_S = 7


class _Server(uvicorn.Server):
    """Stops the worker before connections are closed, so that requests get an answer."""

    def __init__(self, app: Starlette, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.halt()
        await super().shutdown(sockets)


@takes(EngineOptions, SamplingOptions, ServerOptions)
def serve(
    options: EngineOptions,
    sampling: SamplingOptions,
    server: ServerOptions,
    calibrate: Annotated[
        bool,
        Option(
            "--kvmem-calibrate",
            help="Calibrate first where a calibration is missing; minutes on a CPU.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        Option(
            "-v",
            "--verbose",
            help="Log notes of replies and what llama.cpp complains of; put prompts into replies.",
        ),
    ] = False,
    log_format: Annotated[
        logs.LogFormat, Option("--log-format", help="Log lines as text, or as JSON objects.")
    ] = "text",
    log_disable: Annotated[
        bool, Option("--log-disable", help="Log warnings and errors alone.")
    ] = False,
) -> None:
    """Serve OpenAI's chat completions over HTTP until interrupted."""
    logs.set_up(verbose=verbose and not log_disable, kind=log_format, server=True)
    if not log_disable:
        logs.show_requests()
    config = options.config()
    where = server.config(config.model.path)
    _check_certificate(where)
    defaults = replace(sampling.defaults(), show_prompt=verbose)
    failures: list[BaseException] = []
    with _listen(where) as listener:
        scheme = "http" if where.ssl_key_file is None else "https"
        url = f"{scheme}://{_host_for_url(where.host)}:{listener.getsockname()[1]}"

        def load(progress: LoadProgress) -> Backend:
            if calibrate:
                _check_start(config)  # before minutes are spent
                calibrate_missing(config, partial(progress, doing="being calibrated"))
            logs.say(f"loading {config.model.path}")
            return EngineBackend(config, progress=progress)

        def announce(backend: Backend) -> None:
            assert isinstance(backend, EngineBackend)
            logs.say(render_plan(plan_of(backend.engine)))
            logs.say(f"listening on {url}")

        def fail(error: BaseException) -> None:
            failures.append(error)
            runner.should_exit = True

        app = create_app(load, where, defaults=defaults, on_ready=announce, on_failure=fail)
        runner = _Server(
            app,
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_keyfile=where.ssl_key_file,
                ssl_certfile=where.ssl_cert_file,
            ),
        )

        def finish(number: int, frame: object) -> None:
            runner.should_exit = True

        # uvicorn stops by this signal, and raises it once more when it has: that is an orderly end
        signal.signal(signal.SIGTERM, finish)
        try:
            runner.run(sockets=[listener])
        except KeyboardInterrupt:
            _leave_threads(app, failures, 130)
            raise
        _leave_threads(app, failures, 0)
    if failures:
        raise failures[0]


def _check_start(config: EngineConfig) -> None:
    """Raises what a start would of settings that do not suit the model or the machine."""
    make_plan(config)
    check_template(config.model)


def _leave_threads(app: Starlette, failures: Sequence[BaseException], code: int) -> None:
    """End the process where a long prompt is still rendered, or a model still calibrated: Python
    would wait for that. A failure is told, and is the code.
    """
    if not app.state.is_in_use():
        return
    Console(stderr=True).show_cursor()  # a bar that is left behind has hidden it
    if failures:
        assert isinstance(failures[0], Exception)
        line, code = faults.describe(failures[0], command="serve")
        logs.complain(line)
    sys.stderr.flush()
    os._exit(code)


def _check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError before the model is loaded: the pair cannot be used."""
    if config.ssl_key_file is None or config.ssl_cert_file is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_cert_file, config.ssl_key_file)
    except OSError as error:  # ssl.SSLError is one
        rule = f"a certificate in PEM whose key is in ssl_key_file={config.ssl_key_file} ({error})"
        raise ConfigError("ssl_cert_file", config.ssl_cert_file, rule) from None


def _listen(config: ServerConfig) -> socket.socket:
    """A bound socket; the port is known to be free before anything is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen()
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", config.host, "an address of this machine") from None
        raise ConfigError(
            "port", config.port, f"free on {config.host} ({error.strerror})"
        ) from None
    return listener


def _host_for_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
