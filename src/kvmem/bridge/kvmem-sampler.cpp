#include "kvmem-gbnf.h"
#include "kvmem-guard.h"

#include "common.h"
#include "json.h"
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

struct kvmem_sampler {
    common_sampler_ptr sampler;
    int32_t            n_vocab     = 0;
    int32_t            sampled     = LLAMA_TOKEN_NULL; // by the last sample
    bool               has_grammar = false;
    size_t             n_memory    = 0; // tokens that it looks back on
};

using field_reader = std::function<void(common_params_sampling &, const common_json &)>;

template <typename T>
static field_reader number(T common_params_sampling::* member) {
    return [member](common_params_sampling & params, const common_json & value) {
        if (!value.is_number()) {
            throw kvmem_invalid("a number is needed, not " + value.dump());
        }
        // -1 is the random seed; a conversion out of range is undefined
        const double given = value.get<double>();
        const double least = std::is_unsigned<T>::value ? -1.0 : (double) std::numeric_limits<T>::lowest();
        if (!std::isfinite(given) || given < least || given > (double) std::numeric_limits<T>::max()) {
            throw kvmem_invalid("the number " + value.dump() + " is out of range");
        }
        params.*member = std::is_unsigned<T>::value && given < 0 ? std::numeric_limits<T>::max() : (T) given;
    };
}

static void read_mirostat(common_params_sampling & params, const common_json & value) {
    if (!value.is_number_integer() || value.get<int>() < 0 || value.get<int>() > 2) {
        throw kvmem_invalid("0, 1 or 2 is needed, not " + value.dump()); // upstream asserts
    }
    params.mirostat = value.get<int>();
}

// the names replace the default chain; each sampler has its own memory of tokens, some MiB at most
static void read_samplers(common_params_sampling & params, const common_json & value) {
    std::vector<std::string> names;
    for (const auto & name : value) {
        names.push_back(name.get<std::string>());
    }
    params.samplers = common_sampler_types_from_names(names);
    if (params.samplers.size() != names.size()) {
        throw kvmem_invalid("an unknown sampler is named in " + value.dump());
    }
    for (const auto type : params.samplers) {
        if (std::count(params.samplers.begin(), params.samplers.end(), type) > 1) {
            throw kvmem_invalid("the sampler " + common_sampler_type_to_str(type) + " is named twice");
        }
        if (type == COMMON_SAMPLER_TYPE_INFILL) {
            throw kvmem_invalid("the sampler infill compares all tokens with each other, which takes minutes for each");
        }
    }
}

static void read_logit_bias(common_params_sampling & params, const common_json & value) {
    for (const auto & pair : value) {
        // null stands for minus infinity, which JSON does not have
        const float bias = pair.at(1).is_null() ? -INFINITY : pair.at(1).get<float>();
        params.logit_bias.push_back({ pair.at((size_t) 0).get<int>(), bias });
    }
}

static void read_grammar(common_params_sampling & params, const common_json & value) {
    const auto text = value.get<std::string>();
    if (!text.empty()) {
        kvmem_gbnf_require_bounded(text);
        params.grammar = common_grammar(COMMON_GRAMMAR_TYPE_USER, text);
    }
}

// llama.cpp looks through the whole vocabulary for each of them
static const size_t MAX_BREAKERS = 128;

static void read_breakers(common_params_sampling & params, const common_json & value) {
    if (value.size() > MAX_BREAKERS) {
        throw kvmem_invalid(
                "at most " + std::to_string(MAX_BREAKERS) + " breakers are taken, not " + std::to_string(value.size()));
    }
    params.dry_sequence_breakers.clear();
    for (const auto & text : value) {
        params.dry_sequence_breakers.push_back(text.get<std::string>());
    }
}

