// The CUDA way: one copy a payload into (or out of) staging buffers, and a kernel that scatters (or gathers) its
// pieces. Per-piece copies reach half the rate of the link, and cost the submitting thread 20 times as much
// (docs/gpu.md).
#include "kvmem-transfer.h"

#include "ggml-backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr size_t staging_bytes = 64ull << 20; // two of these; larger ones were no faster
constexpr int    n_staging     = 2;
constexpr int    n_threads     = 256;

void check(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        cudaGetLastError(); // a sticky error would be met again by the next, innocent, call
        throw kvmem_transfer_error(std::string(what) + ": " + cudaGetErrorString(status));
    }
}

struct device_piece {
    uint8_t * data;
    size_t    bytes;
    size_t    offset;
};

// grid: (payloads, pieces); 16 bytes a thread and step
template <bool to_cache>
__global__ void copy_pieces(
        const device_piece * pieces, const int32_t * slots, uint8_t * staging, size_t payload_bytes) {
    const device_piece piece  = pieces[blockIdx.y];
    uint8_t *          cache  = piece.data + slots[blockIdx.x] * piece.bytes;
    uint8_t *          packed = staging + blockIdx.x * payload_bytes + piece.offset;

    const size_t n   = piece.bytes / sizeof(uint4);
    auto *       dst = (uint4 *) (to_cache ? cache : packed);
    auto *       src = (const uint4 *) (to_cache ? packed : cache);
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        dst[i] = src[i];
    }
}

struct cuda_transfer : kvmem_transfer {
    cuda_transfer(std::vector<kvmem_piece> pieces, int device) : device(device) {
        check(cudaSetDevice(device), "no CUDA device");
        std::vector<device_piece> table;
        for (const auto & piece : pieces) {
            table.push_back({ (uint8_t *) piece.tensor->data, piece.bytes, piece.offset });
            payload_bytes = std::max(payload_bytes, piece.offset + piece.bytes);
        }
        n_pieces    = (unsigned) table.size();
        per_staging = (uint32_t) std::max<size_t>(1, staging_bytes / payload_bytes);
        check(cudaMalloc(&d_pieces, table.size() * sizeof(device_piece)), "no device memory for the piece table");
        check(cudaMemcpy(d_pieces, table.data(), table.size() * sizeof(device_piece), cudaMemcpyHostToDevice),
                "piece table");
        for (auto & lane : lanes) {
            check(cudaMalloc(&lane.staging, per_staging * payload_bytes), "no device memory for the staging buffers");
            check(cudaMalloc(&lane.d_slots, per_staging * sizeof(int32_t)), "no device memory for the staging buffers");
            check(cudaMallocHost(&lane.h_slots, per_staging * sizeof(int32_t)), "no pinned memory for slot numbers");
            check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "no CUDA stream");
        }
    }

    ~cuda_transfer() override {
        for (auto & lane : lanes) {
            if (lane.stream) {
                cudaStreamSynchronize(lane.stream);
                cudaStreamDestroy(lane.stream);
            }
            cudaFree(lane.staging);
            cudaFree(lane.d_slots);
            cudaFreeHost(lane.h_slots);
        }
        cudaFree(d_pieces);
    }

    const char * name() const override { return "cuda"; }

    void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n) override {
        run(n, [&](lane_t & lane, uint32_t begin, uint32_t count) {
            launch<false>(lane, slots + begin, count);
            for (uint32_t i = 0; i < count; ++i) {
                check(cudaMemcpyAsync(payloads[begin + i], lane.staging + i * payload_bytes, payload_bytes,
                              cudaMemcpyDeviceToHost, lane.stream),
                        "copy to the host");
            }
        });
    }

    void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) override {
        run(n, [&](lane_t & lane, uint32_t begin, uint32_t count) {
            for (uint32_t i = 0; i < count; ++i) {
                check(cudaMemcpyAsync(lane.staging + i * payload_bytes, payloads[begin + i], payload_bytes,
                              cudaMemcpyHostToDevice, lane.stream),
                        "copy to the device");
            }
            launch<true>(lane, slots + begin, count);
        });
    }

    void move(int32_t source, int32_t target) override {
        run(1, [&](lane_t & lane, uint32_t, uint32_t) {
            launch<false>(lane, &source, 1);
            check(cudaStreamSynchronize(lane.stream), "move of a block"); // the slot number's buffer is used again
            launch<true>(lane, &target, 1);
        });
    }

    uint8_t * host_alloc(size_t bytes) override {
        void * data = nullptr;
        if (cudaSetDevice(device) != cudaSuccess || cudaHostAlloc(&data, bytes, cudaHostAllocDefault) != cudaSuccess) {
            cudaGetLastError();
            return nullptr;
        }
        return (uint8_t *) data;
    }

    void host_free(uint8_t * data) override { cudaFreeHost(data); }

    struct lane_t {
        uint8_t *    staging = nullptr;
        int32_t *    d_slots = nullptr;
        int32_t *    h_slots = nullptr;
        cudaStream_t stream  = nullptr;
    };

    // alternates between the lanes, so that one copies while the other scatters; waits for both at the end, also on an
    // error
    template <typename F>
    void run(uint32_t n, F submit) {
        check(cudaSetDevice(device), "no CUDA device");
        std::string error;
        try {
            for (uint32_t begin = 0, turn = 0; begin < n; begin += per_staging, ++turn) {
                auto & lane = lanes[turn % n_staging];
                check(cudaStreamSynchronize(lane.stream), "copy of blocks");
                submit(lane, begin, std::min(per_staging, n - begin));
            }
        } catch (const kvmem_transfer_error & e) {
            error = e.what();
        }
        for (auto & lane : lanes) {
            const cudaError_t status = cudaStreamSynchronize(lane.stream);
            if (status != cudaSuccess && error.empty()) {
                cudaGetLastError();
                error = std::string("copy of blocks: ") + cudaGetErrorString(status);
            }
        }
        if (!error.empty()) {
            throw kvmem_transfer_error(error);
        }
    }

    template <bool to_cache>
    void launch(lane_t & lane, const int32_t * slots, uint32_t n) {
        memcpy(lane.h_slots, slots, n * sizeof(int32_t));
        check(cudaMemcpyAsync(lane.d_slots, lane.h_slots, n * sizeof(int32_t), cudaMemcpyHostToDevice, lane.stream),
                "slot numbers");
        copy_pieces<to_cache>
                <<<dim3(n, n_pieces), n_threads, 0, lane.stream>>>(d_pieces, lane.d_slots, lane.staging, payload_bytes);
        check(cudaGetLastError(), "scatter kernel");
    }

    int            device        = 0;
    size_t         payload_bytes = 0;
    unsigned       n_pieces      = 0;
    uint32_t       per_staging   = 1;
    device_piece * d_pieces      = nullptr;
    lane_t         lanes[n_staging];
};

} // namespace

std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(std::vector<kvmem_piece> pieces) {
    int device = -1;
    for (const auto & piece : pieces) {
        cudaPointerAttributes attributes = {};
        if (ggml_backend_buffer_is_host(piece.tensor->buffer) ||
                cudaPointerGetAttributes(&attributes, piece.tensor->data) != cudaSuccess ||
                attributes.type != cudaMemoryTypeDevice || (device >= 0 && attributes.device != device)) {
            cudaGetLastError();
            return nullptr;
        }
        // the kernel moves 16 bytes at a time
        if (piece.bytes % sizeof(uint4) != 0 || piece.offset % sizeof(uint4) != 0) {
            return nullptr;
        }
        device = attributes.device;
    }
    return std::make_unique<cuda_transfer>(std::move(pieces), device);
}
