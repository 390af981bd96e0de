/* What a transformer's layer computes between its products, in one pass each, in bfloat16. For processors with AVX512-BF16.
 *
 * `norm`: output = layer norm(dropout(input + bias) + residual). `gelu`: output = GELU(input + bias), the exact one.
 *
 * Tensors have shape (rows, columns), contiguous, with a multiple of 32 columns. Sums over rows have a part for each thread. Backward of
 * `norm` draws the bits of dropout again, and reads the normalized rows that forward keeps.
 */
#include <math.h>
#include <omp.h>

#include "vectors.h"

struct layer {
    int64_t rows, columns;
    const bf16 *input;
    const float *bias; /* (columns,), or NULL: none */
    bf16 *output;
    const bf16 *output_grad;
    bf16 *input_grad;
    float *sums; /* (threads, 3, columns), zero: gradients of bias, weight and shift */
    const bf16 *residual;
    const float *weight, *shift; /* of the norm: (columns,) */
    bf16 *normal;                /* normalized rows */
    float *factors;              /* (rows,): 1 / standard deviation */
    bf16 *residual_grad;
    float epsilon;
    uint32_t drop; /* an element is dropped if its 16 random bits are below this */
    uint64_t seed;
    int32_t threads;
};

INLINE __m512 biased(const struct layer *layer, int64_t row, int64_t column) {
    __m512 sum = widen(layer->input + row * layer->columns + column);
    return layer->bias ? _mm512_add_ps(sum, _mm512_loadu_ps(layer->bias + column)) : sum;
}

INLINE void accumulate(float *to, __m512 term) { _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), term)); }

void norm_forward(struct layer *layer) {
    const int64_t columns = layer->columns;
    const float scale = dropout_scale(layer->drop), share = 1.0f / (float)columns;
#pragma omp parallel for num_threads(layer->threads) schedule(static)
    for (int64_t row = 0; row < layer->rows; row++) {
        float sum[columns]; /* stays in the first-level cache */
        __m512 total = splat(0), squares = splat(0);
        for (int64_t c = 0; c < columns; c += 32) {
            const __mmask32 kept = draw_kept(layer->seed, (uint64_t)(row * columns + c) / 32, layer->drop);
            for (int64_t half = 0; half < 2; half++) {
                const int64_t column = c + 16 * half;
                __m512 residual = widen(layer->residual + row * columns + column);
                __m512 added = _mm512_mask3_fmadd_ps(biased(layer, row, column), splat(scale), residual, (__mmask16)(kept >> 16 * half)); /* or the residual */
                _mm512_storeu_ps(sum + column, added);
                total = _mm512_add_ps(total, added);
            }
        }
        const __m512 mean = splat(_mm512_reduce_add_ps(total) * share);
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 centered = _mm512_sub_ps(_mm512_loadu_ps(sum + c), mean);
            squares = _mm512_fmadd_ps(centered, centered, squares);
        }
        const float factor = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) * share + layer->epsilon);
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 normal = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(sum + c), mean), splat(factor));
            if (layer->normal) narrow(layer->normal + row * columns + c, normal);
            narrow(layer->output + row * columns + c, _mm512_fmadd_ps(normal, _mm512_loadu_ps(layer->weight + c), _mm512_loadu_ps(layer->shift + c)));
        }
        layer->factors[row] = factor;
    }
}

void norm_backward(struct layer *layer) {
    const int64_t columns = layer->columns;
    const float scale = dropout_scale(layer->drop), share = 1.0f / (float)columns;
#pragma omp parallel for num_threads(layer->threads) schedule(static)
    for (int64_t row = 0; row < layer->rows; row++) {
        float *sums = layer->sums + omp_get_thread_num() * 3 * columns;
        const bf16 *grads = layer->output_grad + row * columns, *normals = layer->normal + row * columns;
        __m512 total = splat(0), along = splat(0);
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 grad = widen(grads + c), normal = widen(normals + c), weighted = _mm512_mul_ps(grad, _mm512_loadu_ps(layer->weight + c));
            accumulate(sums + columns + c, _mm512_mul_ps(grad, normal));
            accumulate(sums + 2 * columns + c, grad);
            total = _mm512_add_ps(total, weighted);
            along = _mm512_fmadd_ps(weighted, normal, along);
        }
        const __m512 mean = splat(_mm512_reduce_add_ps(total) * share), slope = splat(_mm512_reduce_add_ps(along) * share);
        for (int64_t c = 0; c < columns; c += 32) {
            const __mmask32 kept = draw_kept(layer->seed, (uint64_t)(row * columns + c) / 32, layer->drop);
            for (int64_t half = 0; half < 2; half++) {
                const int64_t column = c + 16 * half;
                __m512 grad = _mm512_fmsub_ps(widen(grads + column), _mm512_loadu_ps(layer->weight + column), mean);
                grad = _mm512_mul_ps(_mm512_fnmadd_ps(widen(normals + column), slope, grad), splat(layer->factors[row]));
                narrow(layer->residual_grad + row * columns + column, grad);
                grad = _mm512_maskz_mul_ps((__mmask16)(kept >> 16 * half), grad, splat(scale));
                narrow(layer->input_grad + row * columns + column, grad);
                accumulate(sums + column, grad);
            }
        }
    }
}

/* exp(-x^2 / 2), and the share of a normal distribution below x: Abramowitz and Stegun, 1964, 7.1.26, error below 8e-8. */
INLINE __m512 share_below(__m512 x, __m512 *bell) {
    const __m512 size = _mm512_abs_ps(x);
    *bell = exp2_of(_mm512_mul_ps(_mm512_mul_ps(x, x), splat(-0.72134752f)));
    const __m512 t = _mm512_div_ps(splat(1.0f), _mm512_fmadd_ps(size, splat(0.3275911f * 0.70710678f), splat(1.0f)));
    __m512 tail = splat(1.061405429f);
    tail = _mm512_fmadd_ps(tail, t, splat(-1.453152027f));
    tail = _mm512_fmadd_ps(tail, t, splat(1.421413741f));
    tail = _mm512_fmadd_ps(tail, t, splat(-0.284496736f));
    tail = _mm512_fmadd_ps(tail, t, splat(0.254829592f));
    tail = _mm512_mul_ps(_mm512_mul_ps(tail, t), _mm512_mul_ps(*bell, splat(0.5f)));
    return _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, splat(0), _CMP_GT_OQ), splat(1.0f), tail);
}

void gelu_forward(struct layer *layer) {
    const int64_t columns = layer->columns;
#pragma omp parallel for num_threads(layer->threads) schedule(static)
    for (int64_t row = 0; row < layer->rows; row++)
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 bell, x = biased(layer, row, c);
            narrow(layer->output + row * columns + c, _mm512_mul_ps(x, share_below(x, &bell)));
        }
}

void gelu_backward(struct layer *layer) {
    const int64_t columns = layer->columns;
#pragma omp parallel for num_threads(layer->threads) schedule(static)
    for (int64_t row = 0; row < layer->rows; row++) {
        float *sums = layer->sums + omp_get_thread_num() * 3 * columns;
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 bell, x = biased(layer, row, c), share = share_below(x, &bell);
            __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(x, splat(0.39894228f)), bell, share);
            __m512 grad = _mm512_mul_ps(widen(layer->output_grad + row * columns + c), slope);
            narrow(layer->input_grad + row * columns + c, grad);
            accumulate(sums + c, grad);
        }
    }
}
