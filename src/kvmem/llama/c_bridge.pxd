# kvmem-bridge.h: templates, parsers and samplers of llama-common behind JSON text and handles.
from libc.stdint cimport int32_t, uint32_t

from kvmem.llama.c_llama cimport llama_context, llama_model


cdef extern from "kvmem-bridge.h" nogil:
    cdef enum:
        KVMEM_BRIDGE_OK
        KVMEM_BRIDGE_ERR_INVALID
        KVMEM_BRIDGE_ERR_FAILED
        KVMEM_BRIDGE_ERR_MEMORY

    cdef enum kvmem_reply_ending:
        KVMEM_REPLY_COMPLETE
        KVMEM_REPLY_CUT

    cdef struct kvmem_chat
    cdef struct kvmem_reply
    cdef struct kvmem_sampler

    int kvmem_bridge_build_number()
    const char *kvmem_bridge_last_error()
    void kvmem_bridge_text_free(char *text)

    int kvmem_chat_init(const llama_model *model, const char *source, size_t n_source,
                        kvmem_chat **out)
    void kvmem_chat_free(kvmem_chat *chat)
    int kvmem_chat_info(const kvmem_chat *chat, char **text, size_t *n_text)
    int kvmem_chat_render(const kvmem_chat *chat, const char *request, size_t n_request,
                          char **text, size_t *n_text)

    int kvmem_reply_init(const kvmem_chat *chat, const llama_model *model, const char *request,
                         size_t n_request, kvmem_reply **out, char **text, size_t *n_text)
    int kvmem_reply_clone(const kvmem_reply *reply, kvmem_reply **out)
    void kvmem_reply_free(kvmem_reply *reply)
    int kvmem_reply_feed(kvmem_reply *reply, const char *text, size_t n_text, char **delta,
                         size_t *n_delta)
    int kvmem_reply_finish(kvmem_reply *reply, kvmem_reply_ending ending, char **delta,
                           size_t *n_delta)

    int kvmem_schema_grammar(const char *schema, size_t n_schema, char **text, size_t *n_text)
    int kvmem_grammar_check(const llama_model *model, const char *grammar, size_t n_grammar)

    int kvmem_sampler_init(const llama_model *model, const char *params, size_t n_params,
                           kvmem_sampler **out)
    int kvmem_sampler_describe(const llama_model *model, const char *params, size_t n_params,
                               char **text, size_t *n_text)
    int kvmem_sampler_clone(const kvmem_sampler *sampler, kvmem_sampler **out)
    void kvmem_sampler_free(kvmem_sampler *sampler)
    int kvmem_sampler_sample(kvmem_sampler *sampler, llama_context *ctx, int32_t row,
                             int32_t *token)
    int kvmem_sampler_candidates(kvmem_sampler *sampler, int32_t *tokens, float *chances,
                                 size_t *n_candidates)
    int kvmem_sampler_accept(kvmem_sampler *sampler, int32_t token, int is_generated)
    int kvmem_sampler_accept_prompt(kvmem_sampler *sampler, const int32_t *tokens,
                                    size_t n_tokens)
    uint32_t kvmem_sampler_seed(const kvmem_sampler *sampler)
