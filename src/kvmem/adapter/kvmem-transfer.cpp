#include "kvmem-transfer.h"

#include "kvmem.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>

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

    void wait() override {}

    void move(int32_t source, int32_t target) override {
        for (const auto & piece : pieces) {
            ggml_backend_tensor_get(piece.tensor, scratch.data(), source * piece.bytes, piece.bytes);
            ggml_backend_tensor_set(piece.tensor, scratch.data(), target * piece.bytes, piece.bytes);
        }
    }

    kvmem_ceiling measure_ceiling() override {
        constexpr size_t     n = 128ull << 20; // more than any cache
        std::vector<uint8_t> from(n, 1), to(n, 2);
        double               best = 0;
        for (int i = 0; i < 5; ++i) {
            const auto start = std::chrono::steady_clock::now();
            memcpy(to.data(), from.data(), n);
            const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
            from[0] += to[n / 2]; // so that no copy can be left out
            best = std::max(best, n / spent.count());
        }
        return { best, best };
    }

    std::vector<kvmem_piece> pieces;
    std::vector<uint8_t>     scratch; // one piece, for moves
};

// layers on several devices: each part copies its own bytes of every payload
struct split_transfer : kvmem_transfer {
    explicit split_transfer(std::vector<std::unique_ptr<kvmem_transfer>> p) : parts(std::move(p)) {
        bool all_equal = true;
        for (const auto & part : parts) {
            all_equal = all_equal && std::string(part->name()) == parts[0]->name();
        }
        text = all_equal ? parts[0]->name() : "cuda+generic";
    }

    const char * name() const override { return text; }

    void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n) override {
        for (auto & part : parts) {
            part->get(slots, payloads, n);
        }
    }

    // the last parts copy on the calling thread, so those that only queue go first
    void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) override {
        for (auto & part : parts) {
            part->set(slots, payloads, n);
        }
    }

    void wait() override {
        std::unique_ptr<kvmem_transfer_error> error;
        for (auto & part : parts) {
            try {
                part->wait();
            } catch (const kvmem_transfer_error & e) {
                if (!error || e.lost) {
                    error = std::make_unique<kvmem_transfer_error>(e);
                }
            }
        }
        if (error) {
            throw *error;
        }
    }

    void move(int32_t source, int32_t target) override {
        for (auto & part : parts) {
            part->move(source, target);
        }
    }

    // of the first device
    kvmem_ceiling measure_ceiling() override { return parts[0]->measure_ceiling(); }

    std::vector<std::unique_ptr<kvmem_transfer>> parts;
    const char *                                 text;
};

} // namespace

std::unique_ptr<kvmem_transfer> kvmem_transfer_generic(const std::vector<kvmem_piece> & pieces) {
    return std::make_unique<generic_transfer>(pieces);
}

std::unique_ptr<kvmem_transfer> kvmem_transfer_make(
        const std::vector<kvmem_piece> & pieces, uint32_t n_slots, const kvmem_slabs & slabs) {
    std::vector<std::unique_ptr<kvmem_transfer>> parts;
    std::vector<kvmem_piece>                     others;
    for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
        const int device = kvmem_cuda_device(pieces[begin]);
        while (end < pieces.size() && kvmem_cuda_device(pieces[end]) == device) {
            ++end;
        }
        const std::vector<kvmem_piece> run(pieces.begin() + begin, pieces.begin() + end);

        auto part = device >= 0 ? kvmem_transfer_cuda(run, device, n_slots, slabs) : nullptr;
        if (part) {
            parts.push_back(std::move(part));
        } else {
            others.insert(others.end(), run.begin(), run.end());
        }
    }
    if (!others.empty()) {
        parts.push_back(kvmem_transfer_generic(others));
    }
    return parts.size() == 1 ? std::move(parts[0]) : std::make_unique<split_transfer>(std::move(parts));
}

#ifndef KVMEM_CUDA
int kvmem_cuda_fail(uint32_t, uint32_t, int) {
    return 0;
}

int kvmem_cuda_device(const kvmem_piece &) {
    return -1;
}

std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(
        const std::vector<kvmem_piece> &, int, uint32_t, const kvmem_slabs &) {
    return nullptr;
}
#endif
