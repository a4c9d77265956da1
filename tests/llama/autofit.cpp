// llama.cpp's own fitting of parameters, on the thread that calls: see test_placement.py.
// Compiled together with the pin's common/fit.cpp and common/json.cpp.
#include "../src/llama-ext.h"
#include "fit.h"
#include "log.h"

#include <stdexcept>
#include <vector>

// what fit.cpp wants of llama-common beside: a log, which nobody reads here
int common_log_get_verbosity_thold(void) {
    return -1;
}

bool common_log_get_jsonl(void) {
    return false;
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}

void common_log_add_json(common_log *, const char *, const common_json &) {}

static int n_asked;

static llama_memory_i * refuse(const llama_model &, const llama_memory_params &, const llama_cparams &, void *) {
    ++n_asked;
    throw std::runtime_error("a factory that was left armed");
}

#define API extern "C" __attribute__((visibility("default")))

// The context length to fit is left out, as llama-server leaves it. Returns a common_params_fit_status.
API int fit(const char * path) {
    auto mparams = llama_model_default_params();
    auto cparams = llama_context_default_params();

    cparams.n_ctx = 0;

    std::vector<float>                            split(llama_max_devices());
    std::vector<llama_model_tensor_buft_override> overrides(llama_max_tensor_buft_overrides());
    std::vector<size_t>                           margins(llama_max_devices());
    return common_fit_params(path, &mparams, &cparams, split.data(), overrides.data(), margins.data(), 256, nullptr,
            GGML_LOG_LEVEL_ERROR);
}

// The control: the same while a factory is armed. Returns how often it was asked.
API int fit_while_armed(const char * path) {
    n_asked = 0;
    llama_set_memory_factory(refuse, nullptr);
    const int status = fit(path);
    llama_set_memory_factory(nullptr, nullptr);
    return status == COMMON_PARAMS_FIT_STATUS_SUCCESS ? -1 : n_asked;
}
