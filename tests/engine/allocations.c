// Counts heap allocations by the library that asked for them: for LD_PRELOAD, see test_allocations.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);

enum { MAX_RECORDS = 1 << 18, N_FRAMES = 6 };

struct record {
    size_t n_bytes;
    int    n_frames;
    void * frames[N_FRAMES];
};

static struct record * records;
static int             n_records;
static volatile int    is_counting;
static __thread int    is_inside; // backtrace allocates at its first call

static void note(size_t n_bytes) {
    if (!is_counting || is_inside) {
        return;
    }
    is_inside   = 1;
    const int i = __sync_fetch_and_add(&n_records, 1);
    if (i < MAX_RECORDS) {
        records[i].n_bytes  = n_bytes;
        records[i].n_frames = backtrace(records[i].frames, N_FRAMES);
    }
    is_inside = 0;
}

void * malloc(size_t n) {
    note(n);
    return __libc_malloc(n);
}

void * calloc(size_t n, size_t size) {
    note(n * size);
    return __libc_calloc(n, size);
}

void * realloc(void * old, size_t n) {
    note(n);
    return __libc_realloc(old, n);
}

void * memalign(size_t alignment, size_t n) {
    note(n);
    return __libc_memalign(alignment, n);
}

void * aligned_alloc(size_t alignment, size_t n) {
    note(n);
    return __libc_memalign(alignment, n);
}

int posix_memalign(void ** out, size_t alignment, size_t n) {
    note(n);
    *out = __libc_memalign(alignment, n);
    return *out == NULL;
}

void allocations_start(void) {
    void * frames[N_FRAMES];
    if (records == NULL) {
        records = __libc_calloc(MAX_RECORDS, sizeof(*records));
    }
    backtrace(frames, N_FRAMES);
    n_records   = 0;
    is_counting = 1;
}

static int is_between(const char * path) {
    return strstr(path, "/libstdc++") || strstr(path, "/libc.so") || strstr(path, "allocations.so");
}

// One line an allocation: bytes, and the library that is behind operator new and malloc. Returns how many there were.
int allocations_stop(const char * path) {
    is_counting = 0;
    FILE * file = fopen(path, "w");
    for (int i = 0; i < n_records && i < MAX_RECORDS; i++) {
        const char * who = "?";
        for (int k = 0; k < records[i].n_frames; k++) {
            Dl_info info;
            if (dladdr(records[i].frames[k], &info) && info.dli_fname && !is_between(info.dli_fname)) {
                who = info.dli_fname;
                break;
            }
        }
        fprintf(file, "%zu %s\n", records[i].n_bytes, who);
    }
    fclose(file);
    return n_records;
}
