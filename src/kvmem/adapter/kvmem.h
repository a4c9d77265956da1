// The C API between kvmem's bindings and llama.cpp's memory: mechanism only, no policy.
//
// Every function is safe to call from any language: nothing is thrown, a status is returned.
// A kvmem_memory belongs to its llama_context and dies with it. One thread at a time may use it.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVMEM_API __attribute__((visibility("default")))

typedef struct kvmem_memory kvmem_memory;
typedef struct kvmem_host   kvmem_host;

enum kvmem_status {
    KVMEM_OK              = 0,
    KVMEM_ERR_ARGUMENT    = -1, // a cell, slot or row that does not exist
    KVMEM_ERR_UNSUPPORTED = -2, // a model or cache kind that cannot be tiered
    KVMEM_ERR_NO_MEMORY   = -3,
    KVMEM_ERR_STATE       = -4, // calls out of order
    KVMEM_ERR_DEVICE      = -5, // a device refused a copy
    KVMEM_ERR_MODEL       = -6, // a model that cannot continue a text, with or without tiers
};

// RoPE as the graph applies it (GGML_OP_ROPE), see ggml_rope_ext and ggml_rope_multi
typedef struct {
    int32_t       n_dims; // 0: this tensor is not rotated
    int32_t       mode;   // GGML_ROPE_TYPE_*
    int32_t       n_ctx_orig;
    int32_t       offset; // first rotated dimension
    float         freq_base;
    float         freq_scale;
    float         ext_factor;
    float         attn_factor;
    float         beta_fast;
    float         beta_slow;
    int32_t       sections[4];
    int32_t       n_freq_factors;
    const float * freq_factors; // owned by the memory, as weights
    int32_t       n_weights;    // of a norm behind the rotation: one for each dimension of a head, or 0
    const float * weights;
} kvmem_rope;

typedef struct {
    int32_t    il; // layer of the model
    int32_t    n_head;
    int32_t    n_head_kv;
    int32_t    head_dim_k;
    int32_t    head_dim_v;
    int32_t    type_k; // ggml_type
    int32_t    type_v;
    int32_t    hadamard;    // size of the Walsh-Hadamard blocks that K and Q went through; 0: none
    size_t     k_row_bytes; // one cell
    size_t     v_row_bytes;
    float      kq_scale; // factor before the softmax
    kvmem_rope rope_k;
    kvmem_rope rope_q;
    void (*dequantize_k)(const void * src, float * dst, int64_t n);
} kvmem_layer;

typedef struct {
    int32_t pos[4];
    int32_t token;
    int32_t x;
    int32_t y;
} kvmem_cell_meta;

// Why the last call of this thread that failed did so.
KVMEM_API const char * kvmem_last_error(void);

// Why this model cannot continue a text, with or without tiers; "" if it can, unless its contexts have no memory
KVMEM_API const char * kvmem_model_refusal(const struct llama_model * model);
// Positions that the model has learnt a row for; 0 if it takes any
KVMEM_API uint32_t kvmem_model_n_positions(const struct llama_model * model);
// Values of a head of K and of V; the greatest common divisor where layers differ
KVMEM_API void kvmem_model_head_dims(const struct llama_model * model, uint32_t * k, uint32_t * v);
#define KVMEM_NO_CACHE "it keeps no KV cache, so it cannot continue a text"

// Create a context whose attention cache has n_cells cells in slots of block_tokens; params.n_ctx stays the logical
// workspace. Supported: one plain KV cache with flash attention, alone or beside a recurrent state.
// replay: with params.n_rs_seq, keep the inputs of the last tokens instead of a recurrent state for each of them.
KVMEM_API int kvmem_context_init(struct llama_model * model, const struct llama_context_params * params,
        uint32_t n_cells, uint32_t block_tokens, int replay, struct llama_context ** ctx, kvmem_memory ** memory);

KVMEM_API uint32_t kvmem_n_cells(const kvmem_memory * memory);
KVMEM_API uint32_t kvmem_n_layers(const kvmem_memory * memory);
KVMEM_API int      kvmem_layer_get(const kvmem_memory * memory, uint32_t i, kvmem_layer * layer);
KVMEM_API int      kvmem_is_hybrid(const kvmem_memory * memory);
KVMEM_API size_t   kvmem_state_bytes(const kvmem_memory * memory); // of one recurrent state, as it is saved
// Bytes of the attention cache and of the recurrent state on the devices, and what of that only drafts need
KVMEM_API void   kvmem_memory_bytes(const kvmem_memory * memory, size_t * attention, size_t * recurrent);
KVMEM_API size_t kvmem_rollback_bytes(const kvmem_memory * memory);

