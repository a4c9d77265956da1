// Inner loops of scoring and the number formats that summaries use, in plain C that compilers vectorise.
// Wheels are built for the oldest x86-64, so the loops are cloned per instruction set and the loader
// picks one (GCC 12 with glibc, or newer; elsewhere the baseline runs). The products of scoring are
// written with intrinsics, and kv_best_dot picks.
#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define KV_X86
#include <immintrin.h>
#endif

// Not under AddressSanitizer: the loader picks before the sanitizer is ready.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define KV_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define KV_CLONES
#endif

#if defined(__GNUC__)
#define KV_INLINE static inline __attribute__((always_inline)) // into the clones, to be compiled as they are
#else
#define KV_INLINE static inline
#endif

#define KV_LANES 32 // slices side by side in a tile of keys
#define KV_ROWS 6   // query rows that share one pass over a tile: 12 of AVX2's 16 registers hold their sums

KV_INLINE float kv_half_to_float(uint16_t half) {
    // Exponent and mantissa land in float's places; the multiplication corrects the bias and also
    // makes subnormals right. Infinities and NaN are set by hand.
    uint32_t bits = (uint32_t) (half & 0x7fff) << 13;
    float    value;
    memcpy(&value, &bits, sizeof(value));
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof(bits));
    if ((half & 0x7c00) == 0x7c00) {
        bits = 0x7f800000u | (uint32_t) (half & 0x3ff) << 13;
    }
    bits |= (uint32_t) (half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// For finite values >= 0 up to 65504, rounded to nearest even.
KV_INLINE uint16_t kv_float_to_half(float value) {
    uint32_t bits;
    if (value < 0x1p-14f) {
        // Subnormal halves are multiples of 2^-24: adding 0.5 rounds to that grid.
        value += 0.5f;
        memcpy(&bits, &value, sizeof(bits));
        return (uint16_t) (bits - 0x3f000000u);
    }
    memcpy(&bits, &value, sizeof(bits));
    bits += 0x0fffu + ((bits >> 13) & 1u);
    return (uint16_t) ((bits - (112u << 23)) >> 13);
}

KV_CLONES
static void kv_dequantize_f16(const void * src, float * dst, int64_t n) {
    const uint16_t * half = (const uint16_t *) src;
    for (int64_t i = 0; i < n; ++i) {
        dst[i] = kv_half_to_float(half[i]);
    }
}

static void kv_dequantize_f32(const void * src, float * dst, int64_t n) {
    memcpy(dst, src, (size_t) n * sizeof(float));
}

// exp(x) for x <= 0, relative error under 3e-7; 0 below -87.
// x = k ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts so that r keeps its bits; Taylor to r^7.
KV_INLINE float kv_exp(float x) {
    const float live    = x > -87.0f ? x : -87.0f;
    const float shifted = live * 1.44269504f + 12582912.0f; // 1.5 * 2^23: the low bits hold k
    const float k       = shifted - 12582912.0f;
    const float r       = live - k * 0.693359375f + k * 2.12194440e-4f;
    float       p       = r * (1.0f / 5040) + (1.0f / 720);
    uint32_t    bits, power;
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    memcpy(&bits, &p, sizeof(bits));
    memcpy(&power, &shifted, sizeof(power));
    bits += power << 23;
    memcpy(&p, &bits, sizeof(p));
    return x > -87.0f ? p : 0.0f;
}

// Place of dim i of a slice in the keys of a chunk, int8 [tiles][(dim + 1) / 2][KV_LANES][2]: dims go in
// pairs, since x86 multiplies and adds two in one instruction. The place beside an odd last dim is unused.
KV_INLINE size_t kv_key_at(int slice, int i, int dim) {
    const size_t even = (size_t) (slice / KV_LANES) * ((dim + 1) & ~1) + (i & ~1);
    return even * KV_LANES + slice % KV_LANES * 2 + (i & 1);
}

// Products of KV_ROWS query rows with the KV_LANES keys of a tile, in integers: exact, so that all
// versions agree.
//   keys  int8 [pairs][KV_LANES][2]      query  int16 [pairs][KV_ROWS][2]      sums  int32 [KV_ROWS][KV_LANES]
typedef void (*kv_dot)(const int8_t * keys, const int16_t * query, int pairs, int32_t * sums);

static void kv_dot_plain(const int8_t * keys, const int16_t * query, int pairs, int32_t * sums) {
    int32_t acc[KV_ROWS][KV_LANES] = { { 0 } };
    for (int i = 0; i < pairs; ++i, keys += 2 * KV_LANES, query += 2 * KV_ROWS) {
        for (int row = 0; row < KV_ROWS; ++row) {
            for (int lane = 0; lane < KV_LANES; ++lane) {
                acc[row][lane] += keys[2 * lane] * query[2 * row] + keys[2 * lane + 1] * query[2 * row + 1];
            }
        }
    }
    memcpy(sums, acc, sizeof(acc));
}

#ifdef KV_X86
// Two vectors of keys at a time, widened to int16, and the sums of all rows with both: as many as AVX2's
// registers hold. GCC finds these instructions only as intrinsics.
#define KV_DOT(name, isa, vector, half, widen, broadcast, add_products)                                                \
    __attribute__((target(isa))) static void name(                                                                     \
            const int8_t * keys, const int16_t * query, int pairs, int32_t * sums) {                                   \
        enum { LANES = sizeof(vector) / sizeof(int32_t) };                                                             \
        for (int first = 0; first < KV_LANES; first += 2 * LANES) {                                                    \
            vector acc[KV_ROWS][2] = { { { 0 } } };                                                                    \
            for (int i = 0; i < pairs; ++i) {                                                                          \
                const half * at = (const half *) (keys + ((size_t) i * KV_LANES + first) * 2);                         \
                const vector a = widen(at[0]), b = widen(at[1]);                                                       \
                _Pragma("GCC unroll 6") for (int row = 0; row < KV_ROWS; ++row) {                                      \
                    int32_t two;                                                                                       \
                    memcpy(&two, query + ((size_t) i * KV_ROWS + row) * 2, sizeof(two));                               \
                    acc[row][0] = add_products(acc[row][0], a, broadcast(two));                                        \
                    acc[row][1] = add_products(acc[row][1], b, broadcast(two));                                        \
                }                                                                                                      \
            }                                                                                                          \
            _Pragma("GCC unroll 6") for (int row = 0; row < KV_ROWS; ++row) {                                          \
                vector * sum = (vector *) (sums + row * KV_LANES + first);                                             \
                sum[0]       = acc[row][0];                                                                            \
                sum[1]       = acc[row][1];                                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }

#define KV_MADD_256(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#define KV_MADD_512(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))

// The types that end in _u may lie anywhere.
KV_DOT(kv_dot_avx2, "avx2", __m256i_u, __m128i_u, _mm256_cvtepi8_epi16, _mm256_set1_epi32, KV_MADD_256)
KV_DOT(kv_dot_avx512, "avx512bw", __m512i_u, __m256i_u, _mm512_cvtepi8_epi16, _mm512_set1_epi32, KV_MADD_512)
KV_DOT(kv_dot_vnni, "avx512bw,avx512vnni", __m512i_u, __m256i_u, _mm512_cvtepi8_epi16, _mm512_set1_epi32,
        _mm512_dpwssd_epi32)
#endif

// The versions that this processor runs, the fastest first; the last is plain C.
static int kv_dots(kv_dot found[4]) {
    int n = 0;
#ifdef KV_X86
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) {
        found[n++] = kv_dot_vnni;
    }
    if (__builtin_cpu_supports("avx512bw")) {
        found[n++] = kv_dot_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        found[n++] = kv_dot_avx2;
    }
#endif
    found[n++] = kv_dot_plain;
    return n;
}

// Query rows f32 [n_rows][dim] as int16 in groups for kv_dot, each row with a scale of its own.
//   packed  int16 [n_groups][(dim + 1) / 2][KV_ROWS][2], 0 where there is no row or dim; scale  f32 [n_rows]
// The largest value of a row becomes 32767, or what a sum of dim products with int8 has room for.
static void kv_pack_rows(const float * rows, int n_rows, int dim, int16_t * packed, float * scale) {
    const int pairs  = (dim + 1) / 2;
    const int room   = INT32_MAX / 128 / dim;
    const int widest = room < INT16_MAX ? room : INT16_MAX;
    memset(packed, 0, sizeof(*packed) * 2 * KV_ROWS * pairs * ((n_rows + KV_ROWS - 1) / KV_ROWS));
    for (int row = 0; row < n_rows; ++row, rows += dim) {
        int16_t * at  = packed + (size_t) (row / KV_ROWS) * pairs * KV_ROWS * 2 + row % KV_ROWS * 2;
        float     top = 0;
        for (int i = 0; i < dim; ++i) {
            top = fabsf(rows[i]) > top ? fabsf(rows[i]) : top;
        }
        scale[row] = top / widest;
        if (scale[row] > FLT_MIN) { // else the row is 0 but for what no logit shows
            for (int i = 0; i < dim; ++i) {
                at[i / 2 * KV_ROWS * 2 + i % 2] = (int16_t) rintf(rows[i] / scale[row]);
            }
        }
    }
}

// Softmax of one run of tiles, relative to the run's own maximum.
//   keys    int8 [n_tiles][pairs][KV_LANES][2], scales  half [n_tiles * KV_LANES]
//   query, query_scale  of kv_pack_rows, the factor of q.k multiplied in
//   out     f32  [n_rows][n_tiles * KV_LANES]: exp(logit - maximum)
//   maximum, total  f32 [n_rows]: of this run
// Lanes from n_slices on hold no key and come out as 0.
KV_CLONES
static void kv_softmax_run(kv_dot dot, const int8_t * keys, const uint16_t * scales, int n_tiles, int n_slices,
        int pairs, const int16_t * query, const float * query_scale, int n_rows, float * out, float * maximum,
        float * total) {
    const size_t width = (size_t) n_tiles * KV_LANES;
    for (int t = 0; t < n_tiles; ++t) {
        float   scale[KV_LANES];
        int32_t sums[KV_ROWS][KV_LANES];
        for (int lane = 0; lane < KV_LANES; ++lane) {
            scale[lane] = kv_half_to_float(scales[t * KV_LANES + lane]);
        }
        for (int row = 0; row < n_rows; ++row) {
            float * logits = out + (size_t) row * width + (size_t) t * KV_LANES;
            if (row % KV_ROWS == 0) {
                dot(keys + (size_t) t * pairs * KV_LANES * 2, query + (size_t) row * pairs * 2, pairs, sums[0]);
            }
            for (int lane = 0; lane < KV_LANES; ++lane) {
                logits[lane] = (float) sums[row % KV_ROWS][lane] * (scale[lane] * query_scale[row]);
            }
        }
    }
    for (int row = 0; row < n_rows; ++row) {
        float * x = out + (size_t) row * width;
        float   top[KV_LANES];
        float   sum[KV_LANES] = { 0 };
        float   highest;
        float   all = 0;
        for (size_t i = (size_t) n_slices; i < width; ++i) {
            x[i] = -FLT_MAX;
        }
        memcpy(top, x, sizeof(top));
        for (size_t i = KV_LANES; i < width; i += KV_LANES) {
            for (int lane = 0; lane < KV_LANES; ++lane) {
                top[lane] = x[i + lane] > top[lane] ? x[i + lane] : top[lane];
            }
        }
        highest = top[0];
        for (int lane = 1; lane < KV_LANES; ++lane) {
            highest = top[lane] > highest ? top[lane] : highest;
        }
        for (size_t i = 0; i < width; i += KV_LANES) {
            for (int lane = 0; lane < KV_LANES; ++lane) {
                const float e = kv_exp(x[i + lane] - highest);
                x[i + lane]   = e;
                sum[lane] += e;
            }
        }
        for (int lane = 0; lane < KV_LANES; ++lane) {
            all += sum[lane];
        }
        maximum[row] = highest;
        total[row]   = all;
    }
}

// score[s] += sum over rows of (e[row][s] * factor[row])^power, for one run.
KV_CLONES
static void kv_add_powers(const float * e, int n_rows, int width, const float * factor, int power, float * score) {
    for (int row = 0; row < n_rows; ++row) {
        const float * x = e + (size_t) row * width;
        const float   f = factor[row];
        if (power == 1) {
            for (int s = 0; s < width; ++s) {
                score[s] += x[s] * f;
            }
        } else if (power == 2) {
            for (int s = 0; s < width; ++s) {
                const float p = x[s] * f;
                score[s] += p * p;
            }
        } else {
            for (int s = 0; s < width; ++s) {
                const float p = x[s] * f;
                float       y = p;
                for (int i = 1; i < power; ++i) {
                    y *= p;
                }
                score[s] += y;
            }
        }
    }
}
