#include "kvmem-memory.h"

#include "llama-ext.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <new>
#include <numeric>
#include <stdexcept>
#include <typeinfo>

static thread_local std::string last_error;

void kvmem_set_error(const std::string & text) {
    last_error = text;
}

const char * kvmem_last_error(void) {
    return last_error.c_str();
}

//
// kvmem_memory
//

// Why this kind of memory cannot be tiered
static const char * refusal_of(const std::type_info & kind) {
    if (kind == typeid(llama_kv_cache_iswa) || kind == typeid(llama_memory_hybrid_iswa)) {
        return "sliding-window layers keep a second cache whose cells cannot be placed";
    }
    if (kind == typeid(llama_memory_recurrent)) {
        return "a purely recurrent model has no KV blocks to tier";
    }
    // an index has a cell for each cell of K and V, or for each group of them, and chooses which ones attention reads
    if (kind == typeid(llama_kv_cache_msa)) {
        return "an MSA cache mirrors the cells of K and V in an index, which would go wrong if they moved";
    }
    if (kind == typeid(llama_kv_cache_dsa) || kind == typeid(llama_kv_cache_dsa_iswa)) {
        return "a DSA cache mirrors the cells of its latent K in an index, which would go wrong if they moved";
    }
    if (kind == typeid(llama_kv_cache_dsv4)) {
        return "a DSV4 cache compresses groups of tokens into K of their own, which no block of tokens holds";
    }
    if (kind == typeid(llama_memory_hybrid_idx)) {
        return "a hybrid cache with an index mirrors the cells of K and V there, which would go wrong if they moved";
    }
    return "llama.cpp keeps its history in a kind of cache that kvmem does not know";
}

kvmem_memory::kvmem_memory(std::unique_ptr<llama_memory_i> owned) : inner(std::move(owned)) {
    // exactly these two: a class derived from one of them keeps more than what is moved here
    llama_memory_i *       mem  = inner.get();
    const std::type_info & kind = typeid(*mem);
    if (kind == typeid(llama_memory_hybrid)) {
        auto * hybrid = static_cast<llama_memory_hybrid *>(mem);
        attn          = hybrid->get_mem_attn();
        recr          = hybrid->get_mem_recr();
    } else if (kind == typeid(llama_kv_cache)) {
        attn = static_cast<llama_kv_cache *>(mem);
    } else {
        throw std::runtime_error(refusal_of(kind));
    }
    if (attn->get_n_stream() != 1) {
        throw std::runtime_error("the cache must have one stream (n_seq_max = 1 or a unified cache)");
    }

    attn->slot_cb = [this](const llama_ubatch & ubatch, llama_kv_cache::slot_info & res) {
        const auto & table = attn->get_cells(0);

        // tokens of this decode call that are planned already; llama.cpp applies and restores cells while it plans
        const uint32_t begin = table.get_used() - n_used_at_place;
        if (table.get_used() < n_used_at_place || begin + ubatch.n_tokens > placed.size()) {
            return false;
        }
        auto & idxs = res.idxs[0];
        idxs.assign(placed.begin() + begin, placed.begin() + begin + ubatch.n_tokens);
        for (uint32_t cell : idxs) {
            if (!table.is_empty(cell)) {
                return false;
            }
        }
        return true;
    };
}

kvmem_memory::~kvmem_memory() {
    if (leader) {
        leader->follower      = nullptr;
        leader->follower_gone = true;
    }
    if (follower) {
        follower->leader = nullptr;
    }
    if (batch) {
        llama_batch_ext_free(batch);
    }
}

llama_memory_context_ptr kvmem_memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    flush_clears();
    return inner->init_batch(balloc, n_ubatch, embd_all);
}

llama_memory_context_ptr kvmem_memory::init_full() {
    return inner->init_full();
}

llama_memory_context_ptr kvmem_memory::init_update(llama_context * lctx, bool optimize) {
    return inner->init_update(lctx, optimize);
}

