// Copies of block payloads between the host and the cache tensors.
#pragma once

#include "kvmem-slabs.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// K or V of one layer: a slot's rows are `bytes` at `slot * bytes` in the tensor and at `offset` in the payload
struct kvmem_piece {
    ggml_tensor * tensor;
    size_t        bytes;
    size_t        offset;
};

// lost: the device will do nothing more in this process
struct kvmem_transfer_error : std::runtime_error {
    explicit kvmem_transfer_error(const std::string & what, bool lost = false) : std::runtime_error(what), lost(lost) {}

    bool lost;
};

// bytes per second of one large plain copy to the rows' device and from it: what no way can exceed
struct kvmem_ceiling {
    double in;
    double out;
};

// One way to move payloads. A failed call throws kvmem_transfer_error.
// The caller has synchronised the context before. At most as many blocks go at a time as the cache has slots.
struct kvmem_transfer {
    virtual ~kvmem_transfer() = default;

    virtual const char * name() const = 0;

    // set() may return before the bytes are there. wait() must follow, after an error too, before payloads change and
    // before anything reads the rows.
    virtual void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) = 0;
    virtual void wait()                                                                   = 0;

    // done when they return
    virtual void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n) = 0;
    virtual void move(int32_t source, int32_t target)                               = 0;

    virtual kvmem_ceiling measure_ceiling() = 0;
};

// The fastest way for these tensors, each device's layers by its own: "cuda", "generic", or "cuda+generic" where some
// layers are elsewhere. `slabs` is where payloads lie and outlives the transfer.
std::unique_ptr<kvmem_transfer> kvmem_transfer_make(
        const std::vector<kvmem_piece> & pieces, uint32_t n_slots, const kvmem_slabs & slabs);

// any backend, by ggml's synchronous tensor copies
std::unique_ptr<kvmem_transfer> kvmem_transfer_generic(const std::vector<kvmem_piece> & pieces);

// the CUDA device that the kernel can reach these rows on; -1 for none, and in a build without CUDA
int kvmem_cuda_device(const kvmem_piece & piece);

// Whole payloads through staging buffers, scattered and gathered by a kernel. The pieces lie on `device`, one behind
// the other in the payload. Null, and a line in the log, if the device has no memory for the buffers.
std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(
        const std::vector<kvmem_piece> & pieces, int device, uint32_t n_slots, const kvmem_slabs & slabs);
