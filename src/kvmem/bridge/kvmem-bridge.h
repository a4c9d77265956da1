// The C API between kvmem's bindings and llama-common: chat templates, reply parsers, samplers and schemas.
//
// Structured data crosses as JSON text, everything else as ints and opaque handles: no struct of llama-common is
// mirrored anywhere. Nothing is thrown; a status is returned, and the reason is kept per thread.
// A handle may be used by one thread at a time, save kvmem_chat, which is read-only after init.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVMEM_BRIDGE_API __attribute__((visibility("default")))

enum kvmem_bridge_status {
    KVMEM_BRIDGE_OK          = 0,
    KVMEM_BRIDGE_ERR_INVALID = -1, // the caller's data breaks a rule
    KVMEM_BRIDGE_ERR_FAILED  = -2, // llama-common refused or failed
    KVMEM_BRIDGE_ERR_MEMORY  = -3,
};

// how a reply ended
enum kvmem_reply_ending {
    KVMEM_REPLY_COMPLETE = 0, // the model ended it
    KVMEM_REPLY_CUT      = 1, // by a limit or by the client, anywhere
};

typedef struct kvmem_chat    kvmem_chat;
typedef struct kvmem_reply   kvmem_reply;
typedef struct kvmem_sampler kvmem_sampler;

// llama.cpp's build number; 0 where it was built from a checkout of one's own
KVMEM_BRIDGE_API int kvmem_bridge_build_number(void);

// why the last call of this thread failed; valid until the next call of the thread
KVMEM_BRIDGE_API const char * kvmem_bridge_last_error(void);

// frees a text that a function below has handed out; NULL is allowed
KVMEM_BRIDGE_API void kvmem_bridge_text_free(char * text);

// The model's chat template, or `source` (Jinja) in its place where n_source > 0.
// The model is read during the call only.
KVMEM_BRIDGE_API int kvmem_chat_init(
        const struct llama_model * model, const char * source, size_t n_source, kvmem_chat ** out);
KVMEM_BRIDGE_API void kvmem_chat_free(kvmem_chat * chat);

// {"source": text, "explicit": bool, "thinking": bool, "caps": {name: bool}}
KVMEM_BRIDGE_API int kvmem_chat_info(const kvmem_chat * chat, char ** text, size_t * n_text);

// request: {"messages": [..], "tools"?: [..], "tool_choice"?: text, "parallel_tool_calls"?: bool, "kwargs"?: {..},
//           "enable_thinking"?: bool, "add_generation_prompt"?: bool, "json_schema"?: {..},
//           "continue"?: true | "content" | "reasoning_content", "keeps_thinking"?: bool (thinking stays in content)}
// result:  {"prompt", "generation_prompt", "grammar", "grammar_lazy", "stops": [..], "thinking_start",
//           "thinking_ends": [..], "preserved_tokens": [..], "format"}
KVMEM_BRIDGE_API int kvmem_chat_render(
        const kvmem_chat * chat, const char * request, size_t n_request, char ** text, size_t * n_text);

// Render a request, and make the parser of what the model answers to it. The result is that of kvmem_chat_render, and
// "triggers": [{"type": int, "value": text, "token": id}, ..], "preserved": [token ids whose text belongs to the
// reply]. The grammar is one that a sampler accepts. The model is read during the call only.
KVMEM_BRIDGE_API int  kvmem_reply_init(const kvmem_chat * chat, const struct llama_model * model, const char * request,
        size_t n_request, kvmem_reply ** out, char ** text, size_t * n_text);
KVMEM_BRIDGE_API int  kvmem_reply_clone(const kvmem_reply * reply, kvmem_reply ** out);
KVMEM_BRIDGE_API void kvmem_reply_free(kvmem_reply * reply);

// Append whole characters of the reply. What they add comes out as
// {"reasoning"?: text, "content"?: text, "calls"?: [{"index", "id"?, "name"?, "arguments"}, ..], "notes"?: [text, ..]},
// or as NULL where they add nothing yet. It is never taken back, and all of it joined does not depend on how the text
// was cut. A call's id (empty where the model gives none) and name come once, with its first piece. Text that does not
// fit the template's format comes out as content, with a note.
KVMEM_BRIDGE_API int kvmem_reply_feed(
        kvmem_reply * reply, const char * text, size_t n_text, char ** delta, size_t * n_delta);

// The end: what was held back. Nothing can be fed after it.
KVMEM_BRIDGE_API int kvmem_reply_finish(
        kvmem_reply * reply, enum kvmem_reply_ending ending, char ** delta, size_t * n_delta);

// The grammar (GBNF) that a JSON schema becomes. Parts of a schema that have no grammar are left out without a word.
KVMEM_BRIDGE_API int kvmem_schema_grammar(const char * schema, size_t n_schema, char ** text, size_t * n_text);

// Fails where the grammar does not parse.
KVMEM_BRIDGE_API int kvmem_grammar_check(const struct llama_model * model, const char * grammar, size_t n_grammar);

// params: any of the sampling fields that kvmem-sampler.cpp lists; an unknown one is an error.
// "constraint": {"grammar", "lazy", "triggers"} and "generation_prompt" are those of kvmem_reply_init.
// "reasoning": {"start": text, "ends": [text, ..], "budget": tokens or -1, "message": text}: after that many tokens of
// thinking, message and the first end are forced; a lazy constraint rests while the model thinks.
// The model must outlive the handle.
KVMEM_BRIDGE_API int kvmem_sampler_init(
        const struct llama_model * model, const char * params, size_t n_params, kvmem_sampler ** out);
KVMEM_BRIDGE_API int  kvmem_sampler_clone(const kvmem_sampler * sampler, kvmem_sampler ** out);
KVMEM_BRIDGE_API void kvmem_sampler_free(kvmem_sampler * sampler);

// What the parameters come to with llama.cpp's defaults: {"seed", "temperature", .., "logit_bias": [{"token", "bias"},
// ..], "samplers": [..]}. A bias of null is minus infinity.
KVMEM_BRIDGE_API int kvmem_sampler_describe(
        const struct llama_model * model, const char * params, size_t n_params, char ** text, size_t * n_text);

// Choose a token from the logits of one output row of the last batch, without accepting it.
KVMEM_BRIDGE_API int kvmem_sampler_sample(
        kvmem_sampler * sampler, struct llama_context * ctx, int32_t row, int32_t * token);

// Between which tokens the last sample chose, the likeliest first, and their chances, all above 0.
// n_candidates: in, how many there is room for; out, how many there are.
KVMEM_BRIDGE_API int kvmem_sampler_candidates(
        kvmem_sampler * sampler, int32_t * tokens, float * chances, size_t * n_candidates);

// Add a token to the penalty history. A generated token also advances the grammar, if there is one, and then has
// to be the one that was sampled last: the grammar aborts the process on a token that it does not allow.
KVMEM_BRIDGE_API int kvmem_sampler_accept(kvmem_sampler * sampler, int32_t token, int is_generated);

// The same for a prompt's tokens.
KVMEM_BRIDGE_API int kvmem_sampler_accept_prompt(kvmem_sampler * sampler, const int32_t * tokens, size_t n_tokens);

// the seed in use; a random one was drawn where none was given
KVMEM_BRIDGE_API uint32_t kvmem_sampler_seed(const kvmem_sampler * sampler);

#ifdef __cplusplus
}
#endif