// positions never change: K is stored rotated at its own position
bool kvmem_memory::get_can_shift() const {
    return false;
}

void kvmem_memory::clear(bool data) {
    clears.clear();
    inner->clear(data);
    recurrent_valid = true;
}

bool kvmem_memory::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    flush_clears();
    if (!recr) {
        return inner->seq_rm(seq_id, p0, p1);
    }
    // llama.cpp asks for this after a failed decode, and ignores whether the recurrent half could follow. Its snapshots
    // are no way back then: some layers have written theirs and others have not (kvmem_recurrent_rollback is for
    // batches that are complete)
    const bool is_whole = p0 <= 0 && p1 < 0;
    if ((is_whole || recr->seq_pos_max(seq_id) < p0) && recr->seq_rm(seq_id, p0, p1)) {
        return attn->seq_rm(seq_id, p0, p1);
    }
    attn->seq_rm(seq_id, p0, p1);
    recurrent_valid = false;
    return false;
}

void kvmem_memory::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    inner->seq_cp(seq_id_src, seq_id_dst, p0, p1);
}

void kvmem_memory::seq_keep(llama_seq_id seq_id) {
    inner->seq_keep(seq_id);
}

void kvmem_memory::seq_add(llama_seq_id, llama_pos, llama_pos, llama_pos) {
    throw std::runtime_error("kvmem never shifts positions");
}

void kvmem_memory::seq_div(llama_seq_id, llama_pos, llama_pos, int) {
    throw std::runtime_error("kvmem never shifts positions");
}

llama_pos kvmem_memory::seq_pos_min(llama_seq_id seq_id) const {
    const_cast<kvmem_memory *>(this)->flush_clears();
    return inner->seq_pos_min(seq_id);
}

llama_pos kvmem_memory::seq_pos_max(llama_seq_id seq_id) const {
    const_cast<kvmem_memory *>(this)->flush_clears();
    return inner->seq_pos_max(seq_id);
}

std::map<ggml_backend_buffer_type_t, size_t> kvmem_memory::memory_breakdown() const {
    return inner->memory_breakdown();
}

// a full state would hold the resident cells alone; the host store has its own format
void kvmem_memory::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (!recr || !(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        throw std::runtime_error("only the recurrent state can be saved (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)");
    }
    inner->state_write(io, seq_id, flags);
}

void kvmem_memory::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (!recr || !(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        throw std::runtime_error("only the recurrent state can be restored (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)");
    }
    inner->state_read(io, seq_id, flags);
}

const llama_kv_cells & kvmem_memory::cells() const {
    return attn->get_cells(0);
}

//
// creation
//

const char * kvmem_model_refusal(const llama_model * model) {
    if (llama_model_has_encoder(model)) {
        return "it answers from what an encoder made of the prompt, and kvmem has decoders only";
    }
    if (llama_model_is_diffusion(model)) {
        return "it writes by diffusion, and kvmem predicts one token after the other";
    }
    if (!model->hparams.causal_attn || model->arch == LLM_ARCH_LLAMA_EMBED) {
        return "its attention looks ahead, so it cannot continue a text (it is made for embeddings or labels)";
    }
    return "";
}

void kvmem_model_head_dims(const llama_model * model, uint32_t * k, uint32_t * v) {
    *k = *v = 0;
    for (uint32_t il = 0; il < model->hparams.n_layer(); ++il) {
        *k = std::gcd(*k, model->hparams.n_embd_head_k(il));
        *v = std::gcd(*v, model->hparams.n_embd_head_v(il));
    }
}

uint32_t kvmem_model_n_positions(const llama_model * model) {
    return model->pos_embd ? (uint32_t) model->pos_embd->ne[1] : 0;
}

