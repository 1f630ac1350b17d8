// Parts of a decoder layer for inference on a CPU: attention, RMSNorm, RoPE and SwiGLU.
//
// All functions compute in fp32; is_bf16 tells if they read and write bf16 rather than fp32. The
// arithmetic of a row does not depend on other rows.

#include "vectors.h"

#if defined(__AVX__) && !defined(__AVX512F__)
enum { VECTORS = 3, KEYS = 4 };
#else
enum { VECTORS = 6, KEYS = 4 };
#endif
enum { ROWS = 96, TILE = 64 };

// Causal attention of packed sequences.
//
// A row is a query head at a position. Each lane of a vector computes one row. A row goes through
// the keys of its sequence in order, in tiles that begin at multiples of TILE. Softmax is computed
// online over the tiles (FlashAttention, Dao et al. 2022).

typedef struct {
    void *pool; // keys or values of cached tokens
    const void *own; // keys or values of the pack's tokens
    int64_t pool_token, pool_group, own_token, own_group; // strides in elements
} Source;

typedef struct {
    // Row of the first token in the pack, number of tokens, position of the first token, and where
    // the keys of its sequence begin in `rows`.
    int32_t row, count, position, keys;
} Item;

// The two matmuls below compute `vectors` vectors of rows, a constant where they are inlined.

// scores[j][row] = sum over channels of keys[j][c] * query[c][row], KEYS keys at a time.
static inline __attribute__((always_inline)) void multiply_keys_of(
    const int vectors, const float query[][ROWS], const float *const *keys, int count, int channels,
    float scores[][ROWS]
) {
    for (int j = 0; j < count; j += KEYS) {
        vec sums[KEYS][VECTORS] = {};
        for (int c = 0; c < channels; c++) {
            const vec *q = (const vec *)query[c];
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sums[k][v] += keys[j + k][c] * q[v];
        }
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) ((vec *)scores[j + k])[v] = sums[k][v];
    }
}

// out[c][row] += sum over keys of values[j][c] * weights[j][row].
static inline __attribute__((always_inline)) void multiply_values_of(
    const int vectors, const float weights[][ROWS], const float *const *values, int count,
    int channels, float out[][ROWS]
) {
    for (int c = 0; c < channels; c += KEYS) {
        vec sums[KEYS][VECTORS];
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[k][v] = ((vec *)out[c + k])[v];
        for (int j = 0; j < count; j++) {
            const vec *w = (const vec *)weights[j];
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sums[k][v] += values[j][c + k] * w[v];
        }
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) ((vec *)out[c + k])[v] = sums[k][v];
    }
}

// Call one of the matmuls for `used` of ROWS rows, in groups of VECTORS vectors, then the remaining
// vectors. `used` is a multiple of a vector's length.
#define FOR_ROWS(multiply, from, tokens, count, channels, to)                                       \
    for (int first = 0; first < used; first += VECTORS * LANES) {                                   \
        const void *some = from[0] + first;                                                         \
        void *its = to[0] + first;                                                                  \
        switch ((used - first) / LANES) {                                                           \
        case 1: multiply(1, some, tokens, count, channels, its); break;                             \
        case 2: multiply(2, some, tokens, count, channels, its); break;                             \
        case 3: multiply(VECTORS < 3 ? VECTORS : 3, some, tokens, count, channels, its); break;     \
        case 4: multiply(VECTORS < 4 ? VECTORS : 4, some, tokens, count, channels, its); break;     \
        case 5: multiply(VECTORS < 5 ? VECTORS : 5, some, tokens, count, channels, its); break;     \
        default: multiply(VECTORS, some, tokens, count, channels, its);                             \
        }                                                                                           \
    }

static void multiply_keys(
    int used, const float query[][ROWS], const float *const *keys, int count, int channels,
    float scores[][ROWS]
) {
    FOR_ROWS(multiply_keys_of, query, keys, count, channels, scores)
}

