// Vectors of fp32 for the C files of this folder: loads, stores, exp and transposes, also of bf16.
//
// The files are compiled for the processor that they run on, and work with vectors of any width.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { MOST_CHANNELS = 256 }; // of a head

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef float unaligned __attribute__((vector_size(LANES * 4), aligned(4)));

static inline vec load(const float *from) { return *(const unaligned *)from; }

static inline void store(float *to, vec value) { *(unaligned *)to = value; }

typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t shorts __attribute__((vector_size(LANES * 2), aligned(2)));

// Load a vector from index i of an array in bf16 or fp32, and store it, rounding to nearest even.
static inline vec load_as(int is_bf16, const void *from, int64_t i) {
    if (!is_bf16) return load((const float *)from + i);
    shorts upper = *(const shorts *)((const uint16_t *)from + i);
    return (vec)(__builtin_convertvector(upper, words) << 16);
}

static inline void store_as(int is_bf16, void *to, int64_t i, vec value) {
    if (!is_bf16) {
        store((float *)to + i, value);
        return;
    }
    words bits = (words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words kept = (words)(value == value);
    rounded = (kept & rounded) | (~kept & 0x7fc0); // NaN stays NaN
    *(shorts *)((uint16_t *)to + i) = __builtin_convertvector(rounded, shorts);
}

static inline float number(int is_bf16, const void *x, int64_t i) {
    union { uint32_t bits; float value; } wide;
    if (!is_bf16) return ((const float *)x)[i];
    wide.bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    return wide.value;
}

static inline void set_number(int is_bf16, void *x, int64_t i, float value) {
    union { float value; uint32_t bits; } wide = {value};
    if (!is_bf16)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] =
            value == value ? (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16 : 0x7fc0;
}

static inline vec select_(ints mask, vec yes, vec no) {
    return (vec)((mask & (ints)yes) | (~mask & (ints)no));
}

// exp(x) for x up to 88, to 1 unit in the last place. It is 0 for x below -87, and NaN for NaN.
// Computed as 2^n times the Cephes library's polynomial of the remainder.
static inline vec exponential(vec x) {
    const vec shift = (vec){} + 12582912.0f;
    vec n = x * 1.44269504f + shift;
    n -= shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vec power = (vec)((__builtin_convertvector(n, ints) + 127) << 23);
    return select_(x < -87.0f, (vec){}, p * power);
}

// Transpose a square of vectors: element j of vector i becomes element i of vector j.
static inline __attribute__((always_inline)) void transpose(vec x[LANES]) {
#if __has_builtin(__builtin_shuffle)
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints lane;
    memcpy(&lane, numbers, sizeof lane);
    // Swaps two quarters of every square of 2 * step vectors.
#pragma GCC unroll 4
    for (int step = LANES / 2; step > 0; step /= 2) {
        ints stays = (lane & step) == 0;
        ints upper = (stays & lane) | (~stays & (lane - step + LANES));
        ints lower = (stays & (lane + step)) | (~stays & (lane + LANES));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                vec first = x[i], second = x[i + step];
                x[i] = __builtin_shuffle(first, second, upper);
                x[i + step] = __builtin_shuffle(first, second, lower);
            }
    }
#else // clang
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float kept = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = kept;
        }
#endif
}
