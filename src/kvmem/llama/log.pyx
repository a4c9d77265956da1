"""The log of llama.cpp and ggml, as records of the logger ``kvmem.llama``."""

import logging

from kvmem.llama.c_adapter cimport kvmem_log_install, kvmem_log_take

__all__ = ["drain", "install"]

_logger = logging.getLogger("kvmem.llama")
# ggml_log_level: none, debug, info, warn, error, cont
_LEVELS = (logging.DEBUG, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.INFO)


def install():
    """Collect llama.cpp's log lines from now on; nothing is printed."""
    kvmem_log_install()


def drain():
    """Hand the collected lines to ``logging`` and return the errors among them, oldest first.

    When llama.cpp gives up a load or a decode it does not say why: the reason is in these lines.
    """
    cdef char text[4096]
    cdef int level = 0
    errors = []
    while kvmem_log_take(text, sizeof(text), &level):
        line = (<bytes>text).decode("utf-8", "replace").rstrip()
        if not line:
            continue
        # what llama.cpp calls info is detail to a user of this package
        _logger.log(_LEVELS[level] if 2 < level < 5 else logging.DEBUG, "%s", line)
        if level == 4:
            errors.append(line)
    return errors
