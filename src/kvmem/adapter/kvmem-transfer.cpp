#include "kvmem-transfer.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>

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

    uint8_t * host_alloc(size_t bytes) override {
        constexpr size_t page = 4096;
        return (uint8_t *) std::aligned_alloc(page, (bytes + page - 1) / page * page);
    }

    void host_free(uint8_t * data) override { std::free(data); }

    std::vector<kvmem_piece> pieces;
    std::vector<uint8_t>     scratch; // one piece, for moves
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