// What is taken on one device. device: ggml's name of it, "" for the memory of the host, for which free and total, the
// device's own memory, are 0.
typedef struct {
    const char * device;
    size_t       free;
    size_t       total;
    size_t       weights;
    size_t       cells;
    size_t       states;
    size_t       compute; // buffers of llama.cpp's graphs
} kvmem_share;

// Of a context that is there, with its follower and the weights. n_shares: room in `shares`, and then how many there
// are.
KVMEM_API int kvmem_shares(const kvmem_memory * memory, kvmem_share * shares, uint32_t * n_shares);
// Of a context that could be: as llama.cpp reserves it, without memory for cells and graphs; a recurrent state is made
// and freed. draft: parameters of the MTP head's context, or NULL. The model may be one without data (no_alloc).
KVMEM_API int kvmem_shares_of(struct llama_model * model, const struct llama_context_params * params, uint32_t n_cells,
        int replay, const struct llama_context_params * draft, kvmem_share * shares, uint32_t * n_shares);

// llama_decode; -4 if it throws, and kvmem_last_error says why.
KVMEM_API int kvmem_decode(struct llama_context * ctx, struct llama_batch batch);

// cells

// The tokens of the next llama_decode go to these cells, in order; all of them must be empty.
KVMEM_API int kvmem_cells_place(kvmem_memory * memory, const int32_t * cells, uint32_t n);
// Make n cells from `cell` on visible to attention as holding these tokens.
KVMEM_API int kvmem_cells_publish(kvmem_memory * memory, int32_t cell, const kvmem_cell_meta * meta, uint32_t n);
// Forget n cells from `cell` on, before anything else is done with cells. Never touches the recurrent state.
KVMEM_API int kvmem_cells_clear(kvmem_memory * memory, int32_t cell, uint32_t n);
// The position of each cell, -1 for none; for checks
KVMEM_API int      kvmem_cells_read(const kvmem_memory * memory, int32_t cell, int32_t * pos, uint32_t n);
KVMEM_API uint32_t kvmem_cells_used(const kvmem_memory * memory);

// rows: a block payload is `layer 0 K | layer 0 V | layer 1 K | ...`, block_tokens rows each

KVMEM_API size_t kvmem_payload_bytes(const kvmem_memory * memory);
KVMEM_API int    kvmem_rows_get(kvmem_memory * memory, const int32_t * slots, uint8_t * const * payloads, uint32_t n);
KVMEM_API int    kvmem_rows_set(
        kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads, uint32_t n);
// kvmem_rows_set and kvmem_cells_publish of n whole blocks at the same time; after an error some cells may be
// published.
KVMEM_API int kvmem_blocks_in(kvmem_memory * memory, const int32_t * slots, const uint8_t * const * payloads,
        const kvmem_cell_meta * const * meta, uint32_t n);
KVMEM_API int kvmem_rows_move(kvmem_memory * memory, int32_t source, int32_t target);
// How rows are copied: "generic", "cuda", or "cuda+generic" where some layers are not on a CUDA device
KVMEM_API const char * kvmem_transfer_name(const kvmem_memory * memory);
// Choose the way by name, to compare them. Fails with KVMEM_ERR_UNSUPPORTED.
KVMEM_API int kvmem_transfer_use(kvmem_memory * memory, const char * name);
// Bytes per second of large plain copies to the device and from it, for benches.
KVMEM_API int kvmem_transfer_ceiling(kvmem_memory * memory, double * in, double * out);
// For tests: the n-th block copy from here on fails, after those before it in the same call were done; 0 for none.
// loses_device: as an error that the device does not recover from, after which every call that would touch it fails.
KVMEM_API void kvmem_transfer_fail(kvmem_memory * memory, uint32_t n, int loses_device);
// For tests: of the calls to CUDA that copies and their buffers need, `count` from the n-th on are not made and fail;
// n = 0 for none. loses_device: in place of the n-th a kernel traps, which no device recovers from. Returns whether
// what was armed before is still waiting. Without CUDA nothing is ever called.
KVMEM_API int kvmem_cuda_fail(uint32_t n, uint32_t count, int loses_device);
// KVMEM_ERR_DEVICE once a copy has lost the device: what llama.cpp does there itself would end the process.
KVMEM_API int kvmem_device_check(const kvmem_memory * memory);
// Where payloads lie on the host; NULL if there is no memory. It outlives its context, and is released once nothing is
// held of it; any thread may use it.
KVMEM_API kvmem_host * kvmem_host_of(kvmem_memory * memory);
KVMEM_API void         kvmem_host_release(kvmem_host * host);
// Memory at a page, pinned beside a CUDA device; NULL if there is none left.
KVMEM_API uint8_t * kvmem_host_alloc(kvmem_host * host, size_t bytes);
KVMEM_API void      kvmem_host_free(kvmem_host * host, uint8_t * data);
// Most bytes to pin from here on; half of the machine's memory unless set. Beyond it memory is plain.
KVMEM_API void kvmem_host_limit_pinned(kvmem_host * host, size_t bytes);
KVMEM_API void kvmem_host_bytes(const kvmem_host * host, size_t * pinned, size_t * plain);