static void multiply_values(
    int used, const float weights[][ROWS], const float *const *values, int count, int channels,
    float out[][ROWS]
) {
    FOR_ROWS(multiply_values_of, weights, values, count, channels, out)
}

// Turn a tile's scores into softmax weights, and rescale earlier sums to the new maximum.
static inline void weigh(
    int used, float scores[][ROWS], int count, int channels, float *most, float *total,
    float out[][ROWS]
) {
    for (int first = 0; first < used; first += LANES) {
        vec *known = (vec *)(most + first), *sum = (vec *)(total + first), top = *known;
        for (int j = 0; j < count; j++) {
            vec s = *(vec *)(scores[j] + first);
            top = select_(s > top, s, top);
        }
        // A row that has seen no key yet has no maximum.
        vec base = select_(top > -INFINITY, top, (vec){});
        vec kept = exponential(*known - base), added = {};
        for (int j = 0; j < count; j++) {
            vec *s = (vec *)(scores[j] + first);
            *s = exponential(*s - base);
            added += *s;
        }
        *sum = *sum * kept + added;
        *known = top;
        for (int c = 0; c < channels; c++) *(vec *)(out[c] + first) *= kept;
    }
}

// Return a key or value in fp32: its address if it is fp32, else a copy in `wide`.
static inline const float *row_of(
    const int is_bf16, const Source *from, int32_t row, int group, int channels, float *wide
) {
    int64_t place = row >= 0 ? row * from->own_token + group * from->own_group
                             : ~row * from->pool_token + group * from->pool_group;
    const void *array = row >= 0 ? from->own : from->pool;
    if (!is_bf16) return (const float *)array + place;
    for (int c = 0; c < channels; c++) wide[c] = number(1, array, place + c);
    return wide;
}

// Load a vector of which only `count` elements may be left in the array; the others are 0.
static inline vec load_up_to(int count, int is_bf16, const void *from, int64_t i) {
    if (count >= LANES) return load_as(is_bf16, from, i);
    vec loaded = {};
    for (int j = 0; j < count; j++) loaded[j] = number(is_bf16, from, i + j);
    return loaded;
}

static inline void store_up_to(int count, int is_bf16, void *to, int64_t i, vec value) {
    if (count >= LANES)
        store_as(is_bf16, to, i, value);
    else
        for (int j = 0; j < count; j++) set_number(is_bf16, to, i + j, value[j]);
}

#define FOR_SQUARES(row, channel)                                                                   \
    for (int row = 0; row < used; row += LANES)                                                     \
        for (int channel = 0; channel < channels; channel += LANES)

