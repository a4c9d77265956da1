// Copies of block payloads between the host and the cache tensors.
#pragma once

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

struct kvmem_transfer_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One way to move payloads. Nothing is queued when a call returns; a failed call throws kvmem_transfer_error.
// The caller has synchronised the context before.
struct kvmem_transfer {
    virtual ~kvmem_transfer() = default;

    virtual const char * name() const = 0;

    virtual void get(const int32_t * slots, uint8_t * const * payloads, uint32_t n)       = 0;
    virtual void set(const int32_t * slots, const uint8_t * const * payloads, uint32_t n) = 0;
    virtual void move(int32_t source, int32_t target)                                     = 0;

    // host memory that this way copies fast from and to; null if there is none
    virtual uint8_t * host_alloc(size_t bytes)  = 0;
    virtual void      host_free(uint8_t * data) = 0;
};

// any backend, by ggml's synchronous tensor copies
std::unique_ptr<kvmem_transfer> kvmem_transfer_generic(std::vector<kvmem_piece> pieces);

// whole payloads through staging buffers, scattered and gathered by a kernel;
// null in a build without CUDA, or if the tensors are not all on one CUDA device
std::unique_ptr<kvmem_transfer> kvmem_transfer_cuda(std::vector<kvmem_piece> pieces);
