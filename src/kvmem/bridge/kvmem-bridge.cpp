#include "kvmem-guard.h"

#include "build-info.h"
#include "log.h"

#include <cstdarg>
#include <cstdio>
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

// The linker puts these in place of fprintf, and of what _FORTIFY_SOURCE makes of it. llama-common writes to stderr
// what a schema's patterns are that it has no grammar for: a part of someone's prompt, which kvmem finds out and tells
// in its own way.
extern "C" int __wrap_fprintf(FILE * stream, const char * format, ...);
extern "C" int __wrap___fprintf_chk(FILE * stream, int flag, const char * format, ...);

static int print_elsewhere(FILE * stream, const char * format, va_list arguments) {
    return stream == stderr ? 0 : std::vfprintf(stream, format, arguments);
}

extern "C" int __wrap_fprintf(FILE * stream, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n_bytes = print_elsewhere(stream, format, arguments);
    va_end(arguments);
    return n_bytes;
}

extern "C" int __wrap___fprintf_chk(FILE * stream, int, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n_bytes = print_elsewhere(stream, format, arguments);
    va_end(arguments);
    return n_bytes;
}

const char * kvmem_bridge_last_error(void) {
    return last_error;
}

void kvmem_bridge_text_free(char * text) {
    std::free(text);
}
