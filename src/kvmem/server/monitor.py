"""Endpoints for those who watch: /props, /slots and /metrics. They answer during a generation."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmem.chat.request import RequestDefaults
from kvmem.config import ServerConfig
from kvmem.errors import CapacityError
from kvmem.server.errors import SwitchedOff
from kvmem.server.sse import system_fingerprint
from kvmem.server.worker import EngineWorker

__all__ = ["MonitorApi"]


class MonitorApi:
    """The handlers, and what they share."""

    def __init__(
        self, worker: EngineWorker, config: ServerConfig, defaults: RequestDefaults
    ) -> None:
        self._worker = worker
        self._config = config
        self._defaults = defaults
        self._sampling: dict[str, Any] | None = None  # known once the model is there
        self._started = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(_Measures(worker))

    def routes(self) -> list[Route]:
        return [
            Route("/props", self.props, methods=["GET"]),
            Route("/slots", self.slots, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def props(self, request: Request) -> Response:
        """What is served, and with which settings."""
        backend = self._worker.backend
        about = backend.describe()
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": backend.n_ctx,
                    "params": self._params(),
                },
                "total_slots": 1,
                "model_alias": self._config.alias,
                "model_path": about.get("path", ""),
                "modalities": {"vision": False, "audio": False},
                "chat_template": about.get("chat_template", ""),
                "bos_token": about.get("bos_token", ""),
                "eos_token": about.get("eos_token", ""),
                "build_info": system_fingerprint(),
                "is_sleeping": False,
            }
        )

    async def slots(self, request: Request) -> Response:
        """The one slot: what runs, who waits, and the conversations that are kept."""
        if not self._config.show_slots:
            raise SwitchedOff("/slots is off: start without --no-slots")
        worker = self._worker
        backend = worker.backend
        now = worker.watch.now
        if "fail_on_no_slot" in request.query_params and now.is_running:
            raise CapacityError("no slot is free")
        slot = {
            "id": 0,
            "id_task": now.number,
            "n_ctx": backend.n_ctx,
            "speculative": backend.describe().get("speculative", False),
            "is_processing": now.is_running,
            "n_prompt_tokens": now.prompt_tokens,
            "n_prompt_tokens_processed": now.read_tokens,
            "next_token": [
                {
                    "n_decoded": now.reply_tokens if now.is_running else 0,
                    "n_remain": -1,
                    "has_next_token": now.is_running,
                }
            ],
            "params": self._params(),
            "kvmem": {
                "n_waiting": worker.n_waiting,
                "conversations": [asdict(info) for info in backend.conversations()],
                "last": now.report,
            },
        }
        return JSONResponse([slot])

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        if not self._config.show_metrics:
            raise SwitchedOff("/metrics is off: start with --metrics")
        _ = self._worker.backend
        return Response(
            generate_latest(self._registry),
            headers={
                "Content-Type": CONTENT_TYPE_LATEST,
                "Process-Start-Time-Unix": str(self._started),
            },
        )

    def _params(self) -> dict[str, Any]:
        if self._sampling is None:
            self._sampling = self._worker.backend.default_sampling(self._defaults)
        max_tokens = self._defaults.max_tokens
        return {
            **self._sampling,
            "n_predict": -1 if max_tokens is None else max_tokens,
        }


class _Measures(Collector):
    """Totals of the worker at the moment when they are asked for.

    Names with llamacpp are llama-server's.
    """

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        watch = self._worker.watch
        totals, now = watch.totals, watch.now
        read = totals.prompt_tokens - totals.cached_tokens
        yield _counter("llamacpp:prompt_tokens", "Prompt tokens that were read.", read)
        yield _counter("llamacpp:prompt_seconds", "Time until the first tokens.", totals.prompt_s)
        yield _counter("llamacpp:tokens_predicted", "Tokens of replies.", totals.reply_tokens)
        yield _counter(
            "llamacpp:tokens_predicted_seconds", "Time of the tokens after it.", totals.decode_s
        )
        yield _gauge(
            "llamacpp:prompt_tokens_seconds",
            "Prompt tokens read per second, on average.",
            read / totals.prompt_s if totals.prompt_s else 0.0,
        )
        yield _gauge(
            "llamacpp:predicted_tokens_seconds",
            "Reply tokens per second, on average.",
            totals.decode_steps / totals.decode_s if totals.decode_s else 0.0,
        )
        yield _gauge("llamacpp:requests_processing", "Requests that run.", int(now.is_running))
        yield _gauge("llamacpp:requests_deferred", "Requests that wait.", self._worker.n_waiting)
        yield _counter(
            "llamacpp:prompt_tokens_cached", "Those that were not read again.", totals.cached_tokens
        )
        yield _counter(
            "llamacpp:spec_decode_num_draft_tokens", "Tokens proposed.", totals.draft_tokens
        )
        yield _counter(
            "llamacpp:spec_decode_num_accepted_tokens", "And accepted.", totals.accepted_tokens
        )
        yield _counter("kvmem:replayed_tokens", "Tokens read twice.", totals.replayed_tokens)
        yield _counter("kvmem:blocks_in", "Blocks that came to the device.", totals.blocks_in)
        yield _counter("kvmem:blocks_out", "Blocks that left it.", totals.blocks_out)
        yield _counter("kvmem:bytes_in", "Bytes copied to the device.", totals.bytes_in)
        yield _counter("kvmem:bytes_out", "Bytes copied to the host.", totals.bytes_out)
        report = now.report or {}
        yield _gauge(
            "kvmem:host_bytes", "Bytes in use of the host limit.", report.get("host_bytes", 0)
        )
        yield _gauge("kvmem:device_bytes", "Bytes of the pool.", report.get("device_bytes", 0))
        yield _gauge("kvmem:conversations", "Conversations kept.", report.get("n_conversations", 0))
        ends = CounterMetricFamily(
            "kvmem:requests", "Replies that began, by how they ended.", labels=["end"]
        )
        for end, count in totals.ends.items():
            ends.add_metric([end], count)
        yield ends
        uses = CounterMetricFamily(
            "kvmem:conversation_uses", "Requests by how their conversation was found.",
            labels=["use"],
        )  # fmt: skip
        for use, count in totals.uses.items():
            uses.add_metric([use], count)
        yield uses


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
