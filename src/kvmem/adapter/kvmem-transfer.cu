// The CUDA way: one copy a payload into (or out of) staging buffers, and a kernel that scatters (or gathers) its
// pieces. Per-piece copies reach half the rate of the link, and cost the submitting thread 20 times as much
// (docs/gpu.md).
#include "kvmem-transfer.h"

#include "kvmem.h"

#include "ggml-backend.h"
#include "llama-impl.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace {

constexpr size_t   most_staging_bytes = 64ull << 20; // two of these; larger ones were no faster
constexpr uint32_t n_lanes            = 2;
constexpr uint32_t n_bounces          = 4; // pinned payloads on the way from and to plain memory
constexpr int      n_threads          = 256;

// tests: which of the calls from here on fail; none of them while n is 0
struct {
    uint32_t n     = 0;
    uint32_t count = 0;
    bool     loses = false;
} faults;

__global__ void trap() {
    __trap();
}

// whether a test wants the next call to fail; cudaSuccess if not
cudaError_t next_fault() {
    if (faults.n == 0 || --faults.n > 0) {
        return cudaSuccess;
    }
    faults.n = --faults.count > 0 ? 1 : 0; // the next one fails, too
    if (!faults.loses) {
        return cudaErrorMemoryAllocation;
    }
    trap<<<1, 1>>>();
    return cudaDeviceSynchronize();
}

// a call that tests can let fail: then it is not made
template <typename F>
cudaError_t attempt(F && call) {
    const cudaError_t fault = next_fault();
    return fault == cudaSuccess ? call() : fault;
}

#define ATTEMPT(call) attempt([&] { return call; })

// an error that stays when it was read belongs to the device, not to the call
bool is_device_lost() {
    cudaGetLastError();
    return cudaDeviceSynchronize() != cudaSuccess;
}

