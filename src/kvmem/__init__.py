"""llama.cpp inference with tiered KV memory for long-running agents."""

import logging
from importlib import import_module

__all__ = [
    "CancelToken",
    "Engine",
    "EngineConfig",
    "GenerateParams",
    "MemoryConfig",
    "ModelConfig",
    "Prompt",
    "SamplingParams",
    "Session",
    "Span",
]

# a library leaves the handlers to its user; without this, Python would print warnings of a user who
# set none
logging.getLogger(__name__).addHandler(logging.NullHandler())

# name -> module. Loaded on first use: importing the package loads no native library.
_EXPORTS = {
    "CancelToken": "kvmem.llama.context",
    "Engine": "kvmem.engine.engine",
    "EngineConfig": "kvmem.config",
    "GenerateParams": "kvmem.engine.sampling",
    "MemoryConfig": "kvmem.config",
    "ModelConfig": "kvmem.config",
    "Prompt": "kvmem.engine.prompt",
    "SamplingParams": "kvmem.engine.sampling",
    "Session": "kvmem.engine.session",
    "Span": "kvmem.engine.prompt",
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
