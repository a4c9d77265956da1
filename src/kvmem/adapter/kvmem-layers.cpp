// What the graph says about each layer's K, V and Q: metadata cannot tell which layers are rotated, or how.
#include "kvmem-memory.h"

#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

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

// What a node reads. Where that lies on another device, the scheduler has put a copy in its place, without a source but
// named "<device>#<name>#<n>": then the nearest tensor of that name before `at`, which becomes the place of what was
// found.
static const ggml_tensor * find_original(ggml_cgraph * graph, const ggml_tensor * tensor, int & at) {
    const char * begin = strchr(tensor->name, '#');
    const char * end   = strrchr(tensor->name, '#');
    if (tensor->op != GGML_OP_NONE || begin == end) {
        return tensor;
    }
    const std::string name(begin + 1, end);
    for (int i = at - 1; i >= 0; --i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (name == node->name && ggml_are_same_shape(node, tensor)) {
            at = i;
            return node;
        }
    }
    const ggml_tensor * leaf = ggml_graph_get_tensor(graph, name.c_str());
    return leaf ? leaf : tensor;
}

// a square input matrix on the way is the Walsh-Hadamard rotation of a quantised cache, see
// llama_kv_cache::build_input_k_rot
static bool is_hadamard(const ggml_tensor * matrix) {
    return (matrix->flags & GGML_TENSOR_FLAG_INPUT) && matrix->ne[0] == matrix->ne[1];
}

struct rotation {
    const ggml_tensor * rope     = nullptr; // null: not rotated
    const ggml_tensor * factors  = nullptr; // of its frequencies
    const ggml_tensor * weights  = nullptr; // of a norm behind it
    bool                normed   = false;
    int32_t             offset   = 0; // where in a head the rotated part begins
    int32_t             hadamard = 0;
};

// one factor for all of a head, such as an attention temperature that grows with the position: it commutes
static bool is_head_scale(const ggml_tensor * tensor) {
    return tensor->op == GGML_OP_NONE && tensor->ne[0] == 1;
}

// the weights of a norm over each head
static bool is_head_weight(const ggml_tensor * tensor, const ggml_tensor * scaled) {
    return tensor->op == GGML_OP_NONE && tensor->type == GGML_TYPE_F32 && tensor->ne[0] == scaled->ne[0] &&
           ggml_nelements(tensor) == tensor->ne[0];
}

// whether a RoPE lies between what node `at` reads and the projections that it was made of
static bool has_rope(ggml_cgraph * graph, const ggml_tensor * tensor, int at) {
    const ggml_tensor * t = find_original(graph, tensor, at);
    if (t->op == GGML_OP_NONE || t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID || t->op == GGML_OP_GET_ROWS) {
        return false;
    }
    return t->op == GGML_OP_ROPE || std::any_of(t->src, t->src + GGML_MAX_SRC,
                                            [=](const ggml_tensor * src) { return src && has_rope(graph, src, at); });
}

// walks from what node `at` reads, the cache or the attention, back to its RoPE, over operations that a rotation
// commutes with; throws if it is behind another
static rotation find_rotation(ggml_cgraph * graph, const ggml_tensor * tensor, int at) {
    rotation res;
    for (const ggml_tensor * t = tensor;;) {
        t                    = find_original(graph, t, at);
        const auto src_of_op = [&](int i) {
            int from = at;
            return find_original(graph, t->src[i], from);
        };
        switch (t->op) {
            case GGML_OP_ROPE:
                res.rope    = t;
                res.factors = t->src[2] ? src_of_op(2) : nullptr;
                return res;
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_CONT:
            case GGML_OP_CPY:
            case GGML_OP_REPEAT:
            case GGML_OP_SCALE:
                t = t->src[0];
                continue;
            case GGML_OP_MUL:
                if (is_head_scale(src_of_op(1))) {
                    t = t->src[0];
                    continue;
                }
                if (!res.normed && src_of_op(0)->op == GGML_OP_RMS_NORM && is_head_weight(src_of_op(1), t)) {
                    res.weights = src_of_op(1);
                    t           = t->src[0];
                    continue;
                }
                break;
            case GGML_OP_RMS_NORM: // without its weights it commutes, and takes the rotation's magnitude out
                if (has_rope(graph, t->src[0], at)) {
                    res.normed = true;
                    t          = t->src[0];
                    continue;
                }
                break;
            case GGML_OP_MUL_MAT:
                if (!res.hadamard && is_hadamard(src_of_op(0))) {
                    res.hadamard = (int32_t) t->src[0]->ne[0];
                    t            = t->src[1];
                    continue;
                }
                break;
            case GGML_OP_CONCAT: { // a head of a part that is rotated and one that is not
                const bool second = has_rope(graph, t->src[1], at);
                if (((const int32_t *) t->op_params)[0] == 0 && has_rope(graph, t->src[0], at) != second) {
                    res.offset += second ? (int32_t) t->src[0]->ne[0] : 0;
                    t = t->src[second];
                    continue;
                }
                break;
            }
            default:
                break;
        }
        if (has_rope(graph, t, at)) {
            throw std::runtime_error(
                    std::string("its keys or queries are changed after their rotation, by ") + ggml_op_desc(t));
        }
        return res; // a projection: no RoPE on this path
    }
}

