# adapter/kvmem.h
from libc.stdint cimport int64_t, uint32_t

from kvmem.llama.c_llama cimport llama_batch, llama_context, llama_context_params, llama_model


cdef extern from "kvmem.h" nogil:
    cdef struct kvmem_memory
    cdef struct kvmem_host

    cdef enum:
        KVMEM_OK
        KVMEM_ERR_ARGUMENT
        KVMEM_ERR_UNSUPPORTED
        KVMEM_ERR_NO_MEMORY
        KVMEM_ERR_STATE
        KVMEM_ERR_DEVICE
        KVMEM_ERR_MODEL

    const char *KVMEM_NO_CACHE

    ctypedef struct kvmem_rope:
        int n_dims
        int mode
        int n_ctx_orig
        int offset
        float freq_base
        float freq_scale
        float ext_factor
        float attn_factor
        float beta_fast
        float beta_slow
        int sections[4]
        int n_freq_factors
        const float *freq_factors
        int n_weights
        const float *weights

    ctypedef void (*kvmem_dequantize)(const void *src, float *dst, int64_t n)

    ctypedef struct kvmem_layer:
        int il
        int n_head
        int n_head_kv
        int head_dim_k
        int head_dim_v
        int type_k
        int type_v
        int hadamard
        size_t k_row_bytes
        size_t v_row_bytes
        float kq_scale
        kvmem_rope rope_k
        kvmem_rope rope_q
        kvmem_dequantize dequantize_k

    ctypedef struct kvmem_cell_meta:
        int pos[4]
        int token
        int x
        int y

    ctypedef struct kvmem_share:
        const char *device
        size_t free
        size_t total
        size_t weights
        size_t cells
        size_t states
        size_t compute

    const char *kvmem_last_error()
    const char *kvmem_model_refusal(const llama_model *model)
    void kvmem_model_head_dims(const llama_model *model, uint32_t *k, uint32_t *v)
    uint32_t kvmem_model_n_positions(const llama_model *model)
    int kvmem_context_init(llama_model *model, const llama_context_params *params, uint32_t n_cells,
                           uint32_t block_tokens, int replay, llama_context **ctx,
                           kvmem_memory **memory)
    uint32_t kvmem_n_cells(const kvmem_memory *memory)
    uint32_t kvmem_n_layers(const kvmem_memory *memory)
    int kvmem_layer_get(const kvmem_memory *memory, uint32_t i, kvmem_layer *layer)
    int kvmem_is_hybrid(const kvmem_memory *memory)
    size_t kvmem_state_bytes(const kvmem_memory *memory)
    void kvmem_memory_bytes(const kvmem_memory *memory, size_t *attention, size_t *recurrent)
    size_t kvmem_rollback_bytes(const kvmem_memory *memory)
    int kvmem_shares(const kvmem_memory *memory, kvmem_share *shares, uint32_t *n_shares)
    int kvmem_shares_of(llama_model *model, const llama_context_params *params, uint32_t n_cells,
                        int replay, const llama_context_params *draft, kvmem_share *shares,
                        uint32_t *n_shares)

    int kvmem_decode(llama_context *ctx, llama_batch batch)
    int kvmem_device_check(const kvmem_memory *memory)
    int kvmem_cells_place(kvmem_memory *memory, const int *cells, uint32_t n)
    int kvmem_cells_publish(kvmem_memory *memory, int cell, const kvmem_cell_meta *meta, uint32_t n)
    int kvmem_cells_clear(kvmem_memory *memory, int cell, uint32_t n)
    int kvmem_cells_read(const kvmem_memory *memory, int cell, int *pos, uint32_t n)
    uint32_t kvmem_cells_used(const kvmem_memory *memory)

    size_t kvmem_payload_bytes(const kvmem_memory *memory)
    int kvmem_rows_get(kvmem_memory *memory, const int *slots, unsigned char **payloads, uint32_t n)
    int kvmem_rows_set(kvmem_memory *memory, const int *slots, const unsigned char **payloads,
                       uint32_t n)
    int kvmem_blocks_in(kvmem_memory *memory, const int *slots, const unsigned char **payloads,
                        const kvmem_cell_meta **meta, uint32_t n)
    int kvmem_rows_move(kvmem_memory *memory, int source, int target)
    const char *kvmem_transfer_name(const kvmem_memory *memory)
    int kvmem_transfer_use(kvmem_memory *memory, const char *name)
    int kvmem_transfer_ceiling(kvmem_memory *memory, double *to_device, double *to_host)
    void kvmem_transfer_fail(kvmem_memory *memory, uint32_t n, int loses_device)
    int kvmem_cuda_fail(uint32_t n, uint32_t count, int loses_device)
    kvmem_host *kvmem_host_of(kvmem_memory *memory)
    void kvmem_host_release(kvmem_host *host)
    unsigned char *kvmem_host_alloc(kvmem_host *host, size_t n_bytes)
    void kvmem_host_free(kvmem_host *host, unsigned char *data)
    void kvmem_host_limit_pinned(kvmem_host *host, size_t n_bytes)
    void kvmem_host_bytes(const kvmem_host *host, size_t *pinned, size_t *plain)

    int kvmem_tap_begin(kvmem_memory *memory, const int *layers, uint32_t n_layers, const int *rows,
                        uint32_t n_rows, float *const *out)
    int kvmem_tap_end(kvmem_memory *memory)

    int kvmem_draft_init(kvmem_memory *leader, llama_model *model,
                         const llama_context_params *params, llama_context **ctx,
                         kvmem_memory **follower)
    void kvmem_keep_hidden_rows(llama_context *ctx)
    kvmem_memory *kvmem_follower(kvmem_memory *leader)
    int kvmem_follower_agrees(const kvmem_memory *leader)
    const float *kvmem_hidden_rows(const kvmem_memory *leader)
    int kvmem_draft_decode(kvmem_memory *follower, const int *cells, const int *tokens,
                           const int *pos, const float *first_row, const float *rows,
                           uint32_t n, int wants_result)
    int kvmem_draft_skip(kvmem_memory *follower, const int *cells, const int *tokens,
                         const int *pos, uint32_t n)
    int kvmem_draft_result(kvmem_memory *follower, int *token, float *row, float *p)
    int kvmem_draft_forget(kvmem_memory *follower, const int *cells, uint32_t n)

    int kvmem_recurrent_rollback(kvmem_memory *memory, uint32_t n_tokens)
    int kvmem_recurrent_valid(const kvmem_memory *memory)
    int kvmem_recurrent_pos(const kvmem_memory *memory)
    void kvmem_recurrent_restored(kvmem_memory *memory)

    void kvmem_log_install()
    size_t kvmem_log_take(char *text, size_t size, int *level)
