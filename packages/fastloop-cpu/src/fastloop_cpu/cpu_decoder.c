/* What a decoder's layer computes between its products, in one pass each, in bfloat16. For processors with AVX512-BF16.
 *
 * `rms_norm`: sum = input + branch, output = sum / sqrt(mean(sum^2) + epsilon) * weight. `gate`: output = silu(gate) * up.
 * `rotate`: rotary position embedding of heads whose first half of features is paired with the second half.
 *
 * Tensors are contiguous, with a multiple of 32 columns. The residual stream (input, sum and their gradients) is float32.
 */
#include <math.h>
#include <omp.h>

#include "vectors.h"

struct norm {
    int64_t rows, columns;
    const void *input;   /* float32, or bf16 if `narrow_input`: heads before they are rotated */
    const bf16 *branch;  /* what is added to input, or NULL: nothing, and there is no sum */
    float *sum;
    const float *weight; /* (columns,) */
    bf16 *output;
    bf16 *normal;        /* rows before weight, or NULL: there is no backward */
    float *factors;      /* (rows,): 1 / root of the mean square */
    const bf16 *output_grad;
    const void *sum_grad; /* as input: the gradient of sum, or of input that is used elsewhere, too; or NULL: it is used in the norm only */
    void *input_grad;      /* as input */
    bf16 *branch_grad;     /* the same numbers in bf16, or NULL */
    float *weight_grads;   /* (threads, columns), zero; or NULL: weight is frozen */
    float epsilon;
    int32_t narrow_input, threads;
};

struct gate {
    int64_t numbers; /* a multiple of 16 */
    const bf16 *gate, *up;
    bf16 *output;
    const bf16 *output_grad;
    bf16 *gate_grad, *up_grad;
    int32_t threads;
};

struct rotate {
    int64_t tokens, heads, size; /* features of a head */
    int64_t angles;              /* rows of cos and sin; token t has those of row t % angles */
    const bf16 *input;
    const float *cos, *sin; /* (angles, size) */
    bf16 *output;
    int32_t backward, threads; /* backward: input is the gradient of output, and output that of input */
};

INLINE __m512 load(const void *from, int64_t place, const int is_narrow) {
    return is_narrow ? widen((const bf16 *)from + place) : _mm512_loadu_ps((const float *)from + place);
}

INLINE void store(void *to, int64_t place, __m512 numbers, const int is_narrow) {
    if (is_narrow) narrow((bf16 *)to + place, numbers);
    else _mm512_storeu_ps((float *)to + place, numbers);
}

INLINE void norm_row(struct norm *norm, int64_t row, const int is_narrow) {
    const int64_t columns = norm->columns, first = row * columns;
    float sum[columns]; /* stays in the first-level cache */
    __m512 squares = splat(0);
    for (int64_t c = 0; c < columns; c += 16) {
        __m512 added = load(norm->input, first + c, is_narrow);
        if (norm->branch) {
            added = _mm512_add_ps(added, widen(norm->branch + first + c));
            _mm512_storeu_ps(norm->sum + first + c, added);
        }
        _mm512_storeu_ps(sum + c, added);
        squares = _mm512_fmadd_ps(added, added, squares);
    }
    const float factor = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)columns + norm->epsilon);
    for (int64_t c = 0; c < columns; c += 16) {
        __m512 normal = _mm512_mul_ps(_mm512_loadu_ps(sum + c), splat(factor));
        if (norm->normal) narrow(norm->normal + first + c, normal);
        narrow(norm->output + first + c, _mm512_mul_ps(normal, _mm512_loadu_ps(norm->weight + c)));
    }
    norm->factors[row] = factor;
}

INLINE void norm_row_backward(struct norm *norm, int64_t row, const int is_narrow) {
    const int64_t columns = norm->columns, first = row * columns;
    const bf16 *grads = norm->output_grad + first, *normals = norm->normal + first;
    float *weight_grad = norm->weight_grads ? norm->weight_grads + omp_get_thread_num() * columns : NULL;
    __m512 along = splat(0);
    for (int64_t c = 0; c < columns; c += 16) {
        __m512 product = _mm512_mul_ps(widen(grads + c), widen(normals + c));
        if (weight_grad) _mm512_storeu_ps(weight_grad + c, _mm512_add_ps(_mm512_loadu_ps(weight_grad + c), product));
        along = _mm512_fmadd_ps(product, _mm512_loadu_ps(norm->weight + c), along);
    }
    const __m512 slope = splat(_mm512_reduce_add_ps(along) / (float)columns), factor = splat(norm->factors[row]);
    for (int64_t c = 0; c < columns; c += 16) {
        __m512 grad = _mm512_mul_ps(widen(grads + c), _mm512_loadu_ps(norm->weight + c));
        grad = _mm512_mul_ps(_mm512_fnmadd_ps(widen(normals + c), slope, grad), factor);
        if (norm->sum_grad) grad = _mm512_add_ps(grad, load(norm->sum_grad, first + c, is_narrow));
        store(norm->input_grad, first + c, grad, is_narrow);
        if (norm->branch_grad) narrow(norm->branch_grad + first + c, grad);
    }
}