namespace {

struct factory_request {
    uint32_t       n_cells;
    kvmem_memory * created;
    int            status; // if creation fails
    std::string    error;
};

// disarms in every case: llama.cpp's auto-fit and draft contexts must never meet an armed factory
struct factory_guard {
    explicit factory_guard(factory_request * request);
    ~factory_guard() { llama_set_memory_factory(nullptr, nullptr); }
};

llama_memory_i * create_memory(const llama_model & model, const llama_memory_params & params,
        const llama_cparams & cparams, void * user_data) {
    auto * request = (factory_request *) user_data;
    try {
        if (request->created) {
            throw std::runtime_error("the memory factory was armed for one context and is asked for a second");
        }
        if (model.hparams.router_layer >= 0) {
            throw std::runtime_error("its router looks for the newest switch token in the whole history");
        }
        llama_cparams sized = cparams; // the cache gets n_cells, the context keeps the workspace as n_ctx
        sized.n_ctx_seq     = request->n_cells;
        request->status     = KVMEM_ERR_NO_MEMORY; // the one thing that fails while llama.cpp makes its own
        std::unique_ptr<llama_memory_i> inner(model.create_memory(params, sized));
        request->status = KVMEM_ERR_UNSUPPORTED;
        if (!inner) {
            request->status = KVMEM_ERR_MODEL;
            throw std::runtime_error(KVMEM_NO_CACHE);
        }
        auto memory      = std::make_unique<kvmem_memory>(std::move(inner));
        request->created = memory.get();
        return memory.release();
    } catch (const std::exception & e) {
        request->error = e.what();
        throw;
    }
}

factory_guard::factory_guard(factory_request * request) {
    llama_set_memory_factory(create_memory, request);
}

} // namespace

int kvmem_context_init(llama_model * model, const llama_context_params * params, uint32_t n_cells,
        uint32_t block_tokens, int replay, llama_context ** ctx, kvmem_memory ** memory) {
    if (replay && (params->n_seq_max > 1 || params->n_rs_seq == 0)) {
        *ctx    = nullptr;
        *memory = nullptr;
        kvmem_set_error("replay is for one sequence, and for tokens that may be rolled back");
        return KVMEM_ERR_ARGUMENT;
    }
    if (replay && model->arch != LLM_ARCH_QWEN35 && model->arch != LLM_ARCH_QWEN35MOE &&
            model->arch != LLM_ARCH_QWEN3NEXT) {
        *ctx    = nullptr;
        *memory = nullptr;
        kvmem_set_error("tokens are replayed into the gated delta nets of qwen35 and qwen3next alone (use snapshots)");
        return KVMEM_ERR_UNSUPPORTED;
    }
    // the worst case, as the context reserved it: a smaller graph would be followed by a larger one at run time
    return kvmem_context_create(model, *params, n_cells, block_tokens, params->n_ubatch, replay, ctx, memory);
}

int kvmem_context_make(llama_model * model, const llama_context_params & params, uint32_t n_cells, int replay,
        llama_context ** ctx, kvmem_memory ** memory) {
    *ctx    = nullptr;
    *memory = nullptr;
    kvmem_set_error("");

    factory_request request = { n_cells, nullptr, KVMEM_ERR_UNSUPPORTED, "" };
    {
        factory_guard guard(&request);
        // read by the recurrent memory that is made next, on this thread
        llama_memory_recurrent::replay_next() = replay != 0;
        *ctx                                  = llama_init_from_model(model, params);
        llama_memory_recurrent::replay_next() = false;
    }
    if (!*ctx) {
        kvmem_set_error(request.error.empty() ? "llama.cpp could not create the context" : request.error);
        return request.error.empty() ? (int) KVMEM_ERR_NO_MEMORY : request.status;
    }
    *memory = request.created;
    return KVMEM_OK;
}

