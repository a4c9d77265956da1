// Log lines of llama.cpp and ggml, kept until the bindings fetch them: they come from any thread, and none of those may
// enter Python.
#include "kvmem.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

namespace {

struct line {
    int         level;
    std::string text;
};

constexpr size_t max_lines = 2000; // a load prints some 400

std::mutex       mutex;
std::deque<line> lines;
bool             line_open = false;

void collect(ggml_log_level level, const char * text, void *) {
    std::lock_guard<std::mutex> lock(mutex);
    // a line can come in pieces, the later ones with the level CONT
    if (!line_open || level != GGML_LOG_LEVEL_CONT) {
        lines.push_back({ level, "" });
        if (lines.size() > max_lines) {
            lines.pop_front();
        }
    }
    auto & last = lines.back().text;
    last += text;
    line_open = last.empty() || last.back() != '\n';
    while (!last.empty() && last.back() == '\n') {
        last.pop_back();
    }
}

} // namespace

void kvmem_log_install(void) {
    llama_log_set(collect, nullptr);
}

size_t kvmem_log_take(char * text, size_t size, int * level) {
    std::lock_guard<std::mutex> lock(mutex);
    if (lines.empty() || size == 0) {
        return 0;
    }
    const line first = std::move(lines.front());
    lines.pop_front();
    if (lines.empty()) {
        line_open = false;
    }
    const size_t n = std::min(first.text.size(), size - 1);
    memcpy(text, first.text.data(), n);
    text[n] = '\0';
    *level  = first.level;
    return n + 1;
}
