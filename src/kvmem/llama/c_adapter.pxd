# adapter/kvmem.h
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from kvmem.llama.c_llama cimport llama_context, llama_context_params, llama_model


cdef extern from "kvmem.h" nogil:
    cdef struct kvmem_memory

    cdef enum:
        KVMEM_OK
        KVMEM_ERR_ARGUMENT
        KVMEM_ERR_UNSUPPORTED
        KVMEM_ERR_NO_MEMORY
        KVMEM_ERR_STATE
        KVMEM_ERR_DEVICE

    ctypedef struct kvmem_rope:
        int32_t n_dims
        int32_t mode
        int32_t n_ctx_orig
        int32_t offset
        float freq_base
        float freq_scale
        float ext_factor
        float attn_factor
        float beta_fast
        float beta_slow
        int32_t sections[4]
        int32_t n_freq_factors
        const float *freq_factors

    ctypedef void (*kvmem_dequantize)(const void *src, float *dst, int64_t n)

    ctypedef struct kvmem_layer:
        int32_t il
        int32_t n_head
        int32_t n_head_kv
        int32_t head_dim_k
        int32_t head_dim_v
        int32_t type_k
        int32_t type_v
        int32_t hadamard
        size_t k_row_bytes
        size_t v_row_bytes
        float kq_scale
        kvmem_rope rope_k
        kvmem_rope rope_q
        kvmem_dequantize dequantize_k

    ctypedef struct kvmem_cell_meta:
        int32_t pos[4]
        int32_t token
        int32_t x
        int32_t y

    const char *kvmem_last_error()
    int kvmem_context_init(llama_model *model, const llama_context_params *params, uint32_t n_cells,
                           uint32_t block_tokens, llama_context **ctx, kvmem_memory **memory)
    uint32_t kvmem_n_cells(const kvmem_memory *memory)
    uint32_t kvmem_n_layers(const kvmem_memory *memory)
    int kvmem_layer_get(const kvmem_memory *memory, uint32_t i, kvmem_layer *layer)
    int kvmem_is_hybrid(const kvmem_memory *memory)
    void kvmem_memory_bytes(const kvmem_memory *memory, size_t *attention, size_t *recurrent)

    int kvmem_cells_place(kvmem_memory *memory, const int32_t *cells, uint32_t n)
    int kvmem_cells_publish(kvmem_memory *memory, int32_t cell, const kvmem_cell_meta *meta, uint32_t n)
    int kvmem_cells_clear(kvmem_memory *memory, int32_t cell, uint32_t n)
    int kvmem_cells_read(const kvmem_memory *memory, int32_t cell, int32_t *pos, uint32_t n)
    uint32_t kvmem_cells_used(const kvmem_memory *memory)

    size_t kvmem_payload_bytes(const kvmem_memory *memory)
    int kvmem_rows_get(kvmem_memory *memory, const int32_t *slots, uint8_t **payloads, uint32_t n)
    int kvmem_rows_set(kvmem_memory *memory, const int32_t *slots, const uint8_t **payloads, uint32_t n)
    int kvmem_rows_move(kvmem_memory *memory, int32_t source, int32_t target)
    const char *kvmem_transfer_name(const kvmem_memory *memory)
    uint8_t *kvmem_host_alloc(kvmem_memory *memory, size_t n_bytes)
    void kvmem_host_free(kvmem_memory *memory, uint8_t *data)

    int kvmem_tap_begin(kvmem_memory *memory, const int32_t *layers, uint32_t n_layers, const int32_t *rows,
                        uint32_t n_rows, float *out)
    int kvmem_tap_end(kvmem_memory *memory)

    int kvmem_recurrent_valid(const kvmem_memory *memory)
    void kvmem_recurrent_restored(kvmem_memory *memory)

    void kvmem_log_install()
    size_t kvmem_log_take(char *text, size_t size, int *level)
