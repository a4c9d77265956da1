# llama.h and ggml-backend.h, as far as the bindings call them.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "llama.h" nogil:
    ctypedef int llama_token
    ctypedef int llama_pos
    ctypedef int llama_seq_id
    ctypedef uint32_t llama_state_seq_flags
    ctypedef bint (*llama_progress_callback)(float progress, void *user_data)
    ctypedef bint (*ggml_abort_callback)(void *data)

    cdef struct llama_model
    cdef struct llama_context
    cdef struct llama_vocab
    cdef struct llama_memory_i
    ctypedef llama_memory_i *llama_memory_t

    cdef enum:
        LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        LLAMA_STATE_SEQ_FLAGS_ON_DEVICE

    ctypedef enum ggml_type:
        GGML_TYPE_F32
        GGML_TYPE_F16
        GGML_TYPE_Q4_0
        GGML_TYPE_Q5_0
        GGML_TYPE_Q8_0

    ctypedef enum llama_flash_attn_type:
        LLAMA_FLASH_ATTN_TYPE_AUTO
        LLAMA_FLASH_ATTN_TYPE_DISABLED
        LLAMA_FLASH_ATTN_TYPE_ENABLED

    ctypedef enum llama_split_mode:
        LLAMA_SPLIT_MODE_NONE

    ctypedef enum llama_load_mode:
        LLAMA_LOAD_MODE_AUTO
        LLAMA_LOAD_MODE_NONE
        LLAMA_LOAD_MODE_MMAP
        LLAMA_LOAD_MODE_MMAP_MLOCK

    cdef struct llama_model_params:
        int32_t n_gpu_layers
        llama_split_mode split_mode
        llama_load_mode load_mode
        int32_t main_gpu
        const float *tensor_split
        llama_progress_callback progress_callback
        void *progress_callback_user_data
        bint vocab_only
        bint no_alloc
        bint load_mtp

    cdef struct llama_context_params:
        uint32_t n_ctx
        uint32_t n_batch
        uint32_t n_ubatch
        uint32_t n_seq_max
        uint32_t n_rs_seq
        int32_t n_threads
        int32_t n_threads_batch
        llama_flash_attn_type flash_attn_type
        ggml_type type_k
        ggml_type type_v
        bint offload_kqv
        bint no_perf
        bint kv_unified

    cdef struct llama_batch:
        int32_t n_tokens
        llama_token *token
        llama_pos *pos
        int32_t *n_seq_id
        llama_seq_id **seq_id
        int8_t *logits

    void llama_backend_init()
    llama_model_params llama_model_default_params()
    llama_context_params llama_context_default_params()
    llama_model *llama_model_load_from_file(const char *path, llama_model_params params)
    void llama_model_free(llama_model *model)
    llama_context *llama_init_from_model(llama_model *model, llama_context_params params)
    void llama_free(llama_context *ctx)

    const llama_vocab *llama_model_get_vocab(const llama_model *model)
    int32_t llama_model_n_ctx_train(const llama_model *model)
    int32_t llama_model_n_embd(const llama_model *model)
    int32_t llama_model_n_embd_out(const llama_model *model)
    int32_t llama_model_n_layer(const llama_model *model)
    int32_t llama_model_n_layer_nextn(const llama_model *model)
    int32_t llama_model_n_head(const llama_model *model)
    int32_t llama_model_n_head_kv(const llama_model *model)
    int32_t llama_model_desc(const llama_model *model, char *buf, size_t size)
    int32_t llama_model_meta_val_str(const llama_model *model, const char *key, char *buf,
                                     size_t size)
    uint64_t llama_model_size(const llama_model *model)
    uint64_t llama_model_n_params(const llama_model *model)
    bint llama_model_is_recurrent(const llama_model *model)
    bint llama_model_is_hybrid(const llama_model *model)
    bint llama_model_has_encoder(const llama_model *model)

    cdef enum:
        LLAMA_VOCAB_TYPE_NONE
        LLAMA_TOKEN_ATTR_UNKNOWN
        LLAMA_TOKEN_ATTR_CONTROL
        LLAMA_TOKEN_ATTR_USER_DEFINED
        LLAMA_TOKEN_ATTR_LSTRIP
        LLAMA_TOKEN_ATTR_RSTRIP
    int llama_vocab_type(const llama_vocab *vocab)
    int llama_vocab_get_attr(const llama_vocab *vocab, llama_token token)
    int32_t llama_vocab_n_tokens(const llama_vocab *vocab)
    bint llama_vocab_is_eog(const llama_vocab *vocab, llama_token token)
    bint llama_vocab_is_control(const llama_vocab *vocab, llama_token token)
    bint llama_vocab_get_add_eos(const llama_vocab *vocab)
    llama_token llama_vocab_bos(const llama_vocab *vocab)
    llama_token llama_vocab_eos(const llama_vocab *vocab)
    int32_t llama_tokenize(const llama_vocab *vocab, const char *text, int32_t text_len,
                           llama_token *tokens,
                           int32_t n_tokens_max, bint add_special, bint parse_special)
    int32_t llama_token_to_piece(const llama_vocab *vocab, llama_token token, char *buf,
                                 int32_t length,
                                 int32_t lstrip, bint special)

    uint32_t llama_n_ctx(const llama_context *ctx)
    uint32_t llama_n_batch(const llama_context *ctx)
    uint32_t llama_n_ubatch(const llama_context *ctx)
    uint32_t llama_n_rs_seq(const llama_context *ctx)
    llama_memory_t llama_get_memory(const llama_context *ctx)
    void llama_set_abort_callback(llama_context *ctx, ggml_abort_callback callback, void *data)
    void llama_set_n_threads(llama_context *ctx, int32_t n_threads, int32_t n_threads_batch)
    void llama_synchronize(llama_context *ctx)
    llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max)
    void llama_batch_free(llama_batch batch)
    float *llama_get_logits_ith(llama_context *ctx, int32_t i)

    void llama_memory_clear(llama_memory_t mem, bint data)
    bint llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1)
    void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id src, llama_seq_id dst, llama_pos p0,
                             llama_pos p1)
    llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id)

    size_t llama_state_seq_get_size_ext(llama_context *ctx, llama_seq_id seq_id,
                                        llama_state_seq_flags flags)
    size_t llama_state_seq_get_data_ext(llama_context *ctx, uint8_t *dst, size_t size,
                                        llama_seq_id seq_id,
                                        llama_state_seq_flags flags)
    size_t llama_state_seq_set_data_ext(llama_context *ctx, const uint8_t *src, size_t size,
                                        llama_seq_id seq_id,
                                        llama_state_seq_flags flags)

    const char *llama_print_system_info()
    size_t llama_max_devices()


cdef extern from "ggml-backend.h" nogil:
    cdef struct ggml_backend_device
    ctypedef ggml_backend_device *ggml_backend_dev_t
    ctypedef enum device_type "enum ggml_backend_dev_type":
        GGML_BACKEND_DEVICE_TYPE_CPU
        GGML_BACKEND_DEVICE_TYPE_GPU
        GGML_BACKEND_DEVICE_TYPE_IGPU
    ctypedef struct ggml_backend_reg
    ctypedef ggml_backend_reg *ggml_backend_reg_t
    ggml_backend_reg_t ggml_backend_load(const char *path)
    size_t ggml_backend_dev_count()
    ggml_backend_dev_t ggml_backend_dev_get(size_t index)
    const char *ggml_backend_dev_name(ggml_backend_dev_t device)
    const char *ggml_backend_dev_description(ggml_backend_dev_t device)
    void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t *free, size_t *total)
    device_type device_get_type "ggml_backend_dev_type" (ggml_backend_dev_t device)
