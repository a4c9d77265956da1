"""GGUF files as files: where the header ends, and which parts a split model has."""

import os
from pathlib import Path

from kvmem.errors import ModelError
from kvmem.llama import log, runtime

__all__ = ["data_offset", "split_files"]

cdef extern from "gguf.h" nogil:
    cdef struct ggml_context
    cdef struct gguf_context
    cdef struct gguf_init_params:
        bint no_alloc
        ggml_context **ctx
    gguf_context *gguf_init_from_file(const char *fname, gguf_init_params params)
    void gguf_free(gguf_context *ctx)
    size_t gguf_get_data_offset(const gguf_context *ctx)
    long long gguf_find_key(const gguf_context *ctx, const char *key)
    int gguf_get_kv_type(const gguf_context *ctx, long long key_id)
    unsigned short gguf_get_val_u16(const gguf_context *ctx, long long key_id)
    enum:
        GGUF_TYPE_UINT16

cdef extern from "llama.h" nogil:
    int llama_split_path(char *split_path, size_t maxlen, const char *path_prefix, int split_no,
                         int split_count)
    int llama_split_prefix(char *split_prefix, size_t maxlen, const char *split_path, int split_no,
                           int split_count)

cdef enum:
    MAX_PATH = 4096


cdef gguf_context *_open(path) except NULL:
    cdef gguf_init_params params
    cdef gguf_context *header
    cdef bytes name = os.fsencode(path)
    cdef const char *c_name = name
    runtime.ensure_started()
    params.no_alloc = True
    params.ctx = NULL
    with nogil:
        header = gguf_init_from_file(c_name, params)
    try:
        reasons = log.drain()
    except BaseException:  # a handler of the log, or an interrupt
        if header != NULL:
            gguf_free(header)
        raise
    if header == NULL:
        raise ModelError(f"cannot read the header of {path}: {'; '.join(reasons) or 'no reason'}")
    return header


def data_offset(path):
    """Bytes before the weights: metadata and tensor table. Raises ModelError."""
    cdef gguf_context *header = _open(path)
    cdef size_t offset = gguf_get_data_offset(header)
    gguf_free(header)
    return offset


def split_files(path):
    """All files of a model, in order; the file alone if it is no part of a split model.

    path: the first part. Raises ModelError if it is another one, or cannot be read.
    """
    cdef gguf_context *header = _open(path)
    cdef long long key = gguf_find_key(header, b"split.count")
    cdef int n_parts = 1, part
    cdef char text[MAX_PATH]
    cdef bytes name = os.fsencode(path)
    if key >= 0 and gguf_get_kv_type(header, key) == GGUF_TYPE_UINT16:
        n_parts = gguf_get_val_u16(header, key)
    gguf_free(header)
    if n_parts <= 1:
        return [Path(path)]
    if not llama_split_prefix(text, MAX_PATH, name, 0, n_parts):
        raise ModelError(f"{path} is one of {n_parts} parts, but not named as the first of them")
    prefix = bytes(text)
    files = []
    for part in range(n_parts):
        llama_split_path(text, MAX_PATH, prefix, part, n_parts)
        files.append(Path(os.fsdecode(bytes(text))))
    return files