int kvmem_context_create(llama_model * model, const llama_context_params & params, uint32_t n_cells,
        uint32_t block_tokens, uint32_t n_outputs, int replay, llama_context ** ctx, kvmem_memory ** memory) {
    *ctx    = nullptr;
    *memory = nullptr;
    if (block_tokens == 0 || n_cells < block_tokens) {
        kvmem_set_error("fewer cells than one block");
        return KVMEM_ERR_ARGUMENT;
    }
    llama_context * created = nullptr;
    kvmem_memory *  made    = nullptr;
    if (const int status = kvmem_context_make(model, params, n_cells, replay, &created, &made)) {
        return status;
    }
    try {
        made->bind(created, block_tokens, n_outputs, params.ctx_type != LLAMA_CONTEXT_TYPE_MTP);
    } catch (const std::bad_alloc &) {
        llama_free(created);
        kvmem_set_error("llama.cpp has no memory for its graphs");
        return KVMEM_ERR_NO_MEMORY;
    } catch (const std::exception & e) {
        llama_free(created);
        kvmem_set_error(e.what());
        return KVMEM_ERR_UNSUPPORTED;
    }
    *ctx    = created;
    *memory = made;
    return KVMEM_OK;
}

// the rows of one state: of the convolution, of what they have summed up, and of n-grams where a model has them
static size_t state_row_bytes(const llama_memory_recurrent * recr) {
    size_t res = 0;
    for (const auto * rows : { &recr->r_l, &recr->s_l, &recr->p_l }) {
        for (const ggml_tensor * tensor : *rows) {
            res += tensor ? tensor->nb[1] : 0;
        }
    }
    return res;
}

size_t kvmem_state_bytes(const kvmem_memory * memory) {
    const auto * recr = memory->recr;
    if (!recr) {
        return 0;
    }
    const size_t res = llama_state_seq_get_size_ext(memory->ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (recr->seq_pos_max(0) >= 0) {
        return res;
    }
    // an empty one is written without its cell: rows, position and number of sequences
    // (llama_memory_recurrent::state_write)
    return res + state_row_bytes(recr) + sizeof(llama_pos) + sizeof(uint32_t);
}

int kvmem_is_hybrid(const kvmem_memory * memory) {
    return memory->recr != nullptr;
}

void kvmem_memory_bytes(const kvmem_memory * memory, size_t * attention, size_t * recurrent) {
    *attention = 0;
    *recurrent = 0;
    for (const kvmem_memory * part = memory; part; part = part->follower) {
        for (const auto & entry : part->attn->memory_breakdown()) {
            *attention += entry.second;
        }
    }
    if (memory->recr) {
        for (const auto & entry : memory->recr->memory_breakdown()) {
            *recurrent += entry.second;
        }
    }
}

size_t kvmem_rollback_bytes(const kvmem_memory * memory) {
    size_t attention = 0;
    size_t recurrent = 0;
    kvmem_memory_bytes(memory, &attention, &recurrent);
    return memory->recr ? recurrent - memory->recr->size * state_row_bytes(memory->recr) : 0;
}

int kvmem_recurrent_rollback(kvmem_memory * memory, uint32_t n_tokens) {
    auto * recr = memory->recr;
    if (n_tokens == 0) {
        return KVMEM_OK;
    }
    if (recr && memory->recurrent_valid && n_tokens <= recr->n_rs_seq &&
            recr->seq_rm(0, recr->seq_pos_max(0) + 1 - (llama_pos) n_tokens, -1)) {
        return KVMEM_OK;
    }
    memory->recurrent_valid = false;
    kvmem_set_error("the recurrent state has no snapshot that far back");
    return KVMEM_ERR_STATE;
}

int kvmem_recurrent_valid(const kvmem_memory * memory) {
    return memory->recurrent_valid;
}

int32_t kvmem_recurrent_pos(const kvmem_memory * memory) {
    return memory->recr ? memory->recr->seq_pos_max(0) : -1;
}

void kvmem_recurrent_restored(kvmem_memory * memory) {
    memory->recurrent_valid = true;
}
