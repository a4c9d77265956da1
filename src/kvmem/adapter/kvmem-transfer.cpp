#include "kvmem-transfer.h"

#include "ggml-backend.h"

#include <algorithm>
#include <unordered_map>

#include <sys/mman.h>

namespace {

struct generic_transfer : kvmem_transfer {
    explicit generic_transfer(std::vector<kvmem_piece> p) : pieces(std::move(p)) {
        size_t largest = 0;
        for (const auto & piece : pieces) {
            largest = std::max(largest, piece.bytes);
        }
        scratch.resize(largest);
    }

    const char * name() const override { return "generic"; }

    void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            for (const auto & piece : pieces) {
                ggml_backend_tensor_get(piece.tensor, payloads[i] + piece.offset, slots[i] * piece.bytes, piece.bytes);
            }
        }
    }

    void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            for (const auto & piece : pieces) {
                ggml_backend_tensor_set(piece.tensor, payloads[i] + piece.offset, slots[i] * piece.bytes, piece.bytes);
            }
        }
    }

    void move(int32_t source, int32_t target) override {
        for (const auto & piece : pieces) {
            ggml_backend_tensor_get(piece.tensor, scratch.data(), source * piece.bytes, piece.bytes);
            ggml_backend_tensor_set(piece.tensor, scratch.data(), target * piece.bytes, piece.bytes);
        }
    }

    // from the system: freed slabs would stay in the arenas of whichever threads had asked for them
    uint8_t * host_alloc(size_t bytes) override {
        void * data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) {
            return nullptr;
        }
        mapped[data] = bytes;
        return (uint8_t *) data;
    }

    void host_free(uint8_t * data) override {
        auto entry = mapped.find(data);
        if (entry != mapped.end()) {
            munmap(data, entry->second);
            mapped.erase(entry);
        }
    }

    std::vector<kvmem_piece> pieces;
    std::vector<uint8_t>     scratch; // one piece, for moves

    std::unordered_map<void *, size_t> mapped; // host memory that is lent, and its bytes
};

} // namespace

std::unique_ptr<kvmem_transfer> kvmem_transfer_generic(std::vector<kvmem_piece> pieces) {
    return std::make_unique<generic_transfer>(std::move(pieces));
}

#ifndef KVMEM_CUDA
std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(std::vector<kvmem_piece>) {
    return nullptr;
}
#endif
