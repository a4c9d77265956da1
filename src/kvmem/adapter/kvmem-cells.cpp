// Cells and rows: who sits where, and the bytes.
#include "kvmem-memory.h"

#include "llama-context.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

static int fail(int status, const std::string & text) {
    kvmem_set_error(text);
    return status;
}

static bool in_range(const kvmem_memory * memory, int64_t cell, uint32_t n) {
    return cell >= 0 && cell + n <= memory->attn->get_size();
}

void kvmem_memory::flush_clears() {
    for (const auto & range : clears) {
        cell_blocks->clear(range.first, range.second);
    }
    clears.clear();
}

bool kvmem_memory::publish(int32_t cell, const kvmem_cell_meta * meta, uint32_t n) {
    flush_clears();
    return cell_blocks->publish(cell, meta, n) && (!follower || follower->publish(cell, meta, n));
}

int kvmem_device_check(const kvmem_memory * memory) {
    if (memory->loss().empty()) {
        return KVMEM_OK;
    }
    return fail(
            KVMEM_ERR_DEVICE, "the device was lost (" + memory->loss() + "); close the engine and load the model anew");
}

int kvmem_decode(llama_context * ctx, llama_batch batch) {
    int status = -4;
    kvmem_guarded([&] { return status = llama_decode(ctx, batch); });
    return status;
}

int kvmem_cells_place(kvmem_memory * memory, const int32_t * cells, uint32_t n) {
    return kvmem_guarded([&]() -> int {
        if (const int status = kvmem_device_check(memory)) {
            return status;
        }
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
    });
}

int kvmem_cells_publish(kvmem_memory * memory, int32_t cell, const kvmem_cell_meta * meta, uint32_t n) {
    return kvmem_guarded([&]() -> int {
        if (!in_range(memory, cell, n)) {
            return fail(KVMEM_ERR_ARGUMENT, "cells to publish lie outside the cache");
        }
        return memory->publish(cell, meta, n) ? (int) KVMEM_OK : fail(KVMEM_ERR_STATE, "a cell to publish is in use");
    });
}

int kvmem_cells_clear(kvmem_memory * memory, int32_t cell, uint32_t n) {
    return kvmem_guarded([&]() -> int {
        if (!in_range(memory, cell, n)) {
            return fail(KVMEM_ERR_ARGUMENT, "cells to clear lie outside the cache");
        }
        for (auto * part = memory; part; part = part->follower) {
            part->clears.push_back({ cell, n });
        }
        return KVMEM_OK;
    });
}

int kvmem_cells_read(const kvmem_memory * memory, int32_t cell, int32_t * pos, uint32_t n) {
    return kvmem_guarded([&]() -> int {
        if (!in_range(memory, cell, n)) {
            return fail(KVMEM_ERR_ARGUMENT, "cells to read lie outside the cache");
        }
        const_cast<kvmem_memory *>(memory)->flush_clears();
        const auto & cells = memory->cells();
        for (uint32_t i = 0; i < n; ++i) {
            pos[i] = cells.is_empty(cell + i) ? -1 : cells.pos_get(cell + i);
        }
        return KVMEM_OK;
    });
}

uint32_t kvmem_cells_used(const kvmem_memory * memory) {
    const_cast<kvmem_memory *>(memory)->flush_clears();
    return memory->cells().get_used();
}

int kvmem_follower_agrees(const kvmem_memory * memory) {
    const kvmem_memory * follower = memory->follower;
    if (!follower) {
        return 1;
    }
    const_cast<kvmem_memory *>(memory)->flush_clears();
    const_cast<kvmem_memory *>(follower)->flush_clears();
    for (uint32_t i = 0; i < memory->attn->get_size(); ++i) {
        const bool is_empty = memory->cells().is_empty(i);
        if (follower->cells().is_empty(i) != is_empty) {
            return 0;
        }
        if (!is_empty && follower->cells().pos_get(i) != memory->cells().pos_get(i)) {
            return 0;
        }
    }
    return 1;
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
        const auto pieces = memory->pieces();
        auto way = wanted == "generic" ? kvmem_transfer_generic(pieces)
                                       : kvmem_transfer_make(pieces, memory->attn->get_size() / memory->block_tokens,
                                                 *memory->slabs);
        if (wanted != way->name()) {
            return fail(KVMEM_ERR_UNSUPPORTED, "this way of copying is not built, or not possible for this cache");
        }
        memory->transfer = std::move(way);
    } catch (const std::exception & e) {
        return fail(KVMEM_ERR_DEVICE, e.what());
    }
    return KVMEM_OK;
}

