// Cells and rows: who sits where, and the bytes.
#include "kvmem-memory.h"

#include "llama-context.h"

#include <algorithm>

static int fail(int status, const char * text) {
    kvmem_set_error(text);
    return status;
}

static bool in_range(const kvmem_memory * memory, int64_t cell, uint32_t n) {
    return cell >= 0 && cell + n <= memory->attn->get_size();
}

int kvmem_cells_place(kvmem_memory * memory, const int32_t * cells, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        if (!in_range(memory, cells[i], 1)) {
            return fail(KVMEM_ERR_ARGUMENT, "a token was placed outside the cells");
        }
        if (!memory->cells().is_empty(cells[i])) {
            return fail(KVMEM_ERR_STATE, "a token was placed into a cell that is in use");
        }
    }
    memory->placed.assign(cells, cells + n);
    memory->n_used_at_place = memory->cells().get_used();
    return KVMEM_OK;
}

int kvmem_cells_publish(kvmem_memory * memory, int32_t cell, const kvmem_cell_meta * meta, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to publish lie outside the cache");
    }
    auto & cells = memory->cells();
    for (uint32_t i = 0; i < n; ++i) {
        if (!cells.is_empty(cell + i)) {
            return fail(KVMEM_ERR_STATE, "a cell to publish is in use");
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        llama_kv_cell_ext ext;
        ext.x   = meta[i].x;
        ext.y   = meta[i].y;
        ext.tok = meta[i].token;
        cells.pos_set(cell + i, meta[i].pos[0]);
        cells.ext_set(cell + i, ext);
        cells.seq_add(cell + i, 0);
    }
    return KVMEM_OK;
}

int kvmem_cells_clear(kvmem_memory * memory, int32_t cell, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to clear lie outside the cache");
    }
    auto & cells = memory->cells();
    for (uint32_t i = 0; i < n; ++i) {
        if (!cells.is_empty(cell + i)) {
            cells.rm(cell + i);
        }
    }
    return KVMEM_OK;
}

int kvmem_cells_read(const kvmem_memory * memory, int32_t cell, int32_t * pos, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to read lie outside the cache");
    }
    const auto & cells = memory->cells();
    for (uint32_t i = 0; i < n; ++i) {
        pos[i] = cells.is_empty(cell + i) ? -1 : cells.pos_get(cell + i);
    }
    return KVMEM_OK;
}

uint32_t kvmem_cells_used(const kvmem_memory * memory) {
    return memory->cells().get_used();
}

size_t kvmem_payload_bytes(const kvmem_memory * memory, uint32_t block_tokens) {
    size_t bytes = 0;
    for (const auto & layer : memory->layers) {
        bytes += block_tokens * (layer.info.k_row_bytes + layer.info.v_row_bytes);
    }
    return bytes;
}

// calls copy(tensor, byte offset in the tensor, byte offset in the payload, bytes) for the K and the V rows of each layer
template <typename F>
static void for_each_piece(kvmem_memory * memory, uint32_t block_tokens, int32_t slot, F copy) {
    size_t offset = 0;
    for (auto & layer : memory->layers) {
        for (auto piece : { std::make_pair(layer.k, layer.info.k_row_bytes), std::make_pair(layer.v, layer.info.v_row_bytes) }) {
            const size_t bytes = block_tokens * piece.second;
            copy(piece.first, slot * bytes, offset, bytes);
            offset += bytes;
        }
    }
}

int kvmem_rows_get(kvmem_memory * memory, uint32_t block_tokens, const int32_t * slots, uint8_t * const * payloads, uint32_t n) {
    llama_synchronize(memory->ctx);
    for (uint32_t i = 0; i < n; ++i) {
        if (!in_range(memory, (int64_t) slots[i] * block_tokens, block_tokens)) {
            return fail(KVMEM_ERR_ARGUMENT, "a slot to read lies outside the cache");
        }
        for_each_piece(memory, block_tokens, slots[i], [&](ggml_tensor * tensor, size_t at, size_t offset, size_t bytes) {
            ggml_backend_tensor_get(tensor, payloads[i] + offset, at, bytes);
        });
    }
    return KVMEM_OK;
}

int kvmem_rows_set(kvmem_memory * memory, uint32_t block_tokens, const int32_t * slots, const uint8_t * const * payloads, uint32_t n) {
    llama_synchronize(memory->ctx);
    for (uint32_t i = 0; i < n; ++i) {
        if (!in_range(memory, (int64_t) slots[i] * block_tokens, block_tokens)) {
            return fail(KVMEM_ERR_ARGUMENT, "a slot to write lies outside the cache");
        }
        for_each_piece(memory, block_tokens, slots[i], [&](ggml_tensor * tensor, size_t at, size_t offset, size_t bytes) {
            ggml_backend_tensor_set(tensor, payloads[i] + offset, at, bytes);
        });
    }
    return KVMEM_OK;
}

int kvmem_rows_move(kvmem_memory * memory, uint32_t block_tokens, int32_t source, int32_t target) {
    llama_synchronize(memory->ctx);
    if (!in_range(memory, (int64_t) source * block_tokens, block_tokens) || !in_range(memory, (int64_t) target * block_tokens, block_tokens)) {
        return fail(KVMEM_ERR_ARGUMENT, "a slot to move lies outside the cache");
    }
    auto & scratch = memory->scratch;
    for_each_piece(memory, block_tokens, source, [&](ggml_tensor * tensor, size_t at, size_t, size_t bytes) {
        scratch.resize(std::max(scratch.size(), bytes));
        ggml_backend_tensor_get(tensor, scratch.data(), at, bytes);
        ggml_backend_tensor_set(tensor, scratch.data(), target * bytes, bytes);
    });
    return KVMEM_OK;
}
