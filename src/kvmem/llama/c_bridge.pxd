# kvmem-bridge.h: templates and samplers of llama-common behind JSON text and handles.
from libc.stdint cimport int32_t, uint32_t

from kvmem.llama.c_llama cimport llama_context, llama_model


cdef extern from "kvmem-bridge.h" nogil:
    cdef enum:
        KVMEM_BRIDGE_OK
        KVMEM_BRIDGE_ERR_INVALID
        KVMEM_BRIDGE_ERR_FAILED
        KVMEM_BRIDGE_ERR_MEMORY

    cdef struct kvmem_chat
    cdef struct kvmem_sampler

    const char *kvmem_bridge_last_error()
    void kvmem_bridge_text_free(char *text)

    int kvmem_chat_init(const llama_model *model, const char *source, size_t n_source,
                        kvmem_chat **out)
    void kvmem_chat_free(kvmem_chat *chat)
    int kvmem_chat_info(const kvmem_chat *chat, char **text, size_t *n_text)
    int kvmem_chat_render(const kvmem_chat *chat, const char *request, size_t n_request,
                          char **text, size_t *n_text)

    int kvmem_sampler_init(const llama_model *model, const char *params, size_t n_params,
                           kvmem_sampler **out)
    int kvmem_sampler_clone(const kvmem_sampler *sampler, kvmem_sampler **out)
    void kvmem_sampler_free(kvmem_sampler *sampler)
    int kvmem_sampler_sample(kvmem_sampler *sampler, llama_context *ctx, int32_t row,
                             int32_t *token)
    int kvmem_sampler_accept(kvmem_sampler *sampler, int32_t token, int is_generated)
    uint32_t kvmem_sampler_seed(const kvmem_sampler *sampler)
