// What a context takes, by device: of one that is there, and of one that could be.
#include "kvmem-memory.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

// llama.cpp then reserves graphs and the attention cache without memory for them; a recurrent state is real
struct dry_run {
    explicit dry_run(llama_model * model) : model(model), before(model->hparams.no_alloc) {
        model->hparams.no_alloc = true;
    }

    ~dry_run() { model->hparams.no_alloc = before; }

    llama_model * model;
    const bool    before;
};

struct context_free {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};

using context_ptr = std::unique_ptr<llama_context, context_free>;

bool is_gpu(ggml_backend_dev_t device) {
    const auto kind = ggml_backend_dev_type(device);
    return kind == GGML_BACKEND_DEVICE_TYPE_GPU || kind == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

struct share_list {
    kvmem_share * shares;
    uint32_t      room;
    uint32_t      n = 0;

    kvmem_share & of(ggml_backend_buffer_type_t type) {
        auto * device = ggml_backend_buft_get_device(type);
        if (device && (ggml_backend_buft_is_host(type) || !is_gpu(device))) {
            device = nullptr; // what a GPU has pinned or mapped is the host's all the same
        }
        const std::string name  = device ? ggml_backend_dev_name(device) : "";
        const auto        found = std::find_if(shares, shares + n, [&](auto & share) { return name == share.device; });
        if (found != shares + n) {
            return *found;
        }
        if (n == room) {
            throw std::length_error("more devices than there is room for");
        }
        kvmem_share & share = shares[n++];
        share               = {};
        share.device        = device ? ggml_backend_dev_name(device) : "";
        if (device) {
            ggml_backend_dev_memory(device, &share.free, &share.total);
        }
        return share;
    }

    void add_weights(const llama_model * model) {
        for (const auto & entry : model->memory_breakdown()) {
            of(entry.first).weights += entry.second;
        }
    }

    void add_memory(const kvmem_memory * memory) {
        for (const auto & entry : memory->attn->memory_breakdown()) {
            of(entry.first).cells += entry.second;
        }
        if (memory->recr) {
            for (const auto & entry : memory->recr->memory_breakdown()) {
                of(entry.first).states += entry.second;
            }
        }
    }

    // sizes: of each back end of the scheduler; null for those that it holds
    void add_compute(llama_context * ctx, const size_t * sizes) {
        ggml_backend_sched_t sched = ctx->get_sched();
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
            of(ggml_backend_sched_get_buffer_type(sched, backend)).compute +=
                    sizes ? sizes[i] : ggml_backend_sched_get_buffer_size(sched, backend);
        }
    }

    // the graphs of a context that has no memory for them, as llama.cpp and kvmem_memory::bind reserve them: of a
    // batch, and of one token, which more of the CPU may work on
    void add_reserved(llama_context * ctx, uint32_t n_outputs) {
        const uint32_t      n_batch = std::min(llama_n_ctx(ctx), llama_n_ubatch(ctx));
        const auto          full    = ctx->get_memory()->init_full();
        std::vector<size_t> sizes(ggml_backend_sched_get_n_backends(ctx->get_sched()));
        for (const uint32_t n_tokens : { n_batch, 1u }) {
            std::vector<size_t> needed(sizes.size());
            ctx->graph_reserve(n_tokens, 1, std::min(n_tokens, n_outputs), full.get(), true, needed.data());
            std::transform(needed.begin(), needed.end(), sizes.begin(), sizes.begin(),
                    [](size_t x, size_t y) { return std::max(x, y); });
        }
        add_compute(ctx, sizes.data());
    }
};

} // namespace

int kvmem_shares(const kvmem_memory * memory, kvmem_share * shares, uint32_t * n_shares) {
    share_list list = { shares, *n_shares };
    try {
        list.add_weights(llama_get_model(memory->ctx));
        for (const kvmem_memory * part = memory; part; part = part->follower) {
            list.add_memory(part);
            list.add_compute(part->ctx, nullptr);
        }
    } catch (const std::exception & e) {
        kvmem_set_error(e.what());
        return KVMEM_ERR_ARGUMENT;
    }
    *n_shares = list.n;
    return KVMEM_OK;
}

int kvmem_shares_of(llama_model * model, const llama_context_params * params, uint32_t n_cells, int replay,
        const llama_context_params * draft, kvmem_share * shares, uint32_t * n_shares) {
    share_list list = { shares, *n_shares };
    try {
        list.add_weights(model);
        const dry_run   dry(model);
        context_ptr     leader, head; // freed while it is dry
        kvmem_memory *  memory  = nullptr;
        llama_context * created = nullptr;
        if (const int status = kvmem_context_make(model, *params, n_cells, replay, &created, &memory)) {
            return status;
        }
        leader.reset(created);
        list.add_memory(memory);
        if (draft) {
            const auto     own      = kvmem_draft_params(*draft);
            kvmem_memory * follower = nullptr;
            if (const int status = kvmem_context_make(model, own, n_cells, 0, &created, &follower)) {
                return status;
            }
            head.reset(created);
            kvmem_draft_link(leader.get(), head.get());
            list.add_memory(follower);
            list.add_reserved(head.get(), own.n_outputs_max);
        }
        list.add_reserved(leader.get(), params->n_ubatch);
    } catch (const std::length_error & e) {
        kvmem_set_error(e.what());
        return KVMEM_ERR_ARGUMENT;
    } catch (const std::exception & e) {
        kvmem_set_error(e.what());
        return KVMEM_ERR_NO_MEMORY;
    }
    *n_shares = list.n;
    return KVMEM_OK;
}