static inline __attribute__((always_inline)) void attend_item(
    const int is_bf16, const void *query, int64_t query_token, int64_t query_group,
    const Source *keys, const Source *values, void *out, int groups, int repeats, int channels,
    float scale, int window, const float *sinks, const Item *item, const int32_t *rows, int group
) {
    float wide[2 * TILE * MOST_CHANNELS] __attribute__((aligned(64)));
    float turned[MOST_CHANNELS][ROWS] __attribute__((aligned(64)));
    float sums[MOST_CHANNELS][ROWS] __attribute__((aligned(64)));
    float scores[TILE][ROWS] __attribute__((aligned(64)));
    float most[ROWS] __attribute__((aligned(64))), total[ROWS] __attribute__((aligned(64)));
    int32_t positions[ROWS] __attribute__((aligned(64)));
    int used = (item->count * repeats + LANES - 1) / LANES * LANES;
    int64_t places[ROWS];
    for (int row = 0; row < used; row++) {
        int token = row / repeats, head = row % repeats;
        int is_own = token < item->count;
        int64_t place = item->row + (is_own ? token : 0);
        places[row] = place * query_token + group * query_group + head * channels;
        positions[row] = item->position + (is_own ? token : 0);
        // A sink is like a key that is seen first, with a value of zeros.
        most[row] = sinks ? sinks[group * repeats + head] : -INFINITY;
        total[row] = sinks ? 1 : 0;
    }
    FOR_SQUARES(first, c) {
        vec square[LANES];
        for (int i = 0; i < LANES; i++)
            square[i] = load_up_to(channels - c, is_bf16, query, places[first + i] + c) * scale;
        transpose(square);
        for (int i = 0; i < LANES; i++) {
            *(vec *)(turned[c + i] + first) = square[i];
            *(vec *)(sums[c + i] + first) = (vec){};
        }
    }
    int last = item->position + item->count;
    int start = item->position - window + 1;
    start = start > 0 ? start / TILE * TILE : 0;
    for (; start < last; start += TILE) {
        const float *tile_keys[TILE], *tile_values[TILE];
        int count = last - start < TILE ? last - start : TILE;
        int filled = (count + KEYS - 1) / KEYS * KEYS;
        for (int j = 0; j < filled; j++) {
            int32_t row = rows[item->keys + start + (j < count ? j : count - 1)];
            float *its_key = wide + 2 * j * channels, *its_value = its_key + channels;
            tile_keys[j] = row_of(is_bf16, keys, row, group, channels, its_key);
            tile_values[j] = row_of(is_bf16, values, row, group, channels, its_value);
        }
        multiply_keys(used, turned, tile_keys, filled, channels, scores);
        if (start + count > item->position + 1 || start <= last - 1 - window) {
            for (int j = 0; j < count; j++)
                for (int first = 0; first < used; first += LANES) {
                    ints behind = *(ints *)(positions + first) - (start + j);
                    vec *s = (vec *)(scores[j] + first);
                    *s = select_((behind >= 0) & (behind < window), *s, (vec){} - INFINITY);
                }
        }
        weigh(used, scores, count, channels, most, total, sums);
        multiply_values(used, scores, tile_values, count, channels, sums);
    }
    FOR_SQUARES(first, c) {
        vec square[LANES];
        for (int i = 0; i < LANES; i++)
            square[i] = *(vec *)(sums[c + i] + first) / *(vec *)(total + first);
        transpose(square);
        for (int row = first; row < first + LANES && row < item->count * repeats; row++) {
            int64_t token = item->row + row / repeats, head = group * repeats + row % repeats;
            int64_t to = (token * groups * repeats + head) * channels + c;
            store_up_to(channels - c, is_bf16, out, to, square[row - first]);
        }
    }
}

// Copy one token's keys or values into the pool.
static inline void keep(
    int is_bf16, const Source *of, int64_t row, int64_t slot, int groups, int channels
) {
    int size = is_bf16 ? 2 : 4;
    for (int group = 0; group < groups; group++) {
        int64_t from = row * of->own_token + group * of->own_group;
        int64_t to = slot * of->pool_token + group * of->pool_group;
        memcpy((char *)of->pool + to * size, (char *)of->own + from * size, channels * size);
    }
}

// Attend query [T, groups, repeats, channels] -> out [T, heads, channels]; strides are in elements.
// Keys and values of the rows `stored` are also written to `slots` of the pool. `sinks [heads]` are
// logits that join the softmax, or null.
void attend(
    int is_bf16, const void *query, int64_t query_token, int64_t query_group, const Source *keys,
    const Source *values, void *out, int groups, int repeats, int channels, float scale, int window,
    const float *sinks, const Item *items, int count, const int32_t *rows, const int64_t *stored, const int64_t *slots,
    int storing, int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int i = 0; i < storing; i++) {
        keep(is_bf16, keys, stored[i], slots[i], groups, channels);
        keep(is_bf16, values, stored[i], slots[i], groups, channels);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int work = 0; work < count * groups; work++) {
        const Item *item = items + work / groups;
        if (is_bf16)
            attend_item(1, query, query_token, query_group, keys, values, out, groups, repeats,
                        channels, scale, window, sinks, item, rows, work % groups);
        else
            attend_item(0, query, query_token, query_group, keys, values, out, groups, repeats,
                        channels, scale, window, sinks, item, rows, work % groups);
    }
}

