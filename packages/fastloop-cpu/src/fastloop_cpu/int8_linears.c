/* Linear layers with weights and activations of 8 bits: output = input * weight^T + bias. For processors with AVX512-VNNI.
 *
 * Weights have a scale for each output column. Each row of the input gets a scale and a zero point when its block of rows is packed, so that
 * its smallest number is 0 and its largest 255:
 *
 *     input[r][k] = scale[r] * (packed[r][k] - zero[r])            weight[c][k] = scales[c] * whole[c][k]
 *     output[r][c] = scale[r] * scales[c] * (sum_k packed[r][k] * whole[c][k] - zero[r] * sums[c]) + bias[c]
 *
 * An instruction adds four products of u8 and s8 to a sum of 32 bits. A tile is 6 rows by 64 columns: 24 registers hold its sums.
 */
#include <float.h>
#include <omp.h>
#include <stdbool.h>
#include <string.h>

#include "vectors.h"

enum {
    ROWS = 6,     /* of a tile */
    VECTORS = 4,  /* of 16 columns in a tile */
    PANEL = 16 * VECTORS,
    BLOCK = 48,   /* rows that are packed at once: they stay in the second-level cache beside a panel of weights */
};

/* The least range of a row that is not taken as 0: 255 / range has to be finite. */
#define SMALLEST 1e-30f

struct linear {
    int64_t rows, inner, columns;
    const void *input;    /* (rows, inner), contiguous: bf16 or float32 */
    const int8_t *weight; /* (columns / 64, inner / 4, 64, 4): panels of 64 columns, each with the numbers that an instruction reads */
    const float *scales;  /* (columns,) */
    const int32_t *sums;  /* (columns,): of the whole numbers of a column */
    const float *bias;    /* (columns,), or NULL: none */
    void *output;         /* (rows, columns), contiguous: bf16 or float32 */
    uint8_t *packed;      /* (threads, 48, inner) */
    int32_t wide_input, wide_output, threads; /* wide: float32 instead of bf16 */
};

INLINE __m512 read(const struct linear *linear, int64_t place) {
    return linear->wide_input ? _mm512_loadu_ps((const float *)linear->input + place) : widen((const bf16 *)linear->input + place);
}

/* Pack a row. If it has a number that is not finite, its scale is NaN, and its output too. */
INLINE void pack_row(const struct linear *linear, int64_t row, uint8_t *to, float *scale, int32_t *zero) {
    const int64_t first = row * linear->inner;
    __m512 low = splat(0), high = splat(0), check = splat(0);
    for (int64_t k = 0; k < linear->inner; k += 16) {
        __m512 numbers = read(linear, first + k);
        low = _mm512_min_ps(low, numbers);
        high = _mm512_max_ps(high, numbers);
        check = _mm512_fmadd_ps(numbers, splat(0), check); /* 0, or NaN for an infinite number and for NaN */
    }
    const float least = _mm512_reduce_min_ps(low), range = _mm512_reduce_max_ps(high) - least, invalid = _mm512_reduce_add_ps(check);
    const bool usable = invalid == 0 && range > SMALLEST && range <= FLT_MAX; /* else every packed number is 0 */
    const float factor = usable ? 255.0f / range : 0.0f;
    *zero = usable ? (int32_t)(0.5f - least * factor) : 0;
    *scale = range / 255.0f + invalid;
    const __m512 shift = splat((float)*zero);
    for (int64_t k = 0; k < linear->inner; k += 16) {
        __m512i whole = _mm512_setzero_si512();
        if (usable) whole = _mm512_max_epi32(whole, _mm512_cvtps_epi32(_mm512_fmadd_ps(read(linear, first + k), splat(factor), shift)));
        _mm_storeu_si128((__m128i *)(to + k), _mm512_cvtusepi32_epi8(whole)); /* at most 255 */
    }
}

/* The sums of a tile. `rows`: 6 packed rows. `panel`: the weights of its columns. */
INLINE void multiply(const uint8_t *rows, const int8_t *panel, int64_t inner, __m512i sums[ROWS][VECTORS]) {
    __m512i total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = _mm512_setzero_si512();
    for (int64_t k = 0; k < inner; k += 4) {
        __m512i weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = _mm512_loadu_si512(panel + PANEL * k + 64 * v);
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            memcpy(&four, rows + r * inner + k, 4);
            const __m512i numbers = _mm512_set1_epi32(four);
            for (int v = 0; v < VECTORS; v++) total[r][v] = _mm512_dpbusd_epi32(total[r][v], numbers, weights[v]);
        }
    }
    memcpy(sums, total, sizeof(total));
}

INLINE void store(const struct linear *linear, int64_t row, int64_t column, __m512i sums, float scale, int32_t zero) {
    const __m512i known = _mm512_mullo_epi32(_mm512_set1_epi32(zero), _mm512_loadu_si512(linear->sums + column));
    const __m512 factor = _mm512_mul_ps(splat(scale), _mm512_loadu_ps(linear->scales + column));
    const __m512 bias = linear->bias ? _mm512_loadu_ps(linear->bias + column) : splat(0);
    __m512 result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, known)), factor, bias);
    const int64_t place = row * linear->columns + column;
    if (linear->wide_output)
        _mm512_storeu_ps((float *)linear->output + place, result);
    else
        narrow((bf16 *)linear->output + place, result);
}

void linear_forward(struct linear *linear) {
    const int64_t rows = linear->rows, inner = linear->inner;
    if (!rows) return;
    int64_t block = (rows + linear->threads - 1) / linear->threads;
    block = (block + ROWS - 1) / ROWS * ROWS; /* every thread has work: 32 rows on 4 threads are blocks of 12 rows */
    if (block > BLOCK) block = BLOCK;
#pragma omp parallel for num_threads(linear->threads) schedule(static)
    for (int64_t first = 0; first < rows; first += block) {
        uint8_t *packed = linear->packed + omp_get_thread_num() * BLOCK * inner;
        const int64_t count = rows - first < block ? rows - first : block;
        float scales[BLOCK];
        int32_t zeros[BLOCK];
        for (int64_t r = 0; r < count; r++) pack_row(linear, first + r, packed + r * inner, scales + r, zeros + r);
        for (int64_t column = 0; column < linear->columns; column += PANEL)
            for (int64_t tile = 0; tile < count; tile += ROWS) {
                __m512i sums[ROWS][VECTORS];
                multiply(packed + tile * inner, linear->weight + column * inner, inner, sums); /* rows after the last one are not stored */
                for (int64_t r = 0; r < ROWS && tile + r < count; r++)
                    for (int v = 0; v < VECTORS; v++)
                        store(linear, first + tile + r, column + 16 * v, sums[r][v], scales[tile + r], zeros[tile + r]);
            }
    }
}
