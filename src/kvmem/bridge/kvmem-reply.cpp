#include "kvmem-chat.h"
#include "kvmem-grammar.h"
#include "kvmem-guard.h"

#include "chat-peg-parser.h"
#include "sampling.h"

#include <algorithm>
#include <set>

using peg = common_chat_peg_builder;

// The parser calls itself for each level of JSON; a few thousand of them overflow the stack.
static const int MAX_NESTING = 500;

// Parses the reply from its beginning each time: a parse of a longer text says the same and more. What it says more is
// handed out; what contradicts the sent part is held back for good.
struct kvmem_reply {
    common_peg_arena         parser;
    common_chat_format       format;
    std::string              input;         // generation prompt and reply
    size_t                   n_prompt  = 0; // bytes of the generation prompt
    size_t                   n_fitting = 0; // a length of input that is known to fit the format
    std::vector<std::string> thinking_ends; // the closing tags
    std::vector<std::string> markers;       // texts of the format that are no content
    common_chat_msg          sent;
    int                      nesting     = 0;     // brackets that are open in input, those in texts included
    bool                     is_plain    = false; // it does not fit: from here on all is text
    bool                     is_finished = false;
};

struct parsed_reply {
    common_chat_msg msg;
    bool            fits       = false; // or may still fit, once there is more
    bool            is_whole   = false; // nothing is waited for
    size_t          shown_end  = 0;     // end of the last part that msg shows
    bool            in_thought = false; // that part is reasoning
};

static std::unique_ptr<common_chat_peg_mapper> make_mapper(common_chat_format format, common_chat_msg & msg) {
    switch (format) {
        case COMMON_CHAT_FORMAT_PEG_GEMMA4:
            return std::make_unique<common_chat_peg_gemma4_mapper>(msg);
        case COMMON_CHAT_FORMAT_PEG_MINIMAX_M3:
            return std::make_unique<common_chat_peg_minimax_m3_mapper>(msg);
        default:
            return std::make_unique<common_chat_peg_mapper>(msg);
    }
}

static bool is_shown(const common_peg_ast_node & node) {
    static const std::set<std::string> tags = { peg::REASONING, peg::CONTENT, peg::TOOL_OPEN, peg::TOOL_NAME,
        peg::TOOL_ID, peg::TOOL_ARG_OPEN, peg::TOOL_ARG_NAME, peg::TOOL_ARG_VALUE, peg::TOOL_ARG_STRING_VALUE,
        peg::TOOL_ARG_CLOSE, peg::TOOL_CLOSE };
    return tags.count(node.tag) > 0 || (node.tag == peg::TOOL_ARGS && !node.text.empty() && node.text.front() == '{');
}

static parsed_reply parse(const kvmem_reply & reply, size_t n_bytes) {
    common_peg_parse_context ctx(reply.input.substr(0, n_bytes), COMMON_PEG_PARSE_FLAG_LENIENT);
    const auto               result = reply.parser.parse(ctx);
    parsed_reply             parsed;
    parsed.is_whole  = result.success();
    parsed.shown_end = reply.n_prompt;
    parsed.fits = !result.fail() &&
                  (result.need_more_input() || ctx.input.find_first_not_of(" \t\r\n", result.end) == std::string::npos);
    if (!parsed.fits) {
        return parsed;
    }
    parsed.msg.role = "assistant";
    make_mapper(reply.format, parsed.msg)->from_ast(ctx.ast, result);
    ctx.ast.visit(result, [&](const common_peg_ast_node & node) {
        if (is_shown(node) && node.end >= parsed.shown_end) {
            parsed.shown_end  = node.end;
            parsed.in_thought = node.tag == peg::REASONING;
        }
    });
    return parsed;
}

static bool starts_with(const std::string & text, const std::string & start) {
    return text.compare(0, start.size(), start) == 0;
}

