#include "kvmem-chat.h"
#include "kvmem-guard.h"

int kvmem_chat_init(const struct llama_model * model, const char * source, size_t n_source, kvmem_chat ** out) {
    return kvmem_guard([&] {
        kvmem_guard_silence_log();
        if (model == nullptr && n_source == 0) {
            throw kvmem_invalid("neither a model nor a template was given");
        }
        auto chat       = std::make_unique<kvmem_chat>();
        chat->templates = common_chat_templates_init(model, std::string(source ? source : "", n_source));
        *out            = chat.release();
    });
}

void kvmem_chat_free(kvmem_chat * chat) {
    delete chat;
}

int kvmem_chat_info(const kvmem_chat * chat, char ** text, size_t * n_text) {
    return kvmem_guard([&] {
        const auto * templates = chat->templates.get();
        common_json  caps      = common_json::object();
        for (const auto & [name, value] : common_chat_templates_get_caps(templates)) {
            caps[name] = value;
        }
        common_json info = common_json::object();
        info["source"]   = common_chat_templates_source(templates);
        info["explicit"] = common_chat_templates_was_explicit(templates);
        info["thinking"] = common_chat_templates_support_enable_thinking(templates);
        info["caps"]     = caps;
        kvmem_guard_hand_out(info.dump_safe(), text, n_text);
    });
}

static common_chat_templates_inputs read_inputs(const common_json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    if (request.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(request.at("tools"));
    }
    if (request.contains("tool_choice")) {
        inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(request.at("tool_choice").get<std::string>());
    }
    if (request.contains("kwargs")) {
        for (const auto & [name, value] : request.at("kwargs").items()) {
            inputs.chat_template_kwargs[name] = value.dump();
        }
    }
    if (request.contains("json_schema")) {
        inputs.json_schema = request.at("json_schema").dump();
    }
    if (request.contains("continue")) {
        inputs.continue_final_message = common_chat_continuation_parse(request.at("continue"));
    }
    inputs.parallel_tool_calls   = request.value("parallel_tool_calls", false);
    inputs.enable_thinking       = request.value("enable_thinking", true);
    inputs.add_generation_prompt = request.value("add_generation_prompt", true);
    inputs.reasoning_format =
            request.value("keeps_thinking", false) ? COMMON_REASONING_FORMAT_NONE : COMMON_REASONING_FORMAT_DEEPSEEK;
    return inputs;
}

common_chat_params kvmem_chat_apply(const kvmem_chat & chat, const std::string & request) {
    common_chat_templates_inputs inputs;
    try {
        inputs = read_inputs(common_json::parse(request));
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        throw kvmem_invalid(e.what());
    }
    return common_chat_templates_apply(chat.templates.get(), inputs);
}

common_json kvmem_chat_result(const common_chat_params & params) {
    common_json result          = common_json::object();
    result["prompt"]            = params.prompt;
    result["generation_prompt"] = params.generation_prompt;
    result["grammar"]           = params.grammar;
    result["grammar_lazy"]      = params.grammar_lazy;
    result["stops"]             = params.additional_stops;
    result["thinking_start"]    = params.thinking_start_tag;
    result["thinking_ends"]     = params.thinking_end_tags;
    result["preserved_tokens"]  = params.preserved_tokens;
    result["format"]            = common_chat_format_name(params.format);
    return result;
}

int kvmem_chat_render(const kvmem_chat * chat, const char * request, size_t n_request, char ** text, size_t * n_text) {
    return kvmem_guard([&] {
        const auto params = kvmem_chat_apply(*chat, std::string(request, n_request));
        kvmem_guard_hand_out(kvmem_chat_result(params).dump_safe(), text, n_text);
    });
}