void check(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        throw kvmem_transfer_error(std::string(what) + ": " + cudaGetErrorString(status), is_device_lost());
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
    // one stream with its own staging buffer: while one copies, the other scatters
    struct lane_t {
        uint8_t *    staging = nullptr;
        int32_t *    d_slots = nullptr;
        int32_t *    h_slots = nullptr;
        cudaStream_t stream  = nullptr;
    };

    // a pinned payload, and what it still has to be copied to
    struct bounce_t {
        uint8_t *   data   = nullptr;
        uint8_t *   target = nullptr;
        cudaEvent_t done   = nullptr;
        bool        busy   = false;
    };

    cuda_transfer(const std::vector<kvmem_piece> & pieces, int device, uint32_t n_slots, const kvmem_slabs & slabs)
        : device(device), n_slots(n_slots), base(pieces[0].offset), n_pieces((unsigned) pieces.size()), slabs(slabs) {
        try {
            init(pieces);
        } catch (...) {
            release();
            throw;
        }
    }

    ~cuda_transfer() override { release(); }

    void init(const std::vector<kvmem_piece> & pieces) {
        check(ATTEMPT(cudaSetDevice(device)), "no CUDA device");
        std::vector<device_piece> table;
        for (const auto & piece : pieces) {
            table.push_back({ (uint8_t *) piece.tensor->data, piece.bytes, piece.offset - base });
            payload_bytes += piece.bytes;
        }
        check(ATTEMPT(cudaMalloc(&d_pieces, table.size() * sizeof(device_piece))), "piece table");
        check(ATTEMPT(cudaMemcpy(d_pieces, table.data(), table.size() * sizeof(device_piece), cudaMemcpyHostToDevice)),
                "piece table");
        // the lanes' streams wait for no other, and a copy from plain memory may still be on its way
        check(ATTEMPT(cudaStreamSynchronize(cudaStreamLegacy)), "piece table");
        for (auto & lane : lanes) {
            check(ATTEMPT(cudaMalloc(&lane.d_slots, n_slots * sizeof(int32_t))), "slot numbers");
            check(ATTEMPT(cudaMallocHost(&lane.h_slots, n_slots * sizeof(int32_t))), "pinned slot numbers");
            check(ATTEMPT(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking)), "stream");
        }
        // a device that is nearly full gets smaller buffers
        const auto wanted =
                (uint32_t) std::max<size_t>(1, std::min<size_t>(most_staging_bytes / payload_bytes, n_slots));
        per_staging = wanted;
        while (!alloc_staging()) {
            if (per_staging == 1) {
                throw kvmem_transfer_error("staging buffers: out of memory");
            }
            per_staging /= 2;
        }
        if (per_staging < wanted) {
            LLAMA_LOG_WARN("kvmem: CUDA device %d is nearly full: staging buffers of %u blocks in place of %u\n",
                    device, per_staging, wanted);
        }
        alloc_bounces();
    }

    void release() {
        cudaSetDevice(device);
        for (auto & lane : lanes) {
            if (lane.stream) {
                cudaStreamSynchronize(lane.stream);
                cudaStreamDestroy(lane.stream);
            }
            cudaFree(lane.staging);
            cudaFree(lane.d_slots);
            cudaFreeHost(lane.h_slots);
        }
        free_bounces();
        cudaFree(d_pieces);
    }

    const char * name() const override { return "cuda"; }

    void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) override {
        start(slots, n);
        for (uint32_t begin = 0, turn = 0; begin < n; begin += per_staging, ++turn) {
            auto &         lane  = lanes[turn % n_lanes];
            const uint32_t count = std::min(per_staging, n - begin);
            for (uint32_t i = 0; i < count; ++i) {
                copy_in(lane, payloads[begin + i], lane.staging + i * payload_bytes);
            }
            launch<true>(lane, begin, count);
        }
    }

    void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n) override {
        try {
            start(slots, n);
            for (uint32_t begin = 0, turn = 0; begin < n; begin += per_staging, ++turn) {
                auto &         lane  = lanes[turn % n_lanes];
                const uint32_t count = std::min(per_staging, n - begin);
                launch<false>(lane, begin, count);
                for (uint32_t i = 0; i < count; ++i) {
                    copy_out(lane, lane.staging + i * payload_bytes, payloads[begin + i]);
                }
            }
        } catch (const kvmem_transfer_error &) {
            drain();
            throw;
        }
        wait();
    }

    void move(int32_t source, int32_t target) override {
        const int32_t slots[] = { source, target };
        try {
            start(slots, 2);
            launch<false>(lanes[0], 0, 1);
            launch<true>(lanes[0], 1, 1);
        } catch (const kvmem_transfer_error &) {
            drain();
            throw;
        }
        wait();
    }

    void wait() override { check(drain(), "copy of blocks"); }

    kvmem_ceiling measure_ceiling() override {
        constexpr int n_copies = 16;
        const size_t  bytes    = per_staging * payload_bytes;
        auto &        lane     = lanes[0];
        const auto    pinned   = kvmem_pinned_alloc(bytes);
        if (!pinned.data) {
            throw kvmem_transfer_error("no pinned memory to measure with");
        }
        double rates[2] = {};
        for (bool to_device : { true, false }) {
            for (int round = 0; round < 3; ++round) {
                const auto  start  = std::chrono::steady_clock::now();
                cudaError_t failed = cudaSuccess;
                for (int i = 0; i < n_copies; ++i) {
                    void *            target = to_device ? lane.staging : pinned.data;
                    void *            source = to_device ? pinned.data : lane.staging;
                    const cudaError_t queued = cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, lane.stream);
                    failed                   = failed == cudaSuccess ? queued : failed;
                }
                const cudaError_t drained = drain();
                const cudaError_t status  = failed == cudaSuccess ? drained : failed;
                if (status != cudaSuccess) {
                    kvmem_pinned_free(pinned);
                    check(status, "plain copy");
                }
                const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
                rates[to_device] = std::max(rates[to_device], n_copies * bytes / spent.count());
            }
        }
        kvmem_pinned_free(pinned);
        return { rates[1], rates[0] };
    }

  private:
    // the slot numbers go to both lanes; nothing is in flight
    void start(const int32_t * slots, uint32_t n) {
        if (n > n_slots) {
            throw kvmem_transfer_error("more blocks than the cache has slots");
        }
        check(ATTEMPT(cudaSetDevice(device)), "no CUDA device");
        for (auto & lane : lanes) {
            memcpy(lane.h_slots, slots, n * sizeof(int32_t));
            check(ATTEMPT(cudaMemcpyAsync(
                          lane.d_slots, lane.h_slots, n * sizeof(int32_t), cudaMemcpyHostToDevice, lane.stream)),
                    "slot numbers");
        }
    }

    template <bool to_cache>
    void launch(lane_t & lane, uint32_t begin, uint32_t n) {
        copy_pieces<to_cache><<<dim3(n, n_pieces), n_threads, 0, lane.stream>>>(
                d_pieces, lane.d_slots + begin, lane.staging, payload_bytes);
        check(ATTEMPT(cudaGetLastError()), "scatter kernel");
    }

    void copy_in(lane_t & lane, const uint8_t * payload, uint8_t * staging) {
        const uint8_t * source = payload + base;
        if (!has_bounces || slabs.is_pinned(payload)) {
            check(ATTEMPT(cudaMemcpyAsync(staging, source, payload_bytes, cudaMemcpyHostToDevice, lane.stream)),
                    "copy to the device");
            return;
        }
        auto & bounce = next_bounce();
        memcpy(bounce.data, source, payload_bytes);
        check(ATTEMPT(cudaMemcpyAsync(staging, bounce.data, payload_bytes, cudaMemcpyHostToDevice, lane.stream)),
                "copy to the device");
        mark(bounce, lane);
    }

    void copy_out(lane_t & lane, const uint8_t * staging, uint8_t * payload) {
        uint8_t * target = payload + base;
        if (!has_bounces || slabs.is_pinned(payload)) {
            check(ATTEMPT(cudaMemcpyAsync(target, staging, payload_bytes, cudaMemcpyDeviceToHost, lane.stream)),
                    "copy to the host");
            return;
        }
        auto & bounce = next_bounce();
        check(ATTEMPT(cudaMemcpyAsync(bounce.data, staging, payload_bytes, cudaMemcpyDeviceToHost, lane.stream)),
                "copy to the host");
        mark(bounce, lane);
        bounce.target = target;
    }

    // the oldest one, once its copy is done
    bounce_t & next_bounce() {
        auto & bounce = bounces[turn++ % n_bounces];
        settle(bounce);
        return bounce;
    }

    void mark(bounce_t & bounce, const lane_t & lane) {
        check(ATTEMPT(cudaEventRecord(bounce.done, lane.stream)), "copy through a pinned buffer");
        bounce.busy = true;
    }

    void settle(bounce_t & bounce) {
        if (bounce.busy) {
            bounce.busy = false;
            check(ATTEMPT(cudaEventSynchronize(bounce.done)), "copy through a pinned buffer");
        }
        if (bounce.target) {
            memcpy(bounce.target, bounce.data, payload_bytes);
            bounce.target = nullptr;
        }
    }

    // waits for all that is queued; the first error, which is then no longer pending
    cudaError_t drain() {
        cudaError_t first = cudaSetDevice(device);
        for (auto & lane : lanes) {
            const cudaError_t status = cudaStreamSynchronize(lane.stream); // in any case
            const cudaError_t fault  = next_fault();
            first                    = first == cudaSuccess ? (fault == cudaSuccess ? status : fault) : first;
        }
        for (auto & bounce : bounces) {
            bounce.busy = false; // its stream is idle
            if (first == cudaSuccess && bounce.target) {
                memcpy(bounce.target, bounce.data, payload_bytes);
            }
            bounce.target = nullptr;
        }
        return first;
    }

    bool alloc_staging() {
        for (auto & lane : lanes) {
            if (ATTEMPT(cudaMalloc(&lane.staging, per_staging * payload_bytes)) != cudaSuccess) {
                cudaGetLastError();
                for (auto & any : lanes) {
                    cudaFree(any.staging);
                    any.staging = nullptr;
                }
                return false;
            }
        }
        return true;
    }

    // without them plain memory is copied by the driver's own staging
    void alloc_bounces() {
        for (auto & bounce : bounces) {
            if (ATTEMPT(cudaMallocHost(&bounce.data, payload_bytes)) != cudaSuccess ||
                    ATTEMPT(cudaEventCreateWithFlags(&bounce.done, cudaEventDisableTiming)) != cudaSuccess) {
                cudaGetLastError();
                free_bounces();
                LLAMA_LOG_WARN("kvmem: no pinned memory for staging; plain memory is copied by the driver\n");
                return;
            }
        }
        has_bounces = true;
    }

    void free_bounces() {
        for (auto & bounce : bounces) {
            cudaFreeHost(bounce.data);
            if (bounce.done) {
                cudaEventDestroy(bounce.done);
            }
            bounce = {};
        }
    }

    const int           device;
    const uint32_t      n_slots;
    const size_t        base;              // where the pieces begin in a payload
    size_t              payload_bytes = 0; // of these pieces
    const unsigned      n_pieces;
    const kvmem_slabs & slabs;

    device_piece * d_pieces    = nullptr;
    uint32_t       per_staging = 1;
    lane_t         lanes[n_lanes];
    bounce_t       bounces[n_bounces];
    bool           has_bounces = false;
    uint32_t       turn        = 0;
};

} // namespace

