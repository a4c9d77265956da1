// llama_memory_i wrapper that owns the stock memory and decides which cells a batch takes.
#pragma once

#include "kvmem-cell-blocks.h"
#include "kvmem-slabs.h"
#include "kvmem.h"
#include "kvmem-transfer.h"

#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"

#include <memory>
#include <new>
#include <string>
#include <vector>

struct llama_batch_ext;

struct kvmem_rope_data {
    std::vector<float> freq_factors;
    std::vector<float> weights;
};

struct kvmem_layer_data {
    kvmem_layer     info = {};
    ggml_tensor *   k    = nullptr;
    ggml_tensor *   v    = nullptr;
    kvmem_rope_data rope_k; // what info points to
    kvmem_rope_data rope_q;
};

struct kvmem_tap {
    std::vector<int32_t> slot_of_layer; // layer index -> position in the output, -1: not tapped
    std::vector<int32_t> rows;
    std::vector<int64_t> n_seen; // tokens that each layer has computed so far
    std::vector<size_t>  n_read; // rows that each layer has delivered so far
    std::vector<float *> out;    // of each tapped layer, f32 [n_rows, n_head, head_dim]
    bool                 active = false;
    bool                 failed = false;
};

struct kvmem_memory : public llama_memory_i {
    explicit kvmem_memory(
            std::unique_ptr<llama_memory_i> inner); // throws std::runtime_error with the reason if it cannot be tiered
    ~kvmem_memory() override;

    // finds every layer's tensors and rotations in the graph, which is reserved for n_outputs rows of logits at most
    // copies: it moves its own rows; a follower's are moved by its leader
    void bind(llama_context * ctx, uint32_t block_tokens, uint32_t n_outputs, bool copies);

    // makes the rows of `memory` a part of every payload, and its cells those of this one
    void lead(kvmem_memory * memory);

    // llama_memory_i

    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool get_can_shift() const override;

    void clear(bool data) override;

    bool              seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void              seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) override;
    void              seq_keep(llama_seq_id seq_id) override;
    [[noreturn]] void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    [[noreturn]] void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;

    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    // the follower's stand last
    std::vector<kvmem_piece> pieces() const;

    // index of the layer whose K the tensor is a view, a cast or a copy of; -1 for none
    int layer_of(const ggml_tensor * tensor) const;

    // forgets the cells that are queued for it
    void flush_clears();

    // here and in the follower; the caller has checked the range. False if a cell is in use
    bool publish(int32_t cell, const kvmem_cell_meta * meta, uint32_t n);

    const llama_kv_cells & cells() const;

    // why the device can do nothing more, the leader's and the follower's being the same; "" while it can
    const std::string & loss() const { return leader ? leader->lost : lost; }

    std::unique_ptr<llama_memory_i> inner;

    llama_context *          ctx  = nullptr;
    llama_kv_cache *         attn = nullptr;
    llama_memory_recurrent * recr = nullptr;

    std::vector<kvmem_layer_data> layers;
    std::vector<int32_t>          placed; // cells of the next decode call
    std::vector<std::pair<int32_t, uint32_t>>
             clears;              // (first cell, count) to forget: done beside the copies of kvmem_blocks_in
    uint32_t n_used_at_place = 0; // tells how far a batch has got, also when llama.cpp plans it twice

    std::unique_ptr<kvmem_cell_blocks> cell_blocks;
    std::shared_ptr<kvmem_slabs>       slabs;
    std::unique_ptr<kvmem_transfer>    transfer; // after slabs, which it looks into
    std::string                        lost;     // see loss()

    uint32_t fail_at    = 0; // tests: the block copy to fail, counted from here on; 0 for none
    bool     fail_loses = false;

    uint32_t  block_tokens = 0;
    size_t    cell_bytes   = 0; // K and V rows of one cell, all layers
    kvmem_tap tap;
    bool      recurrent_valid = true;

    kvmem_memory *    follower      = nullptr; // the cache of the MTP head, owned by its own context
    kvmem_memory *    leader        = nullptr; // in a follower
    bool              follower_gone = false;   // it was freed first: its rows cannot be copied any more
    llama_batch_ext * batch         = nullptr; // in a follower, owned
};

struct kvmem_host {
    std::shared_ptr<kvmem_slabs> slabs;
};

// kvmem_context_init for any kind of context; n_outputs: most rows of logits of a graph
int kvmem_context_create(llama_model * model, const llama_context_params & params, uint32_t n_cells,
        uint32_t block_tokens, uint32_t n_outputs, int replay, llama_context ** ctx, kvmem_memory ** memory);

// the same without kvmem_memory::bind: nothing reads the graph or the tensors
int kvmem_context_make(llama_model * model, const llama_context_params & params, uint32_t n_cells, int replay,
        llama_context ** ctx, kvmem_memory ** memory);

// parameters of the MTP head's context, from those of the leader; and what both contexts keep for each other
llama_context_params kvmem_draft_params(llama_context_params params);
void                 kvmem_draft_link(llama_context * leader, llama_context * head);

void kvmem_set_error(const std::string & text);

// what body returns; a status and a reason in place of what it throws
template <typename F>
int kvmem_guarded(F && body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        kvmem_set_error("out of memory");
        return KVMEM_ERR_NO_MEMORY;
    } catch (const std::exception & e) {
        kvmem_set_error(e.what());
        return KVMEM_ERR_STATE;
    }
}
