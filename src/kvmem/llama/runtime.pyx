"""The process-wide part of llama.cpp: back ends, devices, KV cell types."""

import os
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvmem.errors import EngineError
from kvmem.llama cimport c_bridge
from kvmem.llama cimport c_llama as c
from kvmem.llama import log
from kvmem.llama.backends import choose_backends

__all__ = [
    "KV_TYPES",
    "Device",
    "build_number",
    "devices",
    "ensure_started",
    "gpus",
    "system_info",
]

# name -> ggml_type: the KV types that kvmem offers
KV_TYPES = {
    "f32": <int>c.GGML_TYPE_F32,
    "f16": <int>c.GGML_TYPE_F16,
    "q8_0": <int>c.GGML_TYPE_Q8_0,
    "q5_0": <int>c.GGML_TYPE_Q5_0,
    "q4_0": <int>c.GGML_TYPE_Q4_0,
}


class Device(NamedTuple):
    """A compute device. kind: "cpu", "gpu", "integrated gpu" or "other"."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


_lock = Lock()
_started = False


def ensure_started():
    """Load the back ends of this package, once, by their own paths.

    llama.cpp would otherwise look for back ends in the current folder.

    Raises:
        EngineError: a module of this package that cannot be loaded, by name.
    """
    global _started
    cdef bytes name
    with _lock:
        if _started:
            return
        log.install()
        for path in choose_backends(Path(__file__).resolve().parent.parent / "lib"):
            name = os.fsencode(path)
            if c.ggml_backend_load(name) == NULL:
                reason = "; ".join(log.drain()) or "ggml gave no reason"
                raise EngineError(f"cannot load the back end {path.name}: {reason}")
        if c.ggml_backend_dev_count() == 0:
            raise EngineError("this build has no compute back end for this machine")
        c.llama_backend_init()
        log.drain()
        _started = True


def devices():
    """Each compute device."""
    cdef size_t free = 0
    cdef size_t total = 0
    cdef c.ggml_backend_dev_t device
    ensure_started()
    found = []
    for i in range(c.ggml_backend_dev_count()):
        device = c.ggml_backend_dev_get(i)
        c.ggml_backend_dev_memory(device, &free, &total)
        kind = {
            <int>c.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
            <int>c.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
            <int>c.GGML_BACKEND_DEVICE_TYPE_IGPU: "integrated gpu",
        }.get(<int>c.device_get_type(device), "other")
        name = c.ggml_backend_dev_name(device).decode()
        description = c.ggml_backend_dev_description(device).decode()
        found.append(Device(name, description, kind, free, total))
    return found


def gpus():
    """The devices that layers may lie on.

    An integrated GPU is one where there is no other, although its memory is the machine's.
    Source: llama.cpp's llama_prepare_model_devices.
    """
    found = devices()
    own = [device for device in found if device.kind == "gpu"]
    return own or [device for device in found if device.kind == "integrated gpu"]


def build_number():
    """llama.cpp's build number; 0 where it was built from a checkout of one's own."""
    return c_bridge.kvmem_bridge_build_number()


def system_info():
    """llama.cpp's line about the instruction sets and options of this build."""
    ensure_started()
    return c.llama_print_system_info().decode()