int kvmem_transfer_ceiling(kvmem_memory * memory, double * in, double * out) {
    try {
        llama_synchronize(memory->ctx);
        const kvmem_ceiling found = memory->transfer->measure_ceiling();
        *in                       = found.in;
        *out                      = found.out;
    } catch (const std::exception & e) {
        return fail(KVMEM_ERR_DEVICE, e.what());
    }
    return KVMEM_OK;
}

void kvmem_transfer_fail(kvmem_memory * memory, uint32_t n, int loses_device) {
    memory->fail_at    = n;
    memory->fail_loses = loses_device != 0;
}

// checks the slots, waits for the graphs in flight and runs the copy of n blocks
template <typename F>
static int transfer(kvmem_memory * memory, const int32_t * slots, uint32_t n_slots, uint32_t n, F copy) {
    const int64_t block_tokens = memory->block_tokens;
    if (const int status = kvmem_device_check(memory)) {
        return status;
    }
    if (!memory->transfer || memory->follower_gone) {
        return fail(KVMEM_ERR_STATE, "rows are copied by the leader, while both contexts are open");
    }
    for (uint32_t i = 0; i < n_slots; ++i) {
        if (!in_range(memory, slots[i] * block_tokens, block_tokens)) {
            return fail(KVMEM_ERR_ARGUMENT, "a slot lies outside the cache");
        }
    }
    std::string error;
    try {
        for (auto * part = memory; part; part = part->follower) {
            llama_synchronize(part->ctx);
        }
        if (memory->fail_at == 0 || memory->fail_at > n) {
            memory->fail_at -= std::min(memory->fail_at, n);
            copy(*memory->transfer, n);
            return KVMEM_OK;
        }
        const uint32_t n_done = memory->fail_at - 1;
        memory->fail_at       = 0;
        copy(*memory->transfer, n_done);
        throw kvmem_transfer_error("a test lets this copy fail", memory->fail_loses);
    } catch (const kvmem_transfer_error & e) {
        error = e.what();
        if (e.lost) {
            memory->lost = error;
        }
    } catch (const std::exception & e) {
        error = e.what();
    }
    try {
        memory->transfer->wait(); // nothing may be on its way when the caller repairs
    } catch (const kvmem_transfer_error & e) {
        if (e.lost) {
            memory->lost = e.what();
        }
    }
    return memory->lost.empty() ? fail(KVMEM_ERR_DEVICE, error) : kvmem_device_check(memory);
}

int kvmem_rows_get(kvmem_memory * memory, const int32_t * slots, uint8_t * const * payloads, uint32_t n) {
    return transfer(
            memory, slots, n, n, [&](kvmem_transfer & way, uint32_t n_blocks) { way.get(slots, payloads, n_blocks); });
}

int kvmem_rows_set(kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads, uint32_t n) {
    return transfer(memory, slots, n, n, [&](kvmem_transfer & way, uint32_t n_blocks) {
        way.set(slots, payloads, n_blocks);
        way.wait();
    });
}

int kvmem_blocks_in(kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads,
        const kvmem_cell_meta * const * meta, uint32_t n) {
    const uint32_t block_tokens = memory->block_tokens;
    return transfer(memory, slots, n, n, [&](kvmem_transfer & way, uint32_t n_blocks) {
        way.set(slots, payloads, n_blocks);
        // while the copies run; nobody decodes before the last of them is there
        for (uint32_t i = 0; i < n_blocks; ++i) {
            if (!memory->publish(slots[i] * block_tokens, meta[i], block_tokens)) {
                throw std::runtime_error("a cell to publish is in use");
            }
        }
        way.wait();
    });
}

int kvmem_rows_move(kvmem_memory * memory, int32_t source, int32_t target) {
    const int32_t slots[] = { source, target };
    return transfer(memory, slots, 2, 1, [&](kvmem_transfer & way, uint32_t n_blocks) {
        if (n_blocks) {
            way.move(source, target);
        }
    });
}

kvmem_host * kvmem_host_of(kvmem_memory * memory) {
    return new (std::nothrow) kvmem_host{ memory->slabs };
}

void kvmem_host_release(kvmem_host * host) {
    delete host;
}

uint8_t * kvmem_host_alloc(kvmem_host * host, size_t bytes) {
    uint8_t * data = nullptr;
    kvmem_guarded([&]() -> int {
        data = host->slabs->alloc(bytes);
        return KVMEM_OK;
    });
    return data;
}

void kvmem_host_free(kvmem_host * host, uint8_t * data) {
    host->slabs->free(data);
}

void kvmem_host_limit_pinned(kvmem_host * host, size_t bytes) {
    host->slabs->limit_pinned(bytes);
}

void kvmem_host_bytes(const kvmem_host * host, size_t * pinned, size_t * plain) {
    host->slabs->count(pinned, plain);
}
