// Cells and rows: who sits where, and the bytes.
#include "kvmem-memory.h"

#include "llama-context.h"

#include <stdexcept>
#include <thread>

static int fail(int status, const char * text) {
    kvmem_set_error(text);
    return status;
}

static bool in_range(const kvmem_memory * memory, int64_t cell, uint32_t n) {
    return cell >= 0 && cell + n <= memory->attn->get_size();
}

void kvmem_memory::flush_clears() {
    auto & table = cells();
    for (const auto & range : clears) {
        for (uint32_t i = 0; i < range.second; ++i) {
            if (!table.is_empty(range.first + i)) {
                table.seq_rm(range.first + i, 0); // rm() would look through all 256 sequences
            }
        }
    }
    clears.clear();
}

int kvmem_cells_place(kvmem_memory * memory, const int32_t * cells, uint32_t n) {
    memory->flush_clears();
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

// the caller has checked the range; false if a cell is in use
static bool publish(kvmem_memory * memory, int32_t cell, const kvmem_cell_meta * meta, uint32_t n) {
    auto & cells = memory->cells();
    for (uint32_t i = 0; i < n; ++i) {
        if (!cells.is_empty(cell + i)) {
            return false;
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
    return true;
}

int kvmem_cells_publish(kvmem_memory * memory, int32_t cell, const kvmem_cell_meta * meta, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to publish lie outside the cache");
    }
    memory->flush_clears();
    return publish(memory, cell, meta, n) ? (int) KVMEM_OK : fail(KVMEM_ERR_STATE, "a cell to publish is in use");
}

int kvmem_cells_clear(kvmem_memory * memory, int32_t cell, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to clear lie outside the cache");
    }
    memory->clears.push_back({ cell, n });
    return KVMEM_OK;
}

int kvmem_cells_read(const kvmem_memory * memory, int32_t cell, int32_t * pos, uint32_t n) {
    if (!in_range(memory, cell, n)) {
        return fail(KVMEM_ERR_ARGUMENT, "cells to read lie outside the cache");
    }
    const_cast<kvmem_memory *>(memory)->flush_clears();
    const auto & cells = memory->cells();
    for (uint32_t i = 0; i < n; ++i) {
        pos[i] = cells.is_empty(cell + i) ? -1 : cells.pos_get(cell + i);
    }
    return KVMEM_OK;
}

uint32_t kvmem_cells_used(const kvmem_memory * memory) {
    const_cast<kvmem_memory *>(memory)->flush_clears();
    return memory->cells().get_used();
}

size_t kvmem_payload_bytes(const kvmem_memory * memory) {
    return memory->block_tokens * memory->cell_bytes;
}

const char * kvmem_transfer_name(const kvmem_memory * memory) {
    return memory->transfer->name();
}

int kvmem_transfer_use(kvmem_memory * memory, const char * name) {
    const std::string wanted = name;
    try {
        auto way = wanted == "generic" ? kvmem_transfer_generic(memory->pieces())
                   : wanted == "cuda"  ? kvmem_transfer_cuda(memory->pieces())
                                       : nullptr;
        if (!way) {
            return fail(KVMEM_ERR_UNSUPPORTED, "this way of copying is not built, or not possible for this cache");
        }
        memory->transfer = std::move(way);
    } catch (const std::exception & e) {
        return fail(KVMEM_ERR_DEVICE, e.what());
    }
    return KVMEM_OK;
}

// checks the slots, waits for the graphs in flight and runs the copy
template <typename F>
static int transfer(kvmem_memory * memory, const int32_t * slots, uint32_t n, F copy) {
    const int64_t block_tokens = memory->block_tokens;
    for (uint32_t i = 0; i < n; ++i) {
        if (!in_range(memory, slots[i] * block_tokens, block_tokens)) {
            return fail(KVMEM_ERR_ARGUMENT, "a slot lies outside the cache");
        }
    }
    try {
        llama_synchronize(memory->ctx);
        copy(*memory->transfer);
    } catch (const std::exception & e) {
        return fail(KVMEM_ERR_DEVICE, e.what());
    }
    return KVMEM_OK;
}

int kvmem_rows_get(kvmem_memory * memory, const int32_t * slots, uint8_t * const * payloads, uint32_t n) {
    return transfer(memory, slots, n, [&](kvmem_transfer & way) { way.get(slots, payloads, n); });
}

int kvmem_rows_set(kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads, uint32_t n) {
    return transfer(memory, slots, n, [&](kvmem_transfer & way) { way.set(slots, payloads, n); });
}

int kvmem_blocks_in(kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads,
        const kvmem_cell_meta * const * meta, uint32_t n) {
    constexpr uint32_t n_worth_a_thread = 8;
    const uint32_t     block_tokens     = memory->block_tokens;
    return transfer(memory, slots, n, [&](kvmem_transfer & way) {
        bool published = true;
        auto cells     = [&] {
            memory->flush_clears();
            for (uint32_t i = 0; i < n && published; ++i) {
                published = publish(memory, slots[i] * block_tokens, meta[i], block_tokens);
            }
        };
        // llama.cpp keeps cells in ordered sets: for a whole window that takes as long as the copies
        std::thread beside;
        if (n >= n_worth_a_thread) {
            beside = std::thread(cells);
        }
        try {
            way.set(slots, payloads, n);
        } catch (...) {
            if (beside.joinable()) {
                beside.join();
            }
            throw;
        }
        if (beside.joinable()) {
            beside.join();
        } else {
            cells();
        }
        if (!published) {
            throw std::runtime_error("a cell to publish is in use");
        }
    });
}

int kvmem_rows_move(kvmem_memory * memory, int32_t source, int32_t target) {
    const int32_t slots[] = { source, target };
    return transfer(memory, slots, 2, [&](kvmem_transfer & way) { way.move(source, target); });
}

uint8_t * kvmem_host_alloc(kvmem_memory * memory, size_t bytes) {
    return memory->transfer->host_alloc(bytes);
}

void kvmem_host_free(kvmem_memory * memory, uint8_t * data) {
    memory->transfer->host_free(data);
}
