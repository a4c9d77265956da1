#include "kvmem-grammar.h"

#include "kvmem-gbnf.h"
#include "kvmem-guard.h"

#include "json-schema-to-grammar.h"

void kvmem_grammar_require(const llama_vocab * vocab, const std::string & grammar) {
    kvmem_gbnf_require_bounded(grammar);
    llama_sampler * parsed = llama_sampler_init_grammar(vocab, grammar.c_str(), "root");
    if (parsed == nullptr) {
        throw kvmem_invalid("llama.cpp takes no such escape, or no such repetition of repetitions");
    }
    llama_sampler_free(parsed);
}

int kvmem_grammar_check(const struct llama_model * model, const char * grammar, size_t n_grammar) {
    return kvmem_guard([&] {
        kvmem_guard_silence_log();
        kvmem_grammar_require(llama_model_get_vocab(model), std::string(grammar, n_grammar));
    });
}

int kvmem_schema_grammar(const char * schema, size_t n_schema, char ** text, size_t * n_text) {
    return kvmem_guard([&] {
        kvmem_guard_silence_log();
        std::string grammar;
        try {
            grammar = json_schema_to_grammar(common_json::parse(std::string(schema, n_schema)), /* force_gbnf= */ true);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            throw kvmem_invalid(e.what());
        }
        kvmem_guard_hand_out(grammar, text, n_text);
    });
}