// the query tap: Q as flash attention reads it (rotated), for chosen tokens of the next llama_decode calls

// rows: ascending indices, counted over all tokens decoded from here on. layers: indices into kvmem_layer_get,
// ascending. out: for each of them f32 [n_rows][n_head * head_dim_k]; must live until kvmem_tap_end.
KVMEM_API int kvmem_tap_begin(kvmem_memory * memory, const int32_t * layers, uint32_t n_layers, const int32_t * rows,
        uint32_t n_rows, float * const * out);
// Stop. Fails with KVMEM_ERR_STATE if a row of a layer was not seen.
KVMEM_API int kvmem_tap_end(kvmem_memory * memory);

// drafts: the MTP head as a second context, whose cache follows the leader's

// From here on a payload ends with the follower's layers, cells are published and cleared in both, and each decode of
// the leader keeps the hidden row of every token. To be called before anything is decoded; params as the leader's, save
// for the types of K and V. Either context may be freed first; without the follower no rows can be copied. After
// KVMEM_ERR_NO_MEMORY and KVMEM_ERR_DEVICE the leader can only be freed.
KVMEM_API int kvmem_draft_init(kvmem_memory * leader, struct llama_model * model,
        const struct llama_context_params * params, struct llama_context ** ctx, kvmem_memory ** follower);
// What it does to the leader alone, for a context without tiers that is to compute the same graph.
KVMEM_API void kvmem_keep_hidden_rows(struct llama_context * ctx);
// The follower's memory, or NULL
KVMEM_API kvmem_memory * kvmem_follower(kvmem_memory * leader);
// Whether both hold the same positions in the same cells
KVMEM_API int kvmem_follower_agrees(const kvmem_memory * leader);
// Hidden rows of the leader's last decode: f32 [n_tokens][n_embd], valid until the next; NULL if there are none
KVMEM_API const float * kvmem_hidden_rows(const kvmem_memory * leader);
// Decode n tokens in the follower, at these cells, each with the hidden row of the token before it: first_row is f32
// [n_embd], rows, for those behind the first, f32 [n - 1][n_embd]. After an error none of them is in the follower.
KVMEM_API int kvmem_draft_decode(kvmem_memory * follower, const int32_t * cells, const int32_t * tokens,
        const int32_t * pos, const float * first_row, const float * rows, uint32_t n, int wants_result);
// Take n tokens' places without running the head: rows of zeros, which weigh little and say nothing. After an error
// none of them is in the follower.
KVMEM_API int kvmem_draft_skip(
        kvmem_memory * follower, const int32_t * cells, const int32_t * tokens, const int32_t * pos, uint32_t n);
// What the last of them is followed by, chosen greedily, its probability among the ten likeliest, and the last one's
// own hidden row, which stands in for the leader's. p: NULL if nobody asks.
KVMEM_API int kvmem_draft_result(kvmem_memory * follower, int32_t * token, float * row, float * p);
// Forget these cells in the follower alone.
KVMEM_API int kvmem_draft_forget(kvmem_memory * follower, const int32_t * cells, uint32_t n);

// Take the last n tokens of a complete batch out of the recurrent state, once before the next decode; at most
// params.n_rs_seq, and fewer than the batch had. Their cells are cleared by kvmem_cells_clear. After an error the state
// is not usable.
KVMEM_API int kvmem_recurrent_rollback(kvmem_memory * memory, uint32_t n_tokens);
// A failed or aborted decode, or a removal that the recurrent state cannot follow, makes that state unusable until it
// is restored.
KVMEM_API int kvmem_recurrent_valid(const kvmem_memory * memory);
// The position of the last token that the recurrent state has seen; -1 for none, and for attention alone.
KVMEM_API int32_t kvmem_recurrent_pos(const kvmem_memory * memory);
KVMEM_API void    kvmem_recurrent_restored(kvmem_memory * memory);

// log

// Collect the log lines of llama.cpp and ggml (at most 2000, the oldest go first).
KVMEM_API void kvmem_log_install(void);
// Take the oldest line: fills text and the ggml_log_level, returns its size with the final zero, or 0 if there is none.
KVMEM_API size_t kvmem_log_take(char * text, size_t size, int * level);

#ifdef __cplusplus
}
#endif
