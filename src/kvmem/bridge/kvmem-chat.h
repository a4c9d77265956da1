// A parsed chat template, as the parts of the bridge that use it see it.
#pragma once

#include "kvmem-bridge.h"

#include "chat.h"
#include "json.h"

#include <string>

struct kvmem_chat {
    common_chat_templates_ptr templates;
};

// Apply the template to a request of kvmem_chat_render. Throws kvmem_invalid where the request breaks a rule, and what
// llama-common throws where the template refuses it.
common_chat_params kvmem_chat_apply(const kvmem_chat & chat, const std::string & request);

// the result of kvmem_chat_render
common_json kvmem_chat_result(const common_chat_params & params);
