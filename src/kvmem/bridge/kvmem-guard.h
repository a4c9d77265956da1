// What every function of the bridge does at its border: catch, keep the reason, hand out text.
#pragma once

#include "kvmem-bridge.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

// a broken rule of the caller's data, as against a failure of llama-common
struct kvmem_invalid : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void kvmem_guard_set_error(const char * text) noexcept;

// copies text into a buffer that kvmem_bridge_text_free releases
void kvmem_guard_hand_out(const std::string & text, char ** out, size_t * n_out);

// llama-common prints to stderr from a thread of its own; what matters comes back as a status and a reason
void kvmem_guard_silence_log() noexcept;

// runs body; turns what it throws into a status and a last error
template <typename F>
int kvmem_guard(F && body) noexcept {
    try {
        body();
        return KVMEM_BRIDGE_OK;
    } catch (const kvmem_invalid & e) {
        kvmem_guard_set_error(e.what());
        return KVMEM_BRIDGE_ERR_INVALID;
    } catch (const std::bad_alloc &) {
        kvmem_guard_set_error("out of memory");
        return KVMEM_BRIDGE_ERR_MEMORY;
    } catch (const std::exception & e) {
        kvmem_guard_set_error(e.what());
        return KVMEM_BRIDGE_ERR_FAILED;
    } catch (...) {
        kvmem_guard_set_error("unknown exception");
        return KVMEM_BRIDGE_ERR_FAILED;
    }
}
