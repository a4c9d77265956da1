#include "kvmem-slabs.h"

#include "llama-impl.h"

#include <sys/mman.h>
#include <unistd.h>

constexpr size_t page_bytes = 4096;

kvmem_slabs::kvmem_slabs(bool pin)
    : pin(pin), pinned_limit((size_t) sysconf(_SC_PHYS_PAGES) * (size_t) sysconf(_SC_PAGESIZE) / 2) {}

uint8_t * kvmem_slabs::alloc(size_t bytes) {
    const std::lock_guard lock(mutex);
    kvmem_pinned          pinned;
    uint8_t *             data = nullptr;
    if (pin && n_pinned + bytes <= pinned_limit) {
        pinned = kvmem_pinned_alloc(bytes + page_bytes); // small ones do not begin at a page
        data   = (uint8_t *) (((uintptr_t) pinned.data + page_bytes - 1) / page_bytes * page_bytes);
    }
    if (!data) {
        if (pin && !has_warned) {
            has_warned = true;
            LLAMA_LOG_WARN(
                    "kvmem: %.1f GiB of the block store are pinned and %s; the rest is plain memory, which is copied "
                    "to and from the GPU at a fraction of the rate\n",
                    n_pinned / 1073741824.0,
                    n_pinned + bytes > pinned_limit ? "the limit is reached" : "the system gives no more");
        }
        void * mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) {
            return nullptr;
        }
        data = (uint8_t *) mapped;
    }
    (pinned.data ? n_pinned : n_plain) += bytes;
    slabs[data] = { bytes, pinned };
    return data;
}

void kvmem_slabs::free(uint8_t * data) {
    const std::lock_guard lock(mutex);
    const auto            found = slabs.find(data);
    if (found == slabs.end()) {
        return;
    }
    const slab gone = found->second;
    slabs.erase(found);
    (gone.pinned.data ? n_pinned : n_plain) -= gone.bytes;
    if (gone.pinned.data) {
        kvmem_pinned_free(gone.pinned);
    } else {
        munmap(data, gone.bytes);
    }
}

bool kvmem_slabs::is_pinned(const uint8_t * data) const {
    const std::lock_guard lock(mutex);
    auto                  after = slabs.upper_bound((uint8_t *) data);
    return after != slabs.begin() && (--after)->second.pinned.data && data < after->first + after->second.bytes;
}

void kvmem_slabs::limit_pinned(size_t bytes) {
    const std::lock_guard lock(mutex);
    pinned_limit = bytes;
}

void kvmem_slabs::count(size_t * pinned, size_t * plain) const {
    const std::lock_guard lock(mutex);
    *pinned = n_pinned;
    *plain  = n_plain;
}

#ifndef KVMEM_CUDA
kvmem_pinned kvmem_pinned_alloc(size_t) {
    return {};
}

void kvmem_pinned_free(const kvmem_pinned &) {}
#endif
