"""The exceptions of kvmem.

KvmemError
|-- ConfigError            a setting breaks a rule: names the setting, the value and the rule
|-- DownloadError          a file could not be fetched: says what failed and what to try
|-- ModelError             the model file cannot be used: names the file and the reason
|-- CapacityError          memory that was asked for cannot be had
|   `-- HostCapacityError      on the host: what is kept there may give way
|-- RequestError           the request cannot be served as it is
|   |-- ContextLengthError     the prompt is longer than the workspace
|   `-- UnsupportedContentError
|-- EngineError            the engine could not do what it should
|   |-- DecodeError            llama.cpp refused or failed a batch
|   |-- TransferError          a block could not be copied
|   `-- StateError             use after close, or out of order
`-- Cancelled              the caller stopped the work
"""

from typing import Any

__all__ = [
    "Cancelled",
    "CapacityError",
    "ConfigError",
    "ContextLengthError",
    "DecodeError",
    "DownloadError",
    "EngineError",
    "HostCapacityError",
    "KvmemError",
    "ModelError",
    "RequestError",
    "StateError",
    "TransferError",
    "UnsupportedContentError",
]


class KvmemError(Exception):
    """Base of all errors that kvmem raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Past __init__, which need not take the message: a worker's error is its parent's, too."""
        return _without_init, (type(self), *self.args), vars(self)


def _without_init(kind: type[KvmemError], *args: object) -> KvmemError:
    return kind.__new__(kind, *args)


class ConfigError(KvmemError):
    """A setting breaks a rule. The message names the setting, its value and the rule."""

    def __init__(self, setting: str, value: object, rule: str) -> None:
        super().__init__(f"{setting} is {value}, but must be {rule}")
        self.setting = setting
        self.value = value
        self.rule = rule


class DownloadError(KvmemError):
    """A file could not be fetched. The message says what failed, and what to try."""


class ModelError(KvmemError):
    """The model file cannot be used."""


class CapacityError(KvmemError):
    """Memory that was asked for cannot be had."""


class HostCapacityError(CapacityError):
    """The limit on host memory is reached, or the machine has no more."""


class RequestError(KvmemError):
    """The request cannot be served as it is."""


class ContextLengthError(RequestError):
    """The prompt is longer than the workspace. is_least: it has as many tokens, or more."""

    def __init__(self, prompt_tokens: int, limit_tokens: int, *, is_least: bool = False) -> None:
        super().__init__(
            f"the request ({prompt_tokens} tokens{' or more' if is_least else ''}) exceeds the "
            f"available context size ({limit_tokens} tokens), shorten it or start with a larger -c"
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class UnsupportedContentError(RequestError):
    """A content part of the request is of a kind that this model or version cannot read."""


class EngineError(KvmemError):
    """The engine could not do what it should. The session is valid or closed, never in between."""


class DecodeError(EngineError):
    """llama.cpp refused or failed a batch."""


class TransferError(EngineError):
    """A block could not be copied between tiers."""


class StateError(EngineError):
    """Use after close, or calls out of order."""


class Cancelled(KvmemError):
    """The caller stopped the work."""