static void read_floats(const ggml_tensor * tensor, std::vector<float> & values, int32_t & n, const float *& data) {
    values.resize(ggml_nelements(tensor));
    ggml_backend_tensor_get(tensor, values.data(), 0, values.size() * sizeof(float));
    n    = (int32_t) values.size();
    data = values.data();
}

static void read_rope(const rotation & found, kvmem_rope & rope, kvmem_rope_data & data) {
    const ggml_tensor * tensor = found.rope;
    rope                       = {};
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
    rope.offset = ints[15] + found.offset;
    if (found.normed) { // cancels what YaRN multiplies beside attn_factor, see rope_yarn
        rope.attn_factor = rope.ext_factor ? 1.0f / (1.0f + 0.1f * logf(1.0f / rope.freq_scale)) : 1.0f;
    }
    if (found.factors) {
        read_floats(found.factors, data.freq_factors, rope.n_freq_factors, rope.freq_factors);
    }
    if (found.weights) {
        read_floats(found.weights, data.weights, rope.n_weights, rope.weights);
    }
}

static void copy_floats(const void * src, float * dst, int64_t n) {
    memcpy(dst, src, n * sizeof(float));
}

void kvmem_memory::bind(llama_context * lctx, uint32_t n_block_tokens, uint32_t n_outputs, bool copies) {
    ctx          = lctx;
    block_tokens = n_block_tokens;

    for (uint32_t il : attn->get_layer_ids()) {
        kvmem_layer_data layer;
        layer.k = attn->get_k_storage(il);
        if (ggml_nelements(layer.k) == 0) {
            continue; // a layer without attention
        }
        layer.v = attn->get_v_storage(il);
        if (!layer.v) {
            throw std::runtime_error("MLA layers keep a latent K alone, and no V rows");
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

    const uint32_t n_tokens = std::min(llama_n_ctx(ctx), llama_n_ubatch(ctx));
    ggml_cgraph *  graph    = llama_graph_reserve(ctx, n_tokens, 1, std::min(n_tokens, n_outputs));
    if (!graph) {
        throw std::bad_alloc(); // of its buffers: nothing else fails there
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_SET_ROWS) {
            if (const int at = layer_of(node); at >= 0) {
                auto *         layer = &layers[at];
                const rotation rot   = find_rotation(graph, node->src[0], i);
                layer->info.hadamard = rot.hadamard;
                read_rope(rot, layer->info.rope_k, layer->rope_k);
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
                read_rope(find_rotation(graph, node->src[0], i), info.rope_q, layer->rope_q);
            }
        }
    }

    for (auto & layer : layers) {
        if (layer.info.n_head == 0) {
            throw std::runtime_error(
                    "flash attention is off or not possible for this model, and without it V is stored transposed");
        }
        for (const kvmem_rope & rope : { layer.info.rope_k, layer.info.rope_q }) {
            if (rope.n_weights && rope.n_weights != layer.info.head_dim_k) {
                throw std::runtime_error("its keys or queries are normalised over more than one head");
            }
        }
        cell_bytes += layer.info.k_row_bytes + layer.info.v_row_bytes;
    }
    if (layers.empty()) {
        throw std::runtime_error("none of its layers keeps K and V");
    }
    cell_blocks = std::make_unique<kvmem_cell_blocks>(attn->get_cells_mut(0));
    if (!copies) {
        return;
    }
    const auto all = pieces();
    const bool pin = std::any_of(
            all.begin(), all.end(), [](const kvmem_piece & piece) { return kvmem_cuda_device(piece) >= 0; });
    slabs    = std::make_shared<kvmem_slabs>(pin);
    transfer = kvmem_transfer_make(all, attn->get_size() / block_tokens, *slabs);
}

void kvmem_memory::lead(kvmem_memory * memory) {
    follower       = memory;
    memory->leader = this;
    cell_bytes += memory->cell_bytes;
    transfer.reset(); // its buffers make room for the new ones
    transfer = kvmem_transfer_make(pieces(), attn->get_size() / block_tokens, *slabs);
}

std::vector<kvmem_piece> kvmem_memory::pieces() const {
    std::vector<kvmem_piece> res;
    size_t                   offset = 0;
    for (const kvmem_memory * part = this; part; part = part->follower) {
        for (const auto & layer : part->layers) {
            for (auto rows : { std::make_pair(layer.k, layer.info.k_row_bytes),
                         std::make_pair(layer.v, layer.info.v_row_bytes) }) {
                res.push_back({ rows.first, block_tokens * rows.second, offset });
                offset += block_tokens * rows.second;
            }
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
