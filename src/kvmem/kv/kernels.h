// Inner loops of scoring and the number formats that summaries use, in plain C that compilers vectorise.
// Wheels are built for the oldest x86-64, so the loops are cloned per instruction set and the loader
// picks one (GCC 12 with glibc, or newer; elsewhere the baseline runs).
#pragma once

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Not under AddressSanitizer: the loader picks before the sanitizer is ready.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define KV_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define KV_CLONES
#endif

#if defined(__GNUC__)
#define KV_INLINE static inline __attribute__((always_inline)) // into the clones, to be compiled as they are
#define KV_NOINLINE __attribute__((noinline))
#else
#define KV_INLINE static inline
#define KV_NOINLINE
#endif

#define KV_LANES 16 // slices side by side in a tile of keys
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

// Products of KV_ROWS query rows with the KV_LANES keys of a tile. A function of its own, so that all
// registers are free for the sums: inlined, AVX2 code spills half of them (290 ms against 207).
KV_CLONES KV_NOINLINE static void kv_dot_tile(
        const float * tile, const float * query, int dim, float sums[KV_ROWS][KV_LANES]) {
    float acc[KV_ROWS][KV_LANES] = { { 0 } };
    for (int i = 0; i < dim; ++i) {
#pragma GCC unroll 6
        for (int row = 0; row < KV_ROWS; ++row) {
#pragma GCC unroll 1
            for (int lane = 0; lane < KV_LANES; ++lane) {
                acc[row][lane] += tile[i * KV_LANES + lane] * query[i * KV_ROWS + row];
            }
        }
    }
    memcpy(sums, acc, sizeof(acc));
}

// Whole numbers instead: query rows as int16, whose error of a 65,534th of a row's largest value is far
// below that of int8 keys. VNNI multiplies and adds 32 of them at once, twice as many as floats. Chosen
// by hand, as the loader's choice knows no processors by that.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KV_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define KV_VNNI_MAX_DIM 512 // 127 * 32767 * 512 still fits in 32 bits

static int kv_has_vnni(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

//   query  f32 [n_groups][dim][KV_ROWS]
//   out    int16 [n_groups][dim / 2][KV_ROWS][2]      scale  f32 [n_groups * KV_ROWS]
KV_VNNI static void kv_quantize_rows(const float * query, int dim, int n_groups, int16_t * out, float * scale) {
    for (int group = 0; group < n_groups; ++group) {
        const float * rows = query + (size_t) group * dim * KV_ROWS;
        int16_t *     to   = out + (size_t) group * dim * KV_ROWS;
        for (int row = 0; row < KV_ROWS; ++row) {
            float largest = 0;
            for (int i = 0; i < dim; ++i) {
                const float size = rows[i * KV_ROWS + row] < 0 ? -rows[i * KV_ROWS + row] : rows[i * KV_ROWS + row];
                largest          = size > largest ? size : largest;
            }
            const float inverse          = largest > 0 ? 32767.0f / largest : 0;
            scale[group * KV_ROWS + row] = largest / 32767.0f;
            for (int i = 0; i < dim; ++i) {
                const float value                         = rows[i * KV_ROWS + row] * inverse;
                to[((i / 2) * KV_ROWS + row) * 2 + i % 2] = (int16_t) (value < 0 ? value - 0.5f : value + 0.5f);
            }
        }
    }
}

// Two tiles of keys at once, so that each row's numbers are loaded once for both.
//   keys  int8 [2][dim][KV_LANES]      pairs  int16 [2][dim / 2][KV_LANES][2], scratch
KV_VNNI static void kv_dot_two_tiles(const int8_t * keys, int dim, const int16_t * query, const float * scale,
        int n_groups, int16_t * pairs, const float * key_scale, float * out, size_t width) {
    for (int i = 0; i < dim; ++i) { // dim pairs in both tiles together
        const __m128i even = _mm_loadu_si128((const __m128i *) (keys + (size_t) (2 * i) * KV_LANES));
        const __m128i odd  = _mm_loadu_si128((const __m128i *) (keys + (size_t) (2 * i + 1) * KV_LANES));
        const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
        _mm512_storeu_si512(pairs + (size_t) i * 2 * KV_LANES, _mm512_cvtepi8_epi16(both));
    }
    const int16_t * second = pairs + (size_t) dim * KV_LANES;
    const __m512    left = _mm512_loadu_ps(key_scale), right = _mm512_loadu_ps(key_scale + KV_LANES);
    for (int group = 0; group < n_groups; ++group) {
        const int16_t * rows = query + (size_t) group * dim * KV_ROWS;
        __m512i         acc[2][KV_ROWS];
#pragma GCC unroll 6
        for (int row = 0; row < KV_ROWS; ++row) {
            acc[0][row] = acc[1][row] = _mm512_setzero_si512();
        }
        for (int i = 0; i < dim / 2; ++i) {
            const __m512i first = _mm512_loadu_si512(pairs + (size_t) i * 2 * KV_LANES);
            const __m512i next  = _mm512_loadu_si512(second + (size_t) i * 2 * KV_LANES);
#pragma GCC unroll 6
            for (int row = 0; row < KV_ROWS; ++row) {
                int32_t two;
                memcpy(&two, rows + (size_t) (i * KV_ROWS + row) * 2, sizeof(two));
                const __m512i asked = _mm512_set1_epi32(two);
                acc[0][row]         = _mm512_dpwssd_epi32(acc[0][row], first, asked);
                acc[1][row]         = _mm512_dpwssd_epi32(acc[1][row], next, asked);
            }
        }
#pragma GCC unroll 6
        for (int row = 0; row < KV_ROWS; ++row) {
            const __m512 size = _mm512_set1_ps(scale[group * KV_ROWS + row]);
            float *      to   = out + (size_t) (group * KV_ROWS + row) * width;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[0][row]), _mm512_mul_ps(size, left)));
            _mm512_storeu_ps(to + KV_LANES, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[1][row]), _mm512_mul_ps(size, right)));
        }
    }
}
#else
#define KV_VNNI_MAX_DIM 0

