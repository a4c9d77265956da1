// What the graph says about each layer's K, V and Q: metadata cannot tell which layers are rotated, or how.
#include "kvmem-memory.h"

#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

int kvmem_memory::layer_of(const ggml_tensor * tensor) const {
    if (tensor->op == GGML_OP_CPY) { // flash attention reads F32 K and V through a cast
        tensor = tensor->src[0];
    }
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    for (size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].k == root) {
            return (int) i;
        }
    }
    // an attention that runs on another device than its cache reads the scheduler's copy, which keeps the cache's name
    const char prefix[] = "cache_k_l";
    if (const char * name = strstr(root->name, prefix)) {
        const int il = atoi(name + strlen(prefix));
        for (size_t i = 0; i < layers.size(); ++i) {
            if (layers[i].info.il == il) {
                return (int) i;
            }
        }
    }
    return -1;
}

// a square input matrix on the way is the Walsh-Hadamard rotation of a quantised cache, see
// llama_kv_cache::build_input_k_rot
static bool is_hadamard(const ggml_tensor * matrix) {
    return (matrix->flags & GGML_TENSOR_FLAG_INPUT) && matrix->ne[0] == matrix->ne[1];
}

struct rotation {
    const ggml_tensor * rope     = nullptr; // null: not rotated
    int32_t             hadamard = 0;
};

// walks from what the cache or the attention reads back to its RoPE, over operations that only move or scale values
static rotation find_rotation(const ggml_tensor * tensor) {
    rotation res;
    for (const ggml_tensor * t = tensor; t; t = t->src[0]) {
        switch (t->op) {
            case GGML_OP_ROPE:
                res.rope = t;
                return res;
            case GGML_OP_MUL_MAT:
                if (!is_hadamard(t->src[0])) {
                    return res; // a projection: no RoPE on this path
                }
                res.hadamard = (int32_t) t->src[0]->ne[0];
                t            = t->src[1];
                while (t && (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
                                    t->op == GGML_OP_CONT)) {
                    t = t->src[0];
                }
                if (t && t->op == GGML_OP_ROPE) {
                    res.rope = t;
                }
                return res;
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_CONT:
            case GGML_OP_CPY:
            case GGML_OP_SCALE:
                break;
            default:
                return res;
        }
    }
    return res;
}

static void read_rope(const ggml_tensor * tensor, kvmem_rope & rope, std::vector<float> & freq_factors) {
    rope = {};
    if (!tensor) {
        return;
    }
    // layout of op_params: ggml_rope_impl
    const auto * ints = (const int32_t *) tensor->op_params;
    rope.n_dims       = ints[1];
    rope.mode         = ints[2];
    rope.n_ctx_orig   = ints[4];
    memcpy(&rope.freq_base, ints + 5, sizeof(float));
    memcpy(&rope.freq_scale, ints + 6, sizeof(float));
    memcpy(&rope.ext_factor, ints + 7, sizeof(float));
    memcpy(&rope.attn_factor, ints + 8, sizeof(float));
    memcpy(&rope.beta_fast, ints + 9, sizeof(float));
    memcpy(&rope.beta_slow, ints + 10, sizeof(float));
    memcpy(rope.sections, ints + 11, sizeof(rope.sections));
    rope.offset = ints[15];
    if (const ggml_tensor * factors = tensor->src[2]) {
        freq_factors.resize(factors->ne[0]);
        ggml_backend_tensor_get(factors, freq_factors.data(), 0, freq_factors.size() * sizeof(float));
        rope.n_freq_factors = (int32_t) freq_factors.size();
        rope.freq_factors   = freq_factors.data();
    }
}

static void copy_floats(const void * src, float * dst, int64_t n) {
    memcpy(dst, src, n * sizeof(float));
}

void kvmem_memory::bind(llama_context * lctx, uint32_t n_block_tokens) {
    ctx          = lctx;
    block_tokens = n_block_tokens;

    for (uint32_t il : attn->get_layer_ids()) {
        kvmem_layer_data layer;
        layer.k = attn->get_k_storage(il);
        layer.v = attn->get_v_storage(il);
        if (!layer.v) {
            throw std::runtime_error("MLA layers have no V rows of their own");
        }
        auto & info      = layer.info;
        info.il          = il;
        info.type_k      = layer.k->type;
        info.type_v      = layer.v->type;
        info.k_row_bytes = layer.k->nb[1];
        info.v_row_bytes = layer.v->nb[1];
        info.dequantize_k =
                layer.k->type == GGML_TYPE_F32 ? copy_floats : ggml_get_type_traits(layer.k->type)->to_float;
        layers.push_back(std::move(layer));
    }

    // the worst case, as the context reserved it: a smaller graph here would be followed by a larger one at run time
    const uint32_t n_tokens = std::min(llama_n_ctx(ctx), llama_n_ubatch(ctx));
    ggml_cgraph *  graph    = llama_graph_reserve(ctx, n_tokens, 1, n_tokens);
    if (!graph) {
        throw std::runtime_error("llama.cpp could not reserve the compute graph");
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_SET_ROWS) {
            if (const int at = layer_of(node); at >= 0) {
                auto *         layer = &layers[at];
                const rotation rot   = find_rotation(node->src[0]);
                layer->info.hadamard = rot.hadamard;
                read_rope(rot.rope, layer->info.rope_k, layer->freq_factors_k);
            }
        } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
            if (const int at = layer_of(node->src[1]); at >= 0) {
                auto * layer    = &layers[at];
                auto & info     = layer->info;
                info.head_dim_k = (int32_t) node->src[0]->ne[0];
                info.n_head     = (int32_t) node->src[0]->ne[2];
                info.n_head_kv  = (int32_t) node->src[1]->ne[2];
                info.head_dim_v = (int32_t) node->src[2]->ne[0];
                memcpy(&info.kq_scale, node->op_params, sizeof(float));
                read_rope(find_rotation(node->src[0]).rope, info.rope_q, layer->freq_factors_q);
            }
        }
    }

    for (auto & layer : layers) {
        if (layer.info.n_head == 0) {
            throw std::runtime_error(
                    "flash attention is off or not possible for this model, and without it V is stored transposed");
        }
        // the vectors may have moved while layers were collected
        layer.info.rope_k.freq_factors = layer.freq_factors_k.data();
        layer.info.rope_q.freq_factors = layer.freq_factors_q.data();
        cell_bytes += layer.info.k_row_bytes + layer.info.v_row_bytes;
    }
    transfer = kvmem_transfer_cuda(pieces());
    if (!transfer) {
        transfer = kvmem_transfer_generic(pieces());
    }
}

std::vector<kvmem_piece> kvmem_memory::pieces() const {
    std::vector<kvmem_piece> res;
    size_t                   offset = 0;
    for (const auto & layer : layers) {
        for (auto rows :
                { std::make_pair(layer.k, layer.info.k_row_bytes), std::make_pair(layer.v, layer.info.v_row_bytes) }) {
            res.push_back({ rows.first, block_tokens * rows.second, offset });
            offset += block_tokens * rows.second;
        }
    }
    return res;
}

uint32_t kvmem_n_cells(const kvmem_memory * memory) {
    return memory->attn->get_size();
}

uint32_t kvmem_n_layers(const kvmem_memory * memory) {
    return (uint32_t) memory->layers.size();
}

int kvmem_layer_get(const kvmem_memory * memory, uint32_t i, kvmem_layer * layer) {
    if (i >= memory->layers.size()) {
        kvmem_set_error("no such layer");
        return KVMEM_ERR_ARGUMENT;
    }
    *layer = memory->layers[i].info;
    return KVMEM_OK;
}
