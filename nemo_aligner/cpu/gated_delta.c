// Gated DeltaNet without gradients on a CPU: convolution, gated delta rule, gated norm.
//
// Computes what models/linear_attention.py computes by torch, chunk by chunk, in fp32. A thread
// computes a chunk of one key head and of the value heads that share it. The arithmetic of a token
// depends only on its place in the chunk, on the earlier tokens of the chunk, and on the state.

#include "vectors.h"

enum { CHUNK = 64, MOST_TAPS = 8, HIGH = 4 };
#if defined(__AVX512F__)
enum { WIDE = 4 };
#else
enum { WIDE = 2 };
#endif

// Where a layer's inputs and outputs are. The rows of `mixed` are contiguous: for each key head its
// query, its key, and then for its value heads their values, gates, write strengths and decays.
typedef struct {
    int32_t is_bf16, heads, repeats, keys, values, taps; // repeats: value heads of a key head
    float eps;
    const float *weights; // [taps, heads, 2 keys + repeats * values], of the convolution
    const float *rates, *biases; // [heads, repeats]
    const float *norm; // [values]
    const int64_t *rows; // [chunks, taps - 1 + CHUNK] rows of `mixed`, or -1
    const int64_t *places; // [T] for each row of `out`: its number in `rows`, without the taps - 1
    const void *mixed; // [at least T, heads, 2 keys + repeats * (2 values + 2)]
    void *out; // [T, heads, repeats, values]
} Layer;

// Matrices of a chunk. Only the first rows, those of the chunk's tokens, are used.
typedef struct {
    float query[CHUNK * MOST_CHANNELS], key[CHUNK * MOST_CHANNELS]; // [CHUNK, keys]
    float turned[MOST_CHANNELS * CHUNK]; // [keys, CHUNK], the transposed key
    float scaled[CHUNK * MOST_CHANNELS]; // [CHUNK, keys]
    float written[CHUNK * MOST_CHANNELS], output[CHUNK * MOST_CHANNELS]; // [CHUNK, values]
    float of_query[CHUNK][CHUNK], of_key[CHUNK][CHUNK]; // products with the keys
    float inner[CHUNK][CHUNK], solved[CHUNK][CHUNK];
    float decay[CHUNK], strength[CHUNK], from_start[CHUNK]; // decay: summed from the chunk's start
} __attribute__((aligned(64))) Chunk;

