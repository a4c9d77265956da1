#include "kvmem-slabs.h"

#include "llama-impl.h"

#include <sys/mman.h>
#include <unistd.h>

constexpr size_t page_bytes = 4096;

kvmem_slabs::kvmem_slabs(bool pin)
    : pin(pin), pinned_limit((size_t) sysconf(_SC_PHYS_PAGES) * (size_t) sysconf(_SC_PAGESIZE) / 2) {}

uint8_t * kvmem_slabs::alloc(size_t bytes) {
    uint8_t * base   = nullptr;
    bool      pinned = false;
    if (pin && n_pinned + bytes <= pinned_limit) {
        base   = kvmem_pinned_alloc(bytes + page_bytes); // small ones do not begin at a page
        pinned = base != nullptr;
    }
    if (!base) {
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
        base = (uint8_t *) mapped;
    }
    (pinned ? n_pinned : n_plain) += bytes;
    uint8_t * data = (uint8_t *) (((uintptr_t) base + page_bytes - 1) / page_bytes * page_bytes);
    slabs[data]    = { base, bytes, pinned };
    return data;
}

void kvmem_slabs::free(uint8_t * data) {
    const auto found = slabs.find(data);
    if (found == slabs.end()) {
        return;
    }
    const slab gone = found->second;
    slabs.erase(found);
    (gone.pinned ? n_pinned : n_plain) -= gone.bytes;
    if (gone.pinned) {
        kvmem_pinned_free(gone.base, gone.bytes + page_bytes);
    } else {
        munmap(gone.base, gone.bytes);
    }
}

bool kvmem_slabs::is_pinned(const uint8_t * data) const {
    auto after = slabs.upper_bound((uint8_t *) data);
    return after != slabs.begin() && (--after)->second.pinned && data < after->first + after->second.bytes;
}

#ifndef KVMEM_CUDA
uint8_t * kvmem_pinned_alloc(size_t) {
    return nullptr;
}

void kvmem_pinned_free(uint8_t *, size_t) {}
#endif