static std::string trimmed_left(const std::string & text) {
    return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

static std::string trimmed_right(const std::string & text) {
    return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}

// what `now` has beyond `sent`, which it replaces; nothing where it is no continuation
static std::string extend(std::string & sent, const std::string & now) {
    if (now.size() <= sent.size() || !starts_with(now, sent)) {
        return "";
    }
    std::string more = now.substr(sent.size());
    sent             = now;
    return more;
}

struct reply_delta {
    std::string reasoning;
    std::string content;
    common_json calls = common_json::array();
    common_json notes = common_json::array();

    bool empty() const { return reasoning.empty() && content.empty() && calls.empty() && notes.empty(); }
};

static void add_calls(kvmem_reply & reply, const common_chat_msg & msg, bool is_last, reply_delta & delta) {
    auto & sent = reply.sent.tool_calls;
    for (size_t i = 0; i < msg.tool_calls.size(); i++) {
        const auto & now = msg.tool_calls[i];
        if (i >= sent.size()) {
            // a name may still grow as long as nothing follows it
            if (now.name.empty() || (now.arguments.empty() && !is_last && i + 1 == msg.tool_calls.size())) {
                return;
            }
            sent.push_back({ now.name, "", now.id });
            common_json call  = common_json::object();
            call["index"]     = i;
            call["id"]        = now.id;
            call["name"]      = now.name;
            call["arguments"] = extend(sent[i].arguments, now.arguments);
            delta.calls.push_back(call);
            continue;
        }
        if (now.name != sent[i].name) {
            return;
        }
        const std::string more = extend(sent[i].arguments, now.arguments);
        if (!more.empty()) {
            common_json call  = common_json::object();
            call["index"]     = i;
            call["arguments"] = more;
            delta.calls.push_back(call);
        }
    }
}

static void add_message(kvmem_reply & reply, const common_chat_msg & msg, bool is_last, reply_delta & delta) {
    // a template puts a line break of its own before the end of a thought: one that is kept would make the next turn's
    // prompt differ from what was generated
    delta.reasoning += extend(reply.sent.reasoning_content, trimmed_right(msg.reasoning_content));
    delta.content += extend(reply.sent.content, msg.content);
    add_calls(reply, msg, is_last, delta);
}

static void add_content(kvmem_reply & reply, const std::string & text, reply_delta & delta) {
    const std::string shown = reply.sent.content.empty() ? trimmed_left(text) : text;
    reply.sent.content += shown;
    delta.content += shown;
}

// Text after the last shown part, without the tag that closes a thought. is_thought: it belongs to the thought.
static std::string rest_of(const kvmem_reply & reply, const parsed_reply & parsed, bool & is_thought) {
    std::string rest = reply.input.substr(parsed.shown_end);
    is_thought       = parsed.in_thought;
    if (is_thought) {
        const std::string trimmed = trimmed_left(rest);
        for (const auto & end : reply.thinking_ends) {
            if (starts_with(trimmed, end)) {
                is_thought = false;
                return trimmed.substr(end.size());
            }
        }
    }
    return rest;
}

// The text does not fit. Whatever it was cut into, the longest beginning that fits is read as the format says, and
// what follows is passed on as it is.
static void go_plain(kvmem_reply & reply, reply_delta & delta) {
    size_t fits  = reply.n_fitting;
    size_t fails = reply.input.size();
    while (fails - fits > 1) {
        const size_t middle                        = fits + (fails - fits) / 2;
        (parse(reply, middle).fits ? fits : fails) = middle;
    }
    const parsed_reply parsed = parse(reply, fits);
    bool               is_thought;
    add_message(reply, parsed.msg, /* is_last= */ true, delta);
    const std::string rest = rest_of(reply, parsed, is_thought);
    add_content(reply, rest, delta);
    delta.notes.push_back("the reply does not fit the template's format: part of it is passed on as text");
    reply.is_plain = true;
}

static void read_on(kvmem_reply & reply, const std::string & text, reply_delta & delta) {
    reply.input += text;
    const parsed_reply parsed = parse(reply, reply.input.size());
    if (!parsed.fits) {
        go_plain(reply, delta);
        return;
    }
    reply.n_fitting = reply.input.size();
    add_message(reply, parsed.msg, /* is_last= */ false, delta);
}

// bytes of text up to where brackets would be nested too deep
static size_t shallow_part(kvmem_reply & reply, const std::string & text) {
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '[' || text[i] == '{') {
            if (++reply.nesting > MAX_NESTING) {
                return i;
            }
        } else if ((text[i] == ']' || text[i] == '}') && reply.nesting > 0) {
            reply.nesting--;
        }
    }
    return text.size();
}

static void append(kvmem_reply & reply, const std::string & text, reply_delta & delta) {
    const size_t n_shallow = shallow_part(reply, text);
    read_on(reply, text.substr(0, n_shallow), delta);
    if (n_shallow == text.size()) {
        return;
    }
    if (!reply.is_plain) {
        bool is_thought;
        add_content(reply, rest_of(reply, parse(reply, reply.input.size()), is_thought), delta);
        delta.notes.push_back("brackets are nested too deep: the rest of the reply is passed on as text");
        reply.is_plain = true;
    }
    add_content(reply, text.substr(n_shallow), delta);
}

static bool has_marker(const kvmem_reply & reply, const std::string & text) {
    return std::any_of(reply.markers.begin(), reply.markers.end(),
            [&](const std::string & marker) { return text.find(marker) != std::string::npos; });
}

// what the parser would wait for more input with, now that none comes
static void add_rest(kvmem_reply & reply, const parsed_reply & parsed, kvmem_reply_ending ending, reply_delta & delta) {
    bool              is_thought;
    const std::string rest = rest_of(reply, parsed, is_thought);
    if (parsed.is_whole || trimmed_left(rest).empty()) {
        return;
    }
    const bool is_syntax = has_marker(reply, rest);
    if (!parsed.msg.tool_calls.empty()) {
        if (ending == KVMEM_REPLY_COMPLETE) {
            delta.notes.push_back("the reply ended inside a tool call");
        }
    } else if (is_syntax && ending == KVMEM_REPLY_CUT) {
        delta.notes.push_back("the reply was cut where a tool call began");
    } else if (is_thought) {
        delta.reasoning += extend(reply.sent.reasoning_content, parsed.msg.reasoning_content + rest);
    } else {
        add_content(reply, rest, delta);
        if (is_syntax) {
            delta.notes.push_back("the reply does not fit the template's format: part of it is passed on as text");
        }
    }
}

