// The MTP head: a second context over the same model, whose one attention layer keeps its K and V in the leader's
// cells.
#include "kvmem-memory.h"

#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

static int fail(int status, const std::string & text) {
    kvmem_set_error(text);
    return status;
}

llama_context_params kvmem_draft_params(llama_context_params params) {
    params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    params.n_rs_seq      = 0;
    params.n_outputs_max = 1;
    return params;
}

void kvmem_keep_hidden_rows(llama_context * ctx) {
    llama_set_embeddings_nextn(ctx, true, /*masked =*/false);
}

void kvmem_draft_link(llama_context * leader, llama_context * head) {
    kvmem_keep_hidden_rows(leader);
    llama_set_embeddings_nextn(head, true, /*masked =*/true);
}

int kvmem_draft_init(kvmem_memory * leader, llama_model * model, const llama_context_params * params,
        llama_context ** ctx, kvmem_memory ** follower) {
    *ctx      = nullptr;
    *follower = nullptr;
    if (leader->follower || leader->follower_gone || leader->leader) {
        return fail(KVMEM_ERR_STATE, "a memory has one follower");
    }
    if (!leader->recr || llama_model_n_layer_nextn(model) != 1) {
        return fail(KVMEM_ERR_UNSUPPORTED, "drafts need a hybrid model with one MTP block");
    }
    const llama_context_params own = kvmem_draft_params(*params);
    if (const int status = kvmem_context_create(
                model, own, leader->attn->get_size(), leader->block_tokens, own.n_outputs_max, 0, ctx, follower)) {
        return status;
    }
    int status = KVMEM_ERR_NO_MEMORY;
    try {
        (*follower)->batch = llama_batch_ext_init(*ctx);
        kvmem_draft_link(leader->ctx, *ctx);
        // the link changes both graphs; at the first decode, which would do it, a failure would end the process
        leader->ctx->sched_reserve();
        (*ctx)->sched_reserve();
        status = KVMEM_ERR_DEVICE;
        leader->lead(*follower);
    } catch (const std::exception & e) {
        llama_free(*ctx);
        *ctx      = nullptr;
        *follower = nullptr;
        return fail(status, e.what());
    }
    return KVMEM_OK;
}

kvmem_memory * kvmem_follower(kvmem_memory * leader) {
    return leader->follower;
}

const float * kvmem_hidden_rows(const kvmem_memory * leader) {
    return llama_get_embeddings_nextn(leader->ctx);
}

int kvmem_draft_decode(kvmem_memory * follower, const int32_t * cells, const int32_t * tokens, const int32_t * pos,
        const float * first_row, const float * rows, uint32_t n, int wants_result) {
    if (const int status = kvmem_cells_place(follower, cells, n)) {
        return status;
    }
    const size_t n_embd = llama_model_n_embd_out(llama_get_model(follower->ctx));
    auto *       batch  = follower->batch;
    llama_batch_ext_clear(batch);
    for (uint32_t i = 0; i < n; ++i) {
        const int32_t at = llama_batch_ext_add_token(batch, 0, tokens[i]);
        if (at < 0 || !llama_batch_ext_set_pos(batch, at, &pos[i]) ||
                !llama_batch_ext_set_embd_state(
                        batch, at, { i == 0 ? first_row : rows + (i - 1) * n_embd, 1, n_embd })) {
            return fail(KVMEM_ERR_ARGUMENT, "a token that the MTP head cannot take");
        }
    }
    llama_batch_ext_set_output_logits(batch, (int32_t) n - 1, wants_result != 0);
    std::string reason;
    try {
        if (llama_process(follower->ctx, LLAMA_PROCESS_TYPE_DECODE, batch) != 0) {
            reason = "llama.cpp could not run the MTP head";
        }
    } catch (const std::exception & e) {
        reason = e.what();
    }
    if (!reason.empty()) {
        kvmem_draft_forget(follower, cells, n);
        return fail(KVMEM_ERR_DEVICE, reason);
    }
    return KVMEM_OK;
}

// from `cell` on
static void clear_rows(ggml_tensor * tensor, size_t row_bytes, uint32_t cell, uint32_t n) {
    ggml_backend_tensor_memset(tensor, 0, cell * row_bytes, n * row_bytes);
}

int kvmem_draft_skip(
        kvmem_memory * follower, const int32_t * cells, const int32_t * tokens, const int32_t * pos, uint32_t n) {
    return kvmem_guarded([&]() -> int {
        if (const int status = kvmem_device_check(follower)) {
            return status;
        }
        std::vector<kvmem_cell_meta> meta(n);
        for (uint32_t i = 0; i < n; ++i) {
            meta[i] = { { pos[i], pos[i], pos[i], 0 }, tokens[i], pos[i], pos[i] };
        }
        llama_synchronize(follower->ctx);
        for (uint32_t i = 0, end; i < n; i = end) {
            for (end = i + 1; end < n && cells[end] == cells[end - 1] + 1; ++end) {
            }
            if (const int status = kvmem_cells_publish(follower, cells[i], &meta[i], end - i)) {
                kvmem_draft_forget(follower, cells, i);
                return status;
            }
            for (const auto & layer : follower->layers) {
                clear_rows(layer.k, layer.info.k_row_bytes, cells[i], end - i);
                clear_rows(layer.v, layer.info.v_row_bytes, cells[i], end - i);
            }
        }
        return KVMEM_OK;
    });
}

int kvmem_draft_result(kvmem_memory * follower, int32_t * token, float * row, float * p) {
    const float * logits = llama_get_logits_ith(follower->ctx, -1);
    const float * hidden = llama_get_embeddings_nextn_ith(follower->ctx, -1);
    if (!logits || !hidden) {
        return fail(KVMEM_ERR_STATE, "the MTP head was not asked for a result");
    }
    const auto * model   = llama_get_model(follower->ctx);
    const int    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    *token               = (int32_t) (std::max_element(logits, logits + n_vocab) - logits);
    memcpy(row, hidden, llama_model_n_embd_out(model) * sizeof(float));
    if (!p) {
        return KVMEM_OK;
    }
    // as llama.cpp's own drafts are measured: so --spec-draft-p-min means the same here
    std::array<float, 10> best;
    const auto end = std::partial_sort_copy(logits, logits + n_vocab, best.begin(), best.end(), std::greater<float>());
    float      sum = 0;
    for (auto it = best.begin(); it != end; ++it) {
        sum += std::exp(*it - best[0]);
    }
    *p = 1 / sum;
    return KVMEM_OK;
}

int kvmem_draft_forget(kvmem_memory * follower, const int32_t * cells, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        if (const int status = kvmem_cells_clear(follower, cells[i], 1)) {
            return status;
        }
    }
    return KVMEM_OK;
}