void rms_norm_forward(struct norm *norm) {
#pragma omp parallel for num_threads(norm->threads) schedule(static)
    for (int64_t row = 0; row < norm->rows; row++)
        if (norm->narrow_input) norm_row(norm, row, 1);
        else norm_row(norm, row, 0);
}

void rms_norm_backward(struct norm *norm) {
#pragma omp parallel for num_threads(norm->threads) schedule(static)
    for (int64_t row = 0; row < norm->rows; row++)
        if (norm->narrow_input) norm_row_backward(norm, row, 1);
        else norm_row_backward(norm, row, 0);
}

/* 1 / (1 + exp(-x)) */
INLINE __m512 sigmoid(__m512 x) {
    const __m512 power = exp2_of(_mm512_mul_ps(_mm512_abs_ps(x), splat(-1.44269504f)));
    const __mmask16 positive = _mm512_cmp_ps_mask(x, splat(0), _CMP_GE_OQ);
    return _mm512_div_ps(_mm512_mask_mov_ps(power, positive, splat(1.0f)), _mm512_add_ps(power, splat(1.0f)));
}

void gate_forward(struct gate *gate) {
#pragma omp parallel for num_threads(gate->threads) schedule(static)
    for (int64_t i = 0; i < gate->numbers; i += 16) {
        __m512 x = widen(gate->gate + i);
        narrow(gate->output + i, _mm512_mul_ps(_mm512_mul_ps(x, sigmoid(x)), widen(gate->up + i)));
    }
}

void gate_backward(struct gate *gate) {
#pragma omp parallel for num_threads(gate->threads) schedule(static)
    for (int64_t i = 0; i < gate->numbers; i += 16) {
        __m512 x = widen(gate->gate + i), share = sigmoid(x), grad = widen(gate->output_grad + i);
        __m512 silu = _mm512_mul_ps(x, share);
        __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(splat(1.0f), share), share); /* share + x share (1 - share) */
        narrow(gate->up_grad + i, _mm512_mul_ps(grad, silu));
        narrow(gate->gate_grad + i, _mm512_mul_ps(_mm512_mul_ps(grad, widen(gate->up + i)), slope));
    }
}

void rotate(struct rotate *rotate) {
    const int64_t half = rotate->size / 2;
#pragma omp parallel for num_threads(rotate->threads) schedule(static)
    for (int64_t token = 0; token < rotate->tokens; token++) {
        const float *cos = rotate->cos + token % rotate->angles * rotate->size, *sin = rotate->sin + token % rotate->angles * rotate->size;
        for (int64_t head = 0; head < rotate->heads; head++) {
            const bf16 *from = rotate->input + (token * rotate->heads + head) * rotate->size;
            bf16 *to = rotate->output + (token * rotate->heads + head) * rotate->size;
            for (int64_t f = 0; f < half; f += 16) {
                const __m512 first = widen(from + f), second = widen(from + half + f);
                const __m512 cos_first = _mm512_loadu_ps(cos + f), cos_second = _mm512_loadu_ps(cos + half + f);
                const __m512 sin_first = _mm512_loadu_ps(sin + f), sin_second = _mm512_loadu_ps(sin + half + f);
                if (rotate->backward) {
                    narrow(to + f, _mm512_fmadd_ps(second, sin_second, _mm512_mul_ps(first, cos_first)));
                    narrow(to + half + f, _mm512_fnmadd_ps(first, sin_first, _mm512_mul_ps(second, cos_second)));
                } else {
                    narrow(to + f, _mm512_fnmadd_ps(second, sin_first, _mm512_mul_ps(first, cos_first)));
                    narrow(to + half + f, _mm512_fmadd_ps(first, sin_second, _mm512_mul_ps(second, cos_second)));
                }
            }
        }
    }
}