static int kv_has_vnni(void) {
    return 0;
}

static void kv_quantize_rows(const float * query, int dim, int n_groups, int16_t * out, float * scale) {
    (void) query, (void) dim, (void) n_groups, (void) out, (void) scale;
}
#endif

// Softmax of one run of tiles, relative to the run's own maximum, for n_groups * KV_ROWS query rows.
//   keys    int8 [n_tiles][dim][KV_LANES]      scales  half [n_tiles * KV_LANES]
//   query   f32  [n_groups][dim][KV_ROWS], the factor of q.k multiplied in
//   whole, whole_scale  the same by kv_quantize_rows, or NULL
//   tile    f32  [dim][KV_LANES], scratch
//   out     f32  [n_groups * KV_ROWS][n_tiles * KV_LANES]: exp(logit - maximum)
//   maximum, total  f32 [n_groups * KV_ROWS]: of this run
// Lanes from n_slices on hold no key and come out as 0.
KV_CLONES
static void kv_softmax_run(const int8_t * keys, const uint16_t * scales, int n_tiles, int n_slices, int dim,
        const float * query, const int16_t * whole, const float * whole_scale, int n_groups, float * tile, float * out,
        float * maximum, float * total) {
    const size_t width = (size_t) n_tiles * KV_LANES;
    int          t     = 0;
#ifdef KV_VNNI
    for (; whole && t + 2 <= n_tiles; t += 2) {
        float scale[2 * KV_LANES];
        for (int lane = 0; lane < 2 * KV_LANES; ++lane) {
            scale[lane] = kv_half_to_float(scales[t * KV_LANES + lane]);
        }
        kv_dot_two_tiles(keys + (size_t) t * dim * KV_LANES, dim, whole, whole_scale, n_groups, (int16_t *) tile, scale,
                out + (size_t) t * KV_LANES, width);
    }
#else
    (void) whole, (void) whole_scale;
#endif
    for (; t < n_tiles; ++t) {
        const int8_t * source = keys + (size_t) t * dim * KV_LANES;
        float          scale[KV_LANES];
        float          sums[KV_ROWS][KV_LANES];
        for (int i = 0; i < dim * KV_LANES; ++i) {
            tile[i] = source[i];
        }
        for (int lane = 0; lane < KV_LANES; ++lane) {
            scale[lane] = kv_half_to_float(scales[t * KV_LANES + lane]);
        }
        for (int group = 0; group < n_groups; ++group) {
            kv_dot_tile(tile, query + (size_t) group * dim * KV_ROWS, dim, sums);
            for (int row = 0; row < KV_ROWS; ++row) {
                float * logits = out + (size_t) (group * KV_ROWS + row) * width + (size_t) t * KV_LANES;
                for (int lane = 0; lane < KV_LANES; ++lane) {
                    logits[lane] = sums[row][lane] * scale[lane];
                }
            }
        }
    }
    for (int row = 0; row < n_groups * KV_ROWS; ++row) {
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

// score[s] += sum over rows of weight[row] * (e[row][s] * factor[row])^power, for one run.
KV_CLONES
static void kv_add_powers(
        const float * e, int n_rows, int width, const float * factor, const float * weight, int power, float * score) {
    for (int row = 0; row < n_rows; ++row) {
        const float * x = e + (size_t) row * width;
        const float   f = factor[row];
        const float   w = weight[row];
        if (power == 1) {
            for (int s = 0; s < width; ++s) {
                score[s] += w * (x[s] * f);
            }
        } else if (power == 2) {
            for (int s = 0; s < width; ++s) {
                const float p = x[s] * f;
                score[s] += w * (p * p);
            }
        } else {
            for (int s = 0; s < width; ++s) {
                const float p = x[s] * f;
                float       y = p;
                for (int i = 1; i < power; ++i) {
                    y *= p;
                }
                score[s] += w * y;
            }
        }
    }
}
