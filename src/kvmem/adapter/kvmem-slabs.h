// Host memory for block records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

// Pinned memory of the CUDA build; without data there is none left.
struct kvmem_pinned {
    uint8_t * data          = nullptr;
    size_t    bytes         = 0;
    bool      is_registered = false; // it is our own mapping, made known to CUDA
};

kvmem_pinned kvmem_pinned_alloc(size_t bytes);
void         kvmem_pinned_free(const kvmem_pinned & pinned);

// Pinned beside a CUDA device, as far as the limit and the system allow; plain memory beyond, which is said once in the
// log. Plain memory is from the system: freed slabs would stay in the arenas of whichever threads had asked for them.
// Any thread may call; what is not freed before the end stays, as its holder may still look at it.
struct kvmem_slabs {
    kvmem_slabs(const kvmem_slabs &)             = delete;
    kvmem_slabs & operator=(const kvmem_slabs &) = delete;

    explicit kvmem_slabs(bool pin);

    uint8_t * alloc(size_t bytes); // at a page; null if there is none left
    void      free(uint8_t * data);

    bool is_pinned(const uint8_t * data) const; // `data` lies anywhere in a slab
    void limit_pinned(size_t bytes);
    void count(size_t * pinned, size_t * plain) const; // bytes

  private:
    struct slab {
        size_t       bytes;
        kvmem_pinned pinned; // without data the slab is plain
    };

    mutable std::mutex mutex;
    const bool         pin;
    size_t             pinned_limit;   // half of the machine's memory: what is pinned is lost to all other programs
    size_t             n_pinned   = 0; // bytes
    size_t             n_plain    = 0;
    bool               has_warned = false;
    std::map<uint8_t *, slab> slabs;
};
