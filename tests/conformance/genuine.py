"""llama-server itself, out of the `xllamacpp` wheel: run with the flags of the tests."""

import signal
import sys
import threading
from typing import Any

import xllamacpp
from flags import parse_flags

MUCH: int = 100
"""A verbosity from which on replies carry `__verbose`, as `--verbose` has it."""


def main() -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    server = xllamacpp.Server(_params(sys.argv[1:]))
    stopped.wait()
    del server


def _params(arguments: list[str]) -> Any:
    flags = parse_flags(arguments)
    params = xllamacpp.CommonParams()
    params.model.path = str(flags.model)
    params.model_alias = [name for name in flags.alias.split(",") if name]
    params.model_tags = [name for name in flags.tags.split(",") if name]
    params.hostnames = flags.host.split(",")
    params.port = flags.port
    params.n_ctx = flags.ctx_size
    params.n_batch = flags.batch_size
    params.n_ubatch = flags.ubatch_size
    params.cpuparams.n_threads = flags.threads
    params.n_predict = flags.n_predict
    params.n_parallel = flags.parallel
    params.kv_unified = flags.kv_unified
    params.ctx_shift = flags.context_shift
    params.warmup = False
    params.sampling.temp = flags.temp
    params.sampling.seed = flags.seed
    params.sampling.backend_sampling = flags.backend_sampling
    params.endpoint_slots = flags.slots
    params.endpoint_metrics = flags.metrics
    params.ui = not flags.no_ui
    params.use_jinja = True
    if flags.verbose:
        params.verbosity = MUCH
    if flags.api_key:
        params.api_keys = [flags.api_key]
    if flags.cors_origins:
        params.cors_origins = flags.cors_origins
    if flags.chat_template:
        params.chat_template = flags.chat_template
    if flags.chat_template_file:
        with open(flags.chat_template_file) as file:
            params.chat_template = file.read()
    if flags.reasoning in ("on", "off"):
        params.enable_reasoning = int(flags.reasoning == "on")
        thinks = "true" if flags.reasoning == "on" else "false"
        params.default_template_kwargs = {"enable_thinking": thinks}
    if flags.reasoning_format:
        kind = xllamacpp.common_reasoning_format
        params.reasoning_format = getattr(
            kind, f"COMMON_REASONING_FORMAT_{flags.reasoning_format.upper()}"
        )
    return params


if __name__ == "__main__":
    main()