// a grammar that belongs to the template: it reads the generation prompt first, and may wait for a trigger
static void read_constraint(common_params_sampling & params, const common_json & value) {
    const auto text = value.at("grammar").get<std::string>();
    if (text.empty()) {
        return;
    }
    kvmem_gbnf_require_bounded(text);
    params.grammar      = common_grammar(COMMON_GRAMMAR_TYPE_TOOL_CALLS, text);
    params.grammar_lazy = value.at("lazy").get<bool>();
    for (const auto & item : value.at("triggers")) {
        const int type = item.at("type").get<int>();
        if (type < COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN || type > COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
            throw kvmem_invalid("no trigger has the type " + std::to_string(type)); // upstream asserts
        }
        common_grammar_trigger trigger;
        trigger.type  = (common_grammar_trigger_type) type;
        trigger.value = item.at("value").get<std::string>();
        trigger.token = item.at("token").get<int>();
        params.grammar_triggers.push_back(trigger);
    }
    if (params.grammar_lazy && params.grammar_triggers.empty()) {
        throw kvmem_invalid("a lazy grammar needs a trigger");
    }
}

static const std::map<std::string, field_reader> & field_readers() {
    using p                                                  = common_params_sampling;
    static const std::map<std::string, field_reader> readers = {
        { "seed", number(&p::seed) },
        { "min_keep", number(&p::min_keep) },
        { "temperature", number(&p::temp) },
        { "dynatemp_range", number(&p::dynatemp_range) },
        { "dynatemp_exponent", number(&p::dynatemp_exponent) },
        { "top_k", number(&p::top_k) },
        { "top_p", number(&p::top_p) },
        { "min_p", number(&p::min_p) },
        { "typical_p", number(&p::typ_p) },
        { "top_n_sigma", number(&p::top_n_sigma) },
        { "xtc_probability", number(&p::xtc_probability) },
        { "xtc_threshold", number(&p::xtc_threshold) },
        { "repeat_penalty", number(&p::penalty_repeat) },
        { "repeat_last_n", number(&p::penalty_last_n) },
        { "presence_penalty", number(&p::penalty_present) },
        { "frequency_penalty", number(&p::penalty_freq) },
        { "dry_multiplier", number(&p::dry_multiplier) },
        { "dry_base", number(&p::dry_base) },
        { "dry_allowed_length", number(&p::dry_allowed_length) },
        { "dry_penalty_last_n", number(&p::dry_penalty_last_n) },
        { "mirostat", read_mirostat },
        { "mirostat_tau", number(&p::mirostat_tau) },
        { "mirostat_eta", number(&p::mirostat_eta) },
        { "n_probs", number(&p::n_probs) },
        { "samplers", read_samplers },
        { "logit_bias", read_logit_bias }, // [[token, bias], ..]
        { "grammar", read_grammar },       // GBNF
        { "dry_sequence_breakers", read_breakers },
        { "adaptive_target", number(&p::adaptive_target) },
        { "adaptive_decay", number(&p::adaptive_decay) },
        { "constraint", read_constraint },
        { "generation_prompt",
                [](p & params, const common_json & value) { params.generation_prompt  = value.get<std::string>(); } },
        { "ignore_eos", [](p & params, const common_json & value) { params.ignore_eos = value.get<bool>(); } },
    };
    return readers;
}

static common_params_sampling read_params(const common_json & json) {
    if (!json.is_object()) {
        throw kvmem_invalid("sampling parameters are no object");
    }
    common_params_sampling params;
    params.no_perf = true;
    for (const auto & [name, value] : json.items()) {
        if (name == "reasoning") { // needs the vocabulary
            continue;
        }
        const auto reader = field_readers().find(name);
        if (reader == field_readers().end()) {
            throw kvmem_invalid(name + ": unknown sampling parameter");
        }
        try {
            reader->second(params, value);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            throw kvmem_invalid(name + ": " + e.what());
        }
    }
    return params;
}

static void read_reasoning(common_params_sampling & params, const llama_vocab * vocab, const common_json & value) {
    const auto tokenize = [&](const std::string & text) {
        return common_tokenize(vocab, text, /* add_special= */ false, /* parse_special= */ true);
    };
    const auto start = value.at("start").get<std::string>();
    if (start.empty() || value.at("ends").empty()) {
        throw kvmem_invalid("reasoning: a start and an end are needed");
    }
    params.reasoning_budget_start  = tokenize(start);
    params.reasoning_budget_tokens = value.value("budget", -1);
    for (const auto & end : value.at("ends")) {
        params.reasoning_budget_end.push_back(tokenize(end.get<std::string>()));
    }
    const auto first_end           = value.at("ends").at((size_t) 0).get<std::string>();
    params.reasoning_budget_forced = tokenize(value.value("message", "") + first_end);
}