// c [HIGH, vectors * LANES] += a [HIGH, depth] * b [depth, vectors * LANES].
static inline __attribute__((always_inline)) void multiply_tile(
    const int vectors, int depth, const float *a, int a_row, const float *b, int b_row, float *c,
    int c_row
) {
    vec sums[HIGH][WIDE];
#pragma GCC unroll 8
    for (int i = 0; i < HIGH; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[i][v] = load(c + i * c_row + v * LANES);
    for (int d = 0; d < depth; d++)
#pragma GCC unroll 8
        for (int i = 0; i < HIGH; i++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sums[i][v] += a[i * a_row + d] * load(b + d * b_row + v * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < HIGH; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(c + i * c_row + v * LANES, sums[i][v]);
}

// c [rows, columns] += a [rows, depth] * b [depth, columns]; rows are a multiple of HIGH, columns
// one of LANES. An element's arithmetic does not depend on the numbers of rows and columns.
static void multiply(
    int rows, int columns, int depth, const float *a, int a_row, const float *b, int b_row,
    float *c, int c_row
) {
    enum { THREE = WIDE < 3 ? WIDE : 3 };
    for (int j = 0; j < columns; j += WIDE * LANES)
        for (int i = 0; i < rows; i += HIGH) {
            const float *left = a + i * a_row;
            float *to = c + i * c_row + j;
            switch ((columns - j) / LANES) {
            case 1: multiply_tile(1, depth, left, a_row, b + j, b_row, to, c_row); break;
            case 2: multiply_tile(2, depth, left, a_row, b + j, b_row, to, c_row); break;
            case 3: multiply_tile(THREE, depth, left, a_row, b + j, b_row, to, c_row); break;
            default: multiply_tile(WIDE, depth, left, a_row, b + j, b_row, to, c_row);
            }
        }
}

static inline vec silu(vec x) {
    vec power = select_(x < -88.0f, (vec){} + 88.0f, -x);
    return x / (exponential(power) + 1.0f);
}

static inline float sum_of(vec x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

// Convolve `count` channels of a chunk's tokens, from `channel` of the key head on, and apply SiLU.
static inline __attribute__((always_inline)) void convolve(
    const int is_bf16, const Layer *layer, const int64_t *rows, int tokens, int head, int channel,
    int count, float *to
) {
    int convolved = 2 * layer->keys + layer->repeats * layer->values;
    int width = convolved + layer->repeats * (layer->values + 2);
    for (int i = 0; i < tokens; i++)
        for (int c = 0; c < count; c += LANES) {
            vec sum = {};
            for (int tap = 0; tap < layer->taps; tap++) {
                if (rows[i + tap] < 0) continue;
                int64_t from = (rows[i + tap] * layer->heads + head) * width + channel + c;
                int64_t weight = (int64_t)(tap * layer->heads + head) * convolved + channel + c;
                sum += load_as(is_bf16, layer->mixed, from) * load(layer->weights + weight);
            }
            store(to + i * count + c, silu(sum));
        }
}

// Divide each row of `x [rows, channels]` by its L2 norm, and multiply it by `factor`.
static void normalize(float *x, int rows, int channels, float factor) {
    for (int i = 0; i < rows; i++, x += channels) {
        vec squares = {};
        for (int c = 0; c < channels; c += LANES) squares += load(x + c) * load(x + c);
        float scale = factor / sqrtf(sum_of(squares) + 1e-6f);
        for (int c = 0; c < channels; c += LANES) store(x + c, load(x + c) * scale);
    }
}

// to [rows, channels] = x [rows, channels], each row times its factor.
static void scale_rows(const float *x, const float *factors, int rows, int channels, float *to) {
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < channels; c += LANES)
            store(to + i * channels + c, load(x + i * channels + c) * factors[i]);
}

// Compute the queries and keys of a key head, and their products with the keys up to their own.
static inline __attribute__((always_inline)) void set_keys(
    const int is_bf16, const Layer *layer, Chunk *chunk, const int64_t *rows, int tokens,
    int filled, int head
) {
    int keys = layer->keys;
    convolve(is_bf16, layer, rows, tokens, head, 0, keys, chunk->query);
    convolve(is_bf16, layer, rows, tokens, head, keys, keys, chunk->key);
    normalize(chunk->query, tokens, keys, 1.0f / sqrtf(keys));
    normalize(chunk->key, tokens, keys, 1.0f);
    for (int i = tokens * keys; i < filled * keys; i++) chunk->query[i] = chunk->key[i] = 0;
    for (int i = 0; i < filled; i += LANES)
        for (int c = 0; c < keys; c += LANES) {
            vec square[LANES];
            for (int j = 0; j < LANES; j++) square[j] = load(chunk->key + (i + j) * keys + c);
            transpose(square);
            for (int j = 0; j < LANES; j++) store(chunk->turned + (c + j) * CHUNK + i, square[j]);
        }
    memset(chunk->of_query, 0, sizeof chunk->of_query);
    memset(chunk->of_key, 0, sizeof chunk->of_key);
    for (int i = 0; i < filled; i += HIGH) {
        int columns = (i + HIGH + LANES - 1) / LANES * LANES;
        multiply(HIGH, columns, keys, chunk->query + i * keys, keys, chunk->turned, CHUNK,
                 chunk->of_query[i], CHUNK);
        multiply(HIGH, columns, keys, chunk->key + i * keys, keys, chunk->turned, CHUNK,
                 chunk->of_key[i], CHUNK);
    }
}

// Compute the decays and write strengths of a value head, and with them the matrices `inner`, by
// which a token reads what the tokens up to it write, and `solved`, the negative of the triangular
// system's matrix without its diagonal of ones.
static inline __attribute__((always_inline)) void set_weights(
    const int is_bf16, const Layer *layer, Chunk *chunk, const int64_t *rows, int tokens,
    int filled, int head, int repeat
) {
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int repeats = layer->repeats, value_head = head * repeats + repeat;
    int behind = 2 * layer->keys + 2 * repeats * layer->values;
    int width = behind + 2 * repeats;
    float total = 0;
    for (int i = 0; i < filled; i++) {
        float strength = 0;
        if (i < tokens) {
            int64_t at = rows[layer->taps - 1 + i] * layer->heads + head;
            int64_t from = at * width + behind + repeat;
            strength = 1.0f / (1.0f + expf(-number(is_bf16, layer->mixed, from)));
            float rate = number(is_bf16, layer->mixed, from + repeats) + layer->biases[value_head];
            total -= layer->rates[value_head] * (rate > 20.0f ? rate : log1pf(expf(rate)));
        }
        chunk->strength[i] = strength;
        chunk->decay[i] = total;
    }
    ints lane;
    memcpy(&lane, numbers, sizeof lane);
    for (int i = 0; i < filled; i += LANES)
        store(chunk->from_start + i, exponential(load(chunk->decay + i)));
    for (int i = 0; i < filled; i++)
        for (int j = 0; j < i / HIGH * HIGH + HIGH; j += LANES) {
            vec between = exponential(chunk->decay[i] - load(chunk->decay + j));
            vec written = load(chunk->of_key[i] + j) * -chunk->strength[i] * between;
            vec read = load(chunk->of_query[i] + j) * between;
            store(chunk->solved[i] + j, select_(lane + j < i, written, (vec){}));
            store(chunk->inner[i] + j, select_(lane + j <= i, read, (vec){}));
        }
}

// Solve written = right + solved * written, in place, from the first token on.
static void solve(Chunk *chunk, int filled, int values) {
    for (int i = 0; i < filled; i += HIGH) {
        float *block = chunk->written + i * values;
        multiply(HIGH, values, i, chunk->solved[i], CHUNK, chunk->written, values, block, values);
        for (int row = 1; row < HIGH; row++)
            for (int c = 0; c < values; c += LANES) {
                vec sum = load(block + row * values + c);
                for (int j = 0; j < row; j++)
                    sum += chunk->solved[i + row][i + j] * load(block + j * values + c);
                store(block + row * values + c, sum);
            }
    }
}

// Norm a token's output, multiply it by SiLU of its gate, and store it.
static inline __attribute__((always_inline)) void norm_and_gate(
    const int is_bf16, const Layer *layer, const float *output, int64_t gate, int64_t to
) {
    int values = layer->values;
    vec squares = {};
    for (int c = 0; c < values; c += LANES) squares += load(output + c) * load(output + c);
    float scale = 1.0f / sqrtf(sum_of(squares) / values + layer->eps);
    for (int c = 0; c < values; c += LANES) {
        vec gated = silu(load_as(is_bf16, layer->mixed, gate + c));
        vec normed = load(output + c) * scale * load(layer->norm + c);
        store_as(is_bf16, layer->out, to + c, normed * gated);
    }
}

// Compute a chunk's outputs for one value head, and the state [keys, values] behind the chunk.
// before: the state in front of it, or NULL; after: NULL if nothing reads the state behind it.
static inline __attribute__((always_inline)) void advance_head(
    const int is_bf16, const Layer *layer, Chunk *chunk, const int64_t *rows, int tokens,
    int filled, int head, int repeat, const float *before, float *after
) {
    int keys = layer->keys, values = layer->values, channel = 2 * keys + repeat * values;
    set_weights(is_bf16, layer, chunk, rows, tokens, filled, head, repeat);
    convolve(is_bf16, layer, rows, tokens, head, channel, values, chunk->written);
    for (int i = 0; i < filled; i++)
        for (int c = 0; c < values; c += LANES) {
            vec value = i < tokens ? load(chunk->written + i * values + c) : (vec){};
            store(chunk->written + i * values + c, value * chunk->strength[i]);
            store(chunk->output + i * values + c, (vec){});
        }
    if (before) {
        float factors[CHUNK];
        for (int i = 0; i < filled; i++) factors[i] = -chunk->strength[i] * chunk->from_start[i];
        scale_rows(chunk->key, factors, filled, keys, chunk->scaled);
        multiply(filled, values, keys, chunk->scaled, keys, before, values, chunk->written, values);
        scale_rows(chunk->query, chunk->from_start, filled, keys, chunk->scaled);
        multiply(filled, values, keys, chunk->scaled, keys, before, values, chunk->output, values);
    }
    solve(chunk, filled, values);
    for (int i = 0; i < filled; i += HIGH)
        multiply(HIGH, values, i + HIGH, chunk->inner[i], CHUNK, chunk->written, values,
                 chunk->output + i * values, values);
    int convolved = 2 * keys + layer->repeats * values;
    int width = convolved + layer->repeats * (values + 2);
    for (int i = 0; i < tokens; i++) {
        int64_t row = rows[layer->taps - 1 + i], at = row * layer->heads + head;
        // A row that several chunks compute is written by one of them.
        if (layer->places[row] == (rows - layer->rows) / (layer->taps - 1 + CHUNK) * CHUNK + i)
            norm_and_gate(is_bf16, layer, chunk->output + i * values,
                          at * width + convolved + repeat * values,
                          (at * layer->repeats + repeat) * values);
    }
    if (!after) return;
    float last = chunk->decay[CHUNK - 1], factor = chunk->from_start[CHUNK - 1];
    for (int i = 0; i < keys * values; i += LANES)
        store(after + i, before ? load(before + i) * factor : (vec){});
    for (int i = 0; i < CHUNK; i++) {
        vec to_end = exponential((vec){} + (last - chunk->decay[i]));
        for (int c = 0; c < values; c += LANES)
            store(chunk->written + i * values + c, load(chunk->written + i * values + c) * to_end);
    }
    multiply(keys, values, CHUNK, chunk->turned, CHUNK, chunk->written, values, after, values);
}

static inline __attribute__((always_inline)) void advance_chunk(
    const int is_bf16, const Layer *layer, const int64_t *rows, int head, const float *before,
    float *after
) {
    Chunk chunk;
    int tokens = 0;
    while (tokens < CHUNK && rows[layer->taps - 1 + tokens] >= 0) tokens++;
    int filled = (tokens + LANES - 1) / LANES * LANES;
    set_keys(is_bf16, layer, &chunk, rows, tokens, filled, head);
    for (int repeat = 0; repeat < layer->repeats; repeat++) {
        int64_t place = (int64_t)repeat * layer->keys * layer->values;
        advance_head(is_bf16, layer, &chunk, rows, tokens, filled, head, repeat,
                     before ? before + place : NULL, tokens == CHUNK ? after + place : NULL);
    }
}

// Compute `count` chunks from number `first` on: their rows of `out`, and the states behind those
// that are whole, `after [count, heads, repeats, keys, values]`. Chunk i reads the state of number
// parents[i] in `before`, which is NULL if all begin without a state.
void advance(
    const Layer *layer, int64_t first, int count, const int64_t *parents, const float *before,
    float *after, int threads
) {
    int64_t size = (int64_t)layer->repeats * layer->keys * layer->values;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int work = 0; work < count * layer->heads; work++) {
        int chunk = work / layer->heads, head = work % layer->heads;
        const int64_t *rows = layer->rows + (first + chunk) * (layer->taps - 1 + CHUNK);
        const float *from = before ? before + (parents[chunk] * layer->heads + head) * size : NULL;
        float *to = after + ((int64_t)chunk * layer->heads + head) * size;
        if (layer->is_bf16)
            advance_chunk(1, layer, rows, head, from, to);
        else
            advance_chunk(0, layer, rows, head, from, to);
    }
}
