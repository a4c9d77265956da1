// Host memory for block records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

// Pinned beside a CUDA device, as far as the limit and the system allow; plain memory beyond, which is said once in the
// log. Plain memory is from the system: freed slabs would stay in the arenas of whichever threads had asked for them.
struct kvmem_slabs {
    kvmem_slabs(const kvmem_slabs &)             = delete;
    kvmem_slabs & operator=(const kvmem_slabs &) = delete;

    // what is not freed before the end stays: its holder may still look at it
    explicit kvmem_slabs(bool pin);

    uint8_t * alloc(size_t bytes); // at a page; null if there is none left
    void      free(uint8_t * data);

    bool is_pinned(const uint8_t * data) const; // `data` lies anywhere in a slab

    const bool pin;
    size_t     pinned_limit; // half of the machine's memory: what is pinned is lost to all other programs
    size_t     n_pinned = 0; // bytes
    size_t     n_plain  = 0;

  private:
    struct slab {
        uint8_t * base; // as it was allocated
        size_t    bytes;
        bool      pinned;
    };

    std::map<uint8_t *, slab> slabs;

    bool has_warned = false;
};

// of the CUDA build; null if there is none left
uint8_t * kvmem_pinned_alloc(size_t bytes);
void      kvmem_pinned_free(uint8_t * data, size_t bytes);
