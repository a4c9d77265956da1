// The query tap: reads Q where flash attention reads it, through the eval callback, while a query is decoded.
#include "kvmem-memory.h"

#include "llama-ext.h"

#include "ggml-backend.h"

#include <algorithm>

static int find_tapped_layer(const kvmem_memory * memory, const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) {
        return -1;
    }
    const int layer = memory->layer_of(node->src[1]);
    return layer >= 0 && memory->tap.slot_of_layer[layer] >= 0 ? layer : -1;
}

// Q is not overwritten by the attention that reads it, so it can be read once that node is done
static bool tap_callback(ggml_tensor * node, bool ask, void * user_data) {
    auto *    memory = (kvmem_memory *) user_data;
    const int layer  = find_tapped_layer(memory, node);
    if (layer < 0) {
        return !ask;
    }
    auto & tap = memory->tap;

    // src[0] is f32 [head_dim, n_tokens, n_head], a permuted view of [head_dim, n_head, n_tokens]
    const ggml_tensor * q        = node->src[0];
    const int64_t       head_dim = q->ne[0];
    const int64_t       n_tokens = q->ne[1];
    const int64_t       n_head   = q->ne[2];
    const int32_t       at       = tap.slot_of_layer[layer];

    auto & n_seen = tap.n_seen[at];
    auto & n_read = tap.n_read[at];
    if (ask) {
        // each node is asked about once; a yes ends the graph there, so it has to be worth that
        if (n_read < tap.rows.size() && tap.rows[n_read] < n_seen + n_tokens) {
            return true;
        }
        n_seen += n_tokens;
        return false;
    }
    while (n_read < tap.rows.size() && tap.rows[n_read] < n_seen + n_tokens) {
        float *      out = tap.out[at] + n_read * n_head * head_dim;
        const size_t row = (size_t) (tap.rows[n_read] - n_seen) * q->nb[1];
        if (q->type != GGML_TYPE_F32) {
            tap.failed = true;
        } else if (q->nb[2] == head_dim * sizeof(float)) {
            ggml_backend_tensor_get(q, out, row, n_head * head_dim * sizeof(float));
        } else {
            for (int64_t h = 0; h < n_head; ++h) {
                ggml_backend_tensor_get(q, out + h * head_dim, row + h * q->nb[2], head_dim * sizeof(float));
            }
        }
        n_read++;
    }
    n_seen += n_tokens;
    return true;
}

int kvmem_tap_begin(kvmem_memory * memory, const int32_t * layers, uint32_t n_layers, const int32_t * rows,
        uint32_t n_rows, float * const * out) {
    return kvmem_guarded([&]() -> int {
        auto & tap = memory->tap;
        if (tap.active) {
            kvmem_set_error("the query tap is open already");
            return KVMEM_ERR_STATE;
        }
        tap.slot_of_layer.assign(memory->layers.size(), -1);
        for (uint32_t i = 0; i < n_layers; ++i) {
            if (layers[i] < 0 || (size_t) layers[i] >= memory->layers.size()) {
                kvmem_set_error("no such layer to tap");
                return KVMEM_ERR_ARGUMENT;
            }
            tap.slot_of_layer[layers[i]] = (int32_t) i;
        }
        tap.rows.assign(rows, rows + n_rows);
        if (!std::is_sorted(tap.rows.begin(), tap.rows.end())) {
            kvmem_set_error("tapped rows must ascend");
            return KVMEM_ERR_ARGUMENT;
        }
        tap.n_seen.assign(n_layers, 0);
        tap.n_read.assign(n_layers, 0);
        tap.out.assign(out, out + n_layers);
        tap.failed = false;
        tap.active = true;
        llama_set_eval_callback(memory->ctx, tap_callback, memory);
        return KVMEM_OK;
    });
}

int kvmem_tap_end(kvmem_memory * memory) {
    auto & tap = memory->tap;
    if (!tap.active) {
        kvmem_set_error("the query tap is not open");
        return KVMEM_ERR_STATE;
    }
    llama_set_eval_callback(memory->ctx, nullptr, nullptr);
    tap.active = false;
    tap.out.clear();
    for (size_t n : tap.n_read) {
        if (tap.failed || n != tap.rows.size()) {
            kvmem_set_error("the query was not decoded to its end, or its Q is not F32");
            return KVMEM_ERR_STATE;
        }
    }
    return KVMEM_OK;
}