int kvmem_cuda_fail(uint32_t n, uint32_t count, int loses_device) {
    const bool is_waiting = faults.n > 0;
    faults                = { n, count, loses_device != 0 };
    return is_waiting;
}

int kvmem_cuda_device(const kvmem_piece & piece) {
    cudaPointerAttributes attributes = {};
    if (ggml_backend_buffer_is_host(piece.tensor->buffer)) {
        return -1;
    }
    if (cudaPointerGetAttributes(&attributes, piece.tensor->data) != cudaSuccess) {
        cudaGetLastError();
        return -1;
    }
    // the kernel moves 16 bytes at a time
    const bool fits = piece.bytes % sizeof(uint4) == 0 && piece.offset % sizeof(uint4) == 0;
    return fits && attributes.type == cudaMemoryTypeDevice ? attributes.device : -1;
}

std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(
        const std::vector<kvmem_piece> & pieces, int device, uint32_t n_slots, const kvmem_slabs & slabs) {
    try {
        return std::make_unique<cuda_transfer>(pieces, device, n_slots, slabs);
    } catch (const kvmem_transfer_error & e) {
        LLAMA_LOG_WARN(
                "kvmem: blocks are copied by ggml, at a fraction of the rate: CUDA device %d: %s\n", device, e.what());
        return nullptr;
    }
}

// Registering memory of huge pages is several times as fast as cudaHostAlloc, which remains for systems that cannot.
// A fork would copy what is pinned.
kvmem_pinned kvmem_pinned_alloc(size_t bytes) {
    void * data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data != MAP_FAILED) {
        madvise(data, bytes, MADV_HUGEPAGE);
        madvise(data, bytes, MADV_DONTFORK);
        if (ATTEMPT(cudaHostRegister(data, bytes, cudaHostRegisterPortable)) == cudaSuccess) {
            return { (uint8_t *) data, bytes, true };
        }
        cudaGetLastError();
        munmap(data, bytes);
    }
    if (ATTEMPT(cudaHostAlloc(&data, bytes, cudaHostAllocPortable)) != cudaSuccess) {
        cudaGetLastError();
        return {};
    }
    return { (uint8_t *) data, bytes, false };
}

void kvmem_pinned_free(const kvmem_pinned & pinned) {
    if (pinned.is_registered) {
        cudaHostUnregister(pinned.data); // on a lost device it fails, and the mapping goes all the same
        munmap(pinned.data, pinned.bytes);
    } else {
        cudaFreeHost(pinned.data);
    }
    cudaGetLastError();
}