// the parameters that a sampler for this model gets
static common_params_sampling resolve(const llama_vocab * vocab, const std::string & params) {
    common_json json;
    try {
        json = common_json::parse(params);
    } catch (const common_json_error & e) {
        throw kvmem_invalid(e.what());
    }
    common_params_sampling sampling = read_params(json);
    const int32_t          n_vocab  = llama_vocab_n_tokens(vocab);
    if (json.contains("reasoning")) {
        try {
            read_reasoning(sampling, vocab, json.at("reasoning"));
        } catch (const common_json_error & e) {
            throw kvmem_invalid(std::string("reasoning: ") + e.what());
        }
    }
    for (const auto & bias : sampling.logit_bias) {
        if (bias.token < 0 || bias.token >= n_vocab) {
            throw kvmem_invalid("logit_bias: token " + std::to_string(bias.token) + " is not in the vocabulary");
        }
    }
    if (sampling.ignore_eos) { // common_sampler_init leaves this to its callers
        for (llama_token token = 0; token < n_vocab; token++) {
            if (llama_vocab_is_eog(vocab, token)) {
                sampling.logit_bias.push_back({ token, -INFINITY });
            }
        }
    }
    return sampling;
}

// Tokens that penalties count and DRY compares; the sampler itself remembers at least one. What a prompt has in front
// of them leaves no trace.
static size_t find_memory(const common_params_sampling & params) {
    return std::max({ 1, params.n_prev, params.penalty_last_n, params.dry_penalty_last_n });
}

static common_json describe(const common_params_sampling & params) {
    common_json samplers = common_json::array();
    for (const auto type : params.samplers) {
        samplers.push_back(common_sampler_type_to_str(type));
    }
    common_json biases = common_json::array();
    for (const auto & bias : params.logit_bias) {
        common_json value = nullptr; // stands for minus infinity
        if (std::isfinite(bias.bias)) {
            value = bias.bias;
        }
        biases.push_back({ { "token", bias.token }, { "bias", value } });
    }
    return {
        { "seed", params.seed },
        { "temperature", params.temp },
        { "dynatemp_range", params.dynatemp_range },
        { "dynatemp_exponent", params.dynatemp_exponent },
        { "top_k", params.top_k },
        { "top_p", params.top_p },
        { "min_p", params.min_p },
        { "top_n_sigma", params.top_n_sigma },
        { "xtc_probability", params.xtc_probability },
        { "xtc_threshold", params.xtc_threshold },
        { "typical_p", params.typ_p },
        { "repeat_last_n", params.penalty_last_n },
        { "repeat_penalty", params.penalty_repeat },
        { "presence_penalty", params.penalty_present },
        { "frequency_penalty", params.penalty_freq },
        { "dry_multiplier", params.dry_multiplier },
        { "dry_base", params.dry_base },
        { "dry_allowed_length", params.dry_allowed_length },
        { "dry_penalty_last_n", params.dry_penalty_last_n },
        { "dry_sequence_breakers", params.dry_sequence_breakers },
        { "mirostat", params.mirostat },
        { "mirostat_tau", params.mirostat_tau },
        { "mirostat_eta", params.mirostat_eta },
        { "adaptive_target", params.adaptive_target },
        { "adaptive_decay", params.adaptive_decay },
        { "ignore_eos", params.ignore_eos },
        { "logit_bias", biases },
        { "min_keep", params.min_keep },
        { "grammar", common_grammar_value(params.grammar) },
        { "grammar_lazy", params.grammar_lazy },
        { "samplers", samplers },
    };
}

int kvmem_sampler_describe(
        const struct llama_model * model, const char * params, size_t n_params, char ** text, size_t * n_text) {
    return kvmem_guard([&] {
        const auto sampling = resolve(llama_model_get_vocab(model), std::string(params, n_params));
        kvmem_guard_hand_out(describe(sampling).dump(), text, n_text);
    });
}

