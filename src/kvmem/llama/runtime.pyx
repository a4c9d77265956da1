"""The process-wide part of llama.cpp: back ends, devices, KV cell types."""

from pathlib import Path
from threading import Lock

from kvmem.llama cimport c_llama as c
from kvmem.llama import log

__all__ = ["KV_TYPES", "devices", "ensure_started", "system_info"]

# name -> ggml_type: the KV types that kvmem offers
KV_TYPES = {
    "f32": <int>c.GGML_TYPE_F32,
    "f16": <int>c.GGML_TYPE_F16,
    "q8_0": <int>c.GGML_TYPE_Q8_0,
    "q5_0": <int>c.GGML_TYPE_Q5_0,
    "q4_0": <int>c.GGML_TYPE_Q4_0,
}

_lock = Lock()
_started = False


def ensure_started():
    """Load the back ends of this package, once, by their own path.

    llama.cpp would otherwise look for back ends in the current folder.
    """
    global _started
    cdef bytes folder
    with _lock:
        if _started:
            return
        log.install()
        folder = bytes(Path(__file__).resolve().parent.parent / "lib")
        c.ggml_backend_load_all_from_path(folder)
        c.llama_backend_init()
        log.drain()
        _started = True


def devices():
    """Each compute device as (name, description, kind, free bytes, total bytes).

    kind is "cpu", "gpu" or "other".
    """
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
        }.get(<int>c.device_get_type(device), "other")
        name = c.ggml_backend_dev_name(device).decode()
        description = c.ggml_backend_dev_description(device).decode()
        found.append((name, description, kind, free, total))
    return found


def system_info():
    """llama.cpp's line about the instruction sets and options of this build."""
    ensure_started()
    return c.llama_print_system_info().decode()