static void hand_out(const reply_delta & delta, char ** text, size_t * n_text) {
    if (delta.empty()) {
        *text   = nullptr;
        *n_text = 0;
        return;
    }
    common_json json = common_json::object();
    if (!delta.reasoning.empty()) {
        json["reasoning"] = delta.reasoning;
    }
    if (!delta.content.empty()) {
        json["content"] = delta.content;
    }
    if (!delta.calls.empty()) {
        json["calls"] = delta.calls;
    }
    if (!delta.notes.empty()) {
        json["notes"] = delta.notes;
    }
    kvmem_guard_hand_out(json.dump_safe(), text, n_text);
}

static common_json describe(const common_chat_params & params, const llama_vocab * vocab) {
    common_params_sampling sampling;
    sampling.grammar_lazy = params.grammar_lazy;
    common_sampling_add_preserved_tokens(sampling, vocab, params.preserved_tokens);
    common_sampling_add_grammar_triggers(sampling, vocab, params.grammar_triggers);
    common_json triggers = common_json::array();
    for (const auto & trigger : sampling.grammar_triggers) {
        common_json item = common_json::object();
        item["type"]     = (int) trigger.type;
        item["value"]    = trigger.value;
        item["token"]    = trigger.token;
        triggers.push_back(item);
    }
    common_json result  = kvmem_chat_result(params);
    result["triggers"]  = triggers;
    result["preserved"] = std::vector<int>(sampling.preserved_tokens.begin(), sampling.preserved_tokens.end());
    return result;
}

int kvmem_reply_init(const kvmem_chat * chat, const struct llama_model * model, const char * request, size_t n_request,
        kvmem_reply ** out, char ** text, size_t * n_text) {
    return kvmem_guard([&] {
        kvmem_guard_silence_log();
        common_chat_params  params = kvmem_chat_apply(*chat, std::string(request, n_request));
        const llama_vocab * vocab  = llama_model_get_vocab(model);
        if (!params.grammar.empty()) {
            try {
                kvmem_grammar_require(vocab, params.grammar);
            } catch (const kvmem_invalid & e) {
                throw kvmem_invalid(std::string("its grammar cannot be used: ") + e.what());
            }
        }
        auto reply     = std::make_unique<kvmem_reply>();
        reply->format  = params.format;
        reply->markers = params.preserved_tokens;
        for (const auto & trigger : params.grammar_triggers) {
            if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
                reply->markers.push_back(trigger.value);
            }
        }
        for (const auto & end : params.thinking_end_tags) {
            const bool opens_a_call = std::any_of(params.grammar_triggers.begin(), params.grammar_triggers.end(),
                    [&](const common_grammar_trigger & trigger) { return trigger.value == end; });
            if (!opens_a_call) {
                reply->thinking_ends.push_back(trimmed_left(end));
            }
        }
        common_json result = describe(params, vocab);
        reply->input       = params.generation_prompt;
        reply->n_prompt    = reply->input.size();
        reply->parser      = std::move(params.parser);
        if (reply->parser.empty()) {
            reply->is_plain = true;
            reply->input.clear();
        } else {
            reply->sent = parse(*reply, reply->n_prompt).msg; // a message that is continued was sent before
        }
        reply->n_fitting = reply->n_prompt;
        kvmem_guard_hand_out(result.dump_safe(), text, n_text);
        *out = reply.release();
    });
}

int kvmem_reply_clone(const kvmem_reply * reply, kvmem_reply ** out) {
    return kvmem_guard([&] { *out = new kvmem_reply(*reply); });
}

void kvmem_reply_free(kvmem_reply * reply) {
    delete reply;
}

int kvmem_reply_feed(kvmem_reply * reply, const char * text, size_t n_text, char ** delta, size_t * n_delta) {
    return kvmem_guard([&] {
        if (reply->is_finished) {
            throw kvmem_invalid("the reply is finished");
        }
        reply_delta added;
        if (reply->is_plain) {
            add_content(*reply, std::string(text, n_text), added);
        } else {
            append(*reply, std::string(text, n_text), added);
        }
        hand_out(added, delta, n_delta);
    });
}

int kvmem_reply_finish(kvmem_reply * reply, enum kvmem_reply_ending ending, char ** delta, size_t * n_delta) {
    return kvmem_guard([&] {
        if (reply->is_finished) {
            throw kvmem_invalid("the reply is finished");
        }
        reply->is_finished = true;
        reply_delta added;
        if (!reply->is_plain) {
            const parsed_reply parsed = parse(*reply, reply->input.size());
            if (!parsed.fits) {
                go_plain(*reply, added);
            } else {
                add_message(*reply, parsed.msg, /* is_last= */ true, added);
                add_rest(*reply, parsed, ending, added);
            }
        }
        hand_out(added, delta, n_delta);
    });
}