int kvmem_sampler_init(const struct llama_model * model, const char * params, size_t n_params, kvmem_sampler ** out) {
    return kvmem_guard([&] {
        kvmem_guard_silence_log();
        const llama_vocab *    vocab    = llama_model_get_vocab(model);
        const int32_t          n_vocab  = llama_vocab_n_tokens(vocab);
        common_params_sampling sampling = resolve(vocab, std::string(params, n_params));
        auto                   sampler  = std::make_unique<kvmem_sampler>();
        try {
            sampler->sampler.reset(common_sampler_init(model, sampling));
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) { // all that it throws is about the parameters
            throw kvmem_invalid(e.what());
        }
        sampler->n_vocab     = n_vocab;
        sampler->has_grammar = !sampling.grammar.empty();
        sampler->n_memory    = find_memory(sampling);
        *out                 = sampler.release();
    });
}

int kvmem_sampler_clone(const kvmem_sampler * sampler, kvmem_sampler ** out) {
    return kvmem_guard([&] {
        auto copy = std::make_unique<kvmem_sampler>();
        copy->sampler.reset(common_sampler_clone(sampler->sampler.get()));
        copy->n_vocab     = sampler->n_vocab;
        copy->sampled     = sampler->sampled;
        copy->has_grammar = sampler->has_grammar;
        copy->n_memory    = sampler->n_memory;
        *out              = copy.release();
    });
}

void kvmem_sampler_free(kvmem_sampler * sampler) {
    delete sampler;
}

int kvmem_sampler_sample(kvmem_sampler * sampler, struct llama_context * ctx, int32_t row, int32_t * token) {
    return kvmem_guard([&] {
        llama_synchronize(ctx);
        if (llama_get_logits_ith(ctx, row) == nullptr) { // common_sampler_sample asserts this
            throw kvmem_invalid("row " + std::to_string(row) + " of the last batch has no logits");
        }
        sampler->sampled = common_sampler_sample(sampler->sampler.get(), ctx, row);
        *token           = sampler->sampled;
    });
}

int kvmem_sampler_candidates(kvmem_sampler * sampler, int32_t * tokens, float * chances, size_t * n_candidates) {
    return kvmem_guard([&] {
        const auto * found = common_sampler_get_candidates(sampler->sampler.get(), /* do_sort= */ true);
        size_t       n     = 0;
        for (size_t i = 0; i < found->size && n < *n_candidates; i++) {
            if (found->data[i].p > 0.0f) {
                tokens[n]    = found->data[i].id;
                chances[n++] = found->data[i].p;
            }
        }
        *n_candidates = n;
    });
}

int kvmem_sampler_accept(kvmem_sampler * sampler, int32_t token, int is_generated) {
    return kvmem_guard([&] {
        if (token < 0 || token >= sampler->n_vocab) {
            throw kvmem_invalid("token " + std::to_string(token) + " is not in the vocabulary");
        }
        if (is_generated && sampler->has_grammar && token != sampler->sampled) {
            throw kvmem_invalid("token " + std::to_string(token) + " was not chosen under the grammar");
        }
        try {
            common_sampler_accept(sampler->sampler.get(), token, is_generated != 0);
        } catch (const std::runtime_error & e) {
            if (!sampler->has_grammar) {
                throw;
            }
            // biases or the vocabulary had left no token that the grammar allows
            throw kvmem_invalid(std::string("no token fits the grammar: ") + e.what());
        }
    });
}

int kvmem_sampler_accept_prompt(kvmem_sampler * sampler, const int32_t * tokens, size_t n_tokens) {
    return kvmem_guard([&] {
        for (size_t i = 0; i < n_tokens; i++) {
            if (tokens[i] < 0 || tokens[i] >= sampler->n_vocab) {
                throw kvmem_invalid("token " + std::to_string(tokens[i]) + " is not in the vocabulary");
            }
        }
        for (size_t i = n_tokens - std::min(n_tokens, sampler->n_memory); i < n_tokens; i++) {
            common_sampler_accept(sampler->sampler.get(), tokens[i], false);
        }
    });
}

uint32_t kvmem_sampler_seed(const kvmem_sampler * sampler) {
    return common_sampler_get_seed(sampler->sampler.get());
}
