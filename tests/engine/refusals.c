// Refuses large buffers from the n-th on, as a machine without memory does: for LD_PRELOAD, see test_fit.py.
#include <errno.h>
#include <stddef.h>

extern void * __libc_memalign(size_t, size_t);

enum { LARGE_BYTES = 1 << 16 };

static int n_left = -1; // of those that are given; -1: all

void refusals_start(int n) {
    n_left = n;
}

// ggml's own
int posix_memalign(void ** out, size_t alignment, size_t n) {
    if (n >= LARGE_BYTES && n_left >= 0) {
        if (n_left == 0) {
            return ENOMEM;
        }
        --n_left;
    }
    *out = __libc_memalign(alignment, n);
    return *out ? 0 : ENOMEM;
}