// Pointwise parts of a layer. Widths are multiples of 16, and rows are contiguous.

typedef struct {
    int is_bf16;
    const void *weight;
    int out_is_bf16;
    void *out;
    float eps;
} Norm;

static inline __attribute__((always_inline)) void norm_row(
    const int is_bf16, const void *x, const Norm *norm, int64_t begin, int width
) {
    vec squares = {};
    for (int i = 0; i < width; i += LANES) {
        vec each = load_as(is_bf16, x, begin + i);
        squares += each * each;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    float scale = 1.0f / sqrtf(sum / width + norm->eps);
    for (int i = 0; i < width; i += LANES) {
        vec each = load_as(is_bf16, x, begin + i), weight = load_as(norm->is_bf16, norm->weight, i);
        store_as(norm->out_is_bf16, norm->out, begin + i, each * scale * weight);
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight.
void rms_norm(int is_bf16, const void *x, const Norm *norm, int64_t rows, int width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (is_bf16)
            norm_row(1, x, norm, row * width, width);
        else
            norm_row(0, x, norm, row * width, width);
    }
}

// Compute x += added, then rms_norm of x; only the sum if norm is NULL.
void add(
    float *x, int is_bf16, const void *added, const Norm *norm, int64_t rows, int width, int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = row * width; i < (row + 1) * width; i += LANES)
            store(x + i, load(x + i) + load_as(is_bf16, added, i));
        if (norm) norm_row(0, x, norm, row * width, width);
    }
}

static inline __attribute__((always_inline)) void gated_silu_of(
    const int is_bf16, const void *x, void *out, int64_t row, int width
) {
    int64_t gates = row * 2 * width;
    for (int i = 0; i < width; i += LANES) {
        vec gate = load_as(is_bf16, x, gates + i);
        vec power = select_(gate < -88.0f, (vec){} + 88.0f, -gate);
        vec silu = gate / (exponential(power) + 1.0f);
        store_as(is_bf16, out, row * width + i, silu * load_as(is_bf16, x, gates + width + i));
    }
}

// x [rows, 2 width], gate first, -> out [rows, width] = silu(gate) * linear; both bf16 or fp32.
void gated_silu(int is_bf16, const void *x, void *out, int64_t rows, int width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (is_bf16)
            gated_silu_of(1, x, out, row, width);
        else
            gated_silu_of(0, x, out, row, width);
    }
}

static inline __attribute__((always_inline)) void rotate_head(
    const int is_bf16, void *restrict first, void *restrict second, const void *restrict cos,
    const void *restrict sin, int64_t begin, int64_t angle, int half
) {
    for (int i = 0; i < half; i++) {
        float a = number(is_bf16, first, begin + i), b = number(is_bf16, second, begin + i);
        float c = number(is_bf16, cos, angle + i), s = number(is_bf16, sin, angle + i);
        set_number(is_bf16, first, begin + i, a * c - b * s);
        set_number(is_bf16, second, begin + i, b * c + a * s);
    }
}

// Apply RoPE to x [rows, groups, heads, channels] in place, with strides in elements. Channel i is
// rotated with channel i + half, by cos and sin [rows, half]; channels from 2 half on stay as they
// are. All tensors are bf16, or all are fp32.
void rotate(
    int is_bf16, void *x, int64_t x_row, int64_t x_group, const void *cos, const void *sin,
    int64_t rows, int groups, int heads, int channels, int half, int threads
) {
    void *second = (char *)x + half * (is_bf16 ? 2 : 4);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int head = 0; head < groups * heads; head++) {
            int64_t begin = row * x_row + head / heads * x_group + head % heads * channels;
            if (is_bf16)
                rotate_head(1, x, second, cos, sin, begin, row * half, half);
            else
                rotate_head(0, x, second, cos, sin, begin, row * half, half);
        }
}
