from typing import Final, Literal, NamedTuple

__all__ = [
    "KV_TYPES",
    "Device",
    "build_number",
    "devices",
    "ensure_started",
    "gpus",
    "system_info",
]

KV_TYPES: Final[dict[str, int]]

class Device(NamedTuple):
    name: str
    description: str
    kind: Literal["cpu", "gpu", "integrated gpu", "other"]
    free_bytes: int
    total_bytes: int

def ensure_started() -> None: ...
def devices() -> list[Device]: ...
def gpus() -> list[Device]: ...
def build_number() -> int: ...
def system_info() -> str: ...
