#include "kvmem-guard.h"

#include "build-info.h"
#include "log.h"

#include <cstdlib>
#include <cstring>

// fixed, so that reporting an error can not fail for want of memory
static thread_local char last_error[1024];

void kvmem_guard_set_error(const char * text) noexcept {
    std::strncpy(last_error, text, sizeof(last_error) - 1);
    last_error[sizeof(last_error) - 1] = '\0';
}

void kvmem_guard_hand_out(const std::string & text, char ** out, size_t * n_out) {
    char * copy = (char *) std::malloc(text.size() + 1);
    if (copy == nullptr) {
        throw std::bad_alloc();
    }
    std::memcpy(copy, text.data(), text.size());
    copy[text.size()] = '\0';
    *out              = copy;
    *n_out            = text.size();
}

void kvmem_guard_silence_log() noexcept {
    static const bool once = [] {
        common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT - 1);
        return true;
    }();
    (void) once;
}

int kvmem_bridge_build_number(void) {
    return llama_build_number();
}

const char * kvmem_bridge_last_error(void) {
    return last_error;
}

void kvmem_bridge_text_free(char * text) {
    std::free(text);
}
