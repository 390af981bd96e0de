/* Attention over a row of sequences: forward and backward, with dropout, in bfloat16. For processors with AVX512-BF16.
 *
 * Method: FlashAttention-2 (Dao, 2023) for a CPU. A task is one head of one sequence. It computes a block of query rows at a time, so
 * scores stay in the core's cache. Backward computes the probabilities again, from the log-sum-exp that forward keeps.
 *
 * Layout: token t and head h of a tensor begin at t * token + h * head elements, and the features of a head are contiguous.
 *
 * Products are those of oneDNN, which torch exports: they use AMX where the processor has it. They sum over two bf16 numbers at a time,
 * so the second operand is packed in pairs: "pairs of features" for scores, "pairs of rows" for sums over rows.
 *
 * Dropout: backward draws the bits of forward again, so no mask is kept.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

enum {
    ROWS = 64, /* query rows of a block: their scores stay in the second-level cache */
    TILE = 32, /* the block of the last rows has a multiple of this: an instruction of AMX sums over 32 numbers */
    STEP = 64, /* keys are padded to a multiple of this, so that products have few shapes: oneDNN compiles each */
};

struct view {
    bf16 *data;
    int64_t token, head; /* strides, in elements */
};

/* to = first * second, added to what is there if `adds`. Shapes: (rows, inner) * (inner, columns), with strides in numbers, or in pairs
 * of numbers for the second operand, whose rows 2i and 2i + 1 are pairs. */
typedef void product(int64_t rows, int64_t columns, int64_t inner, int64_t first_stride, int64_t second_stride, int64_t to_stride, bool adds,
                     const bf16 *first, const bf16 *second, float *to, bool pairs);

struct row {
    int64_t sequences, heads, key_heads;
    const int32_t *query_ends, *key_ends; /* (sequences + 1,): 0, then the end of each sequence */
    struct view query, key, value, output, output_grad, query_grad, key_grad, value_grad;
    float *log_sums;   /* (query rows, heads): base-2 log of each row's sum of exponentials */
    float scale;
    uint32_t drop;     /* an element is dropped if its 16 random bits are below this */
    uint64_t seed;
    int32_t causal, threads;
    product *multiply;
    void (*release)(bool pairs); /* ends the use of `multiply` in a thread */
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t padded(int64_t tokens, int64_t step) { return (tokens + step - 1) / step * step; }

INLINE bf16 *at(const struct view *view, int64_t token, int64_t head) { return view->data + token * view->token + head * view->head; }

INLINE __m512i narrow_two(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* Which of 32 keys are kept for a query row: bit i is the key first + i. */
INLINE __mmask32 kept(const struct row *row, int64_t query, int64_t head, int64_t first) {
    uint64_t position = (((uint64_t)query * (uint64_t)row->heads + (uint64_t)head) << 20) | (uint64_t)(first / 32);
    return draw_kept(row->seed, position, row->drop);
}

/* Transpose 16 rows of 16 numbers of 32 bits. */
INLINE void transpose_tile(__m512i rows[16]) {
    __m512i part[16];
    for (int i = 0; i < 16; i += 2) {
        part[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        part[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) /* lane k of rows[i + c]: column 4k + c of the rows i to i + 3 */
        for (int c = 0; c < 4; c += 2) {
            rows[i + c] = _mm512_unpacklo_epi64(part[i + c / 2], part[i + 2 + c / 2]);
            rows[i + c + 1] = _mm512_unpackhi_epi64(part[i + c / 2], part[i + 2 + c / 2]);
        }
    for (int c = 0; c < 4; c++) {
        __m512i even[2], odd[2];
        for (int half = 0; half < 2; half++) {
            even[half] = _mm512_shuffle_i32x4(rows[8 * half + c], rows[8 * half + 4 + c], 0x88);
            odd[half] = _mm512_shuffle_i32x4(rows[8 * half + c], rows[8 * half + 4 + c], 0xdd);
        }
        part[c] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        part[4 + c] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        part[8 + c] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        part[12 + c] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
    memcpy(rows, part, sizeof(part));
}

/* Pairs of features: to[i][t] = features 2i and 2i + 1 of token t. Tokens up to width are zero. */
INLINE void pack_features(uint32_t *to, const bf16 *from, int64_t stride, int64_t tokens, int64_t width, const int size) {
    for (int64_t token = 0; token < width; token += 16)
        for (int i = 0; i < size / 2; i += 16) {
            __m512i rows[16];
            for (int t = 0; t < 16; t++)
                rows[t] = token + t < tokens ? _mm512_loadu_si512(from + (token + t) * stride + 2 * i) : _mm512_setzero_si512();
            transpose_tile(rows);
            for (int t = 0; t < 16; t++) _mm512_storeu_si512(to + (i + t) * width + token, rows[t]);
        }
}

/* Pairs of rows: to[t][f] = feature f of the tokens 2t and 2t + 1. Tokens up to width are zero. */
INLINE void pack_rows(uint32_t *to, const bf16 *from, int64_t stride, int64_t tokens, int64_t width, const int size) {
    for (int64_t pair = 0; pair < width / 2; pair++)
        for (int f = 0; f < size; f += 16) {
            __m512i even = _mm512_setzero_si512(), odd = even;
            if (2 * pair < tokens) even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + 2 * pair * stride + f)));
            if (2 * pair + 1 < tokens) odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + (2 * pair + 1) * stride + f)));
            _mm512_storeu_si512(to + pair * size + f, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

INLINE void store_scaled(struct view *view, int64_t token, int64_t head, const float *from, int64_t tokens, float factor, const int size) {
    for (int64_t t = 0; t < tokens; t++)
        for (int f = 0; f < size; f += 16) narrow(at(view, token + t, head) + f, _mm512_mul_ps(_mm512_loadu_ps(from + t * size + f), _mm512_set1_ps(factor)));
}

/* The same from features of tokens: from[f][t], with rows of `width` tokens. */
INLINE void store_transposed(struct view *view, int64_t token, int64_t head, const float *from, int64_t width, int64_t tokens, float factor, const int size) {
    for (int64_t first = 0; first < tokens; first += 16)
        for (int f = 0; f < size; f += 16) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(from + (f + i) * width + first);
            transpose_tile(rows);
            for (int t = 0; t < 16 && first + t < tokens; t++)
                narrow(at(view, token + first + t, head) + f, _mm512_mul_ps(_mm512_castsi512_ps(rows[t]), _mm512_set1_ps(factor)));
        }
}

/* Transpose a block of rows: to[f][r] = from[r][f]. */
INLINE void transpose(bf16 *to, const bf16 *from, const int size) {
    for (int first = 0; first < ROWS; first += 16)
        for (int f = 0; f < size; f += 32) {
            __m512i pairs[16];
            for (int r = 0; r < 16; r++) pairs[r] = _mm512_loadu_si512(from + (first + r) * size + f);
            transpose_tile(pairs);
            for (int i = 0; i < 16; i++) {
                _mm256_storeu_si256((__m256i *)(to + (f + 2 * i) * ROWS + first), _mm512_cvtepi32_epi16(pairs[i]));
                _mm256_storeu_si256((__m256i *)(to + (f + 2 * i + 1) * ROWS + first), _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs[i], 16)));
            }
        }
}

/* Copy query rows; rows up to ROWS are zero. */
INLINE void load_rows(bf16 *to, const struct view *view, int64_t token, int64_t head, int64_t rows, const int size) {
    for (int64_t r = 0; r < ROWS; r++)
        if (r < rows) memcpy(to + r * size, at(view, token + r, head), (size_t)size * 2);
        else memset(to + r * size, 0, (size_t)size * 2);
}

/* The 16 lanes, of those that begin at key first, that are before key limit. */
INLINE __mmask16 before(int64_t first, int64_t limit) {
    return _mm512_cmplt_epi32_mask(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32((int)(limit - first)));
}

struct task {
    int64_t query, queries, key, keys, width; /* first token and number of tokens; keys padded to STEP */
};

INLINE struct task task_of(const struct row *row, int64_t sequence) {
    struct task task = {row->query_ends[sequence], 0, row->key_ends[sequence], 0, 0};
    task.queries = row->query_ends[sequence + 1] - task.query;
    task.keys = row->key_ends[sequence + 1] - task.key;
    task.width = padded(most(task.keys, 1), STEP);
    return task;
}

/* Keys that query row r of a sequence attends to. */
INLINE int64_t visible(const struct row *row, const struct task *task, int64_t r) {
    if (r >= task->queries) return 0;
    int64_t limit = row->causal ? r + 1 + task->keys - task->queries : task->keys;
    return limit < 0 ? 0 : limit;
}

INLINE void forward_task(struct row *row, int64_t sequence, int64_t head, char *memory, const int size) {
    const struct task task = task_of(row, sequence);
    const int64_t width = task.width, key_head = head / (row->heads / row->key_heads);
    const float to_log2 = row->scale * 1.44269504f, undropped = dropout_scale(row->drop);
    uint32_t *keys = (uint32_t *)memory, *values = keys + width * size / 2;
    float *raw = (float *)(values + width * size / 2), *sums = raw + ROWS * width;
    bf16 *weights = (bf16 *)(sums + ROWS * size), *rows = weights + ROWS * width;
    pack_features(keys, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    pack_rows(values, at(&row->value, task.key, key_head), row->value.token, task.keys, width, size);
    for (int64_t block = 0; block < task.queries; block += ROWS) {
        const int64_t count = least(ROWS, task.queries - block), used = padded(count, TILE);
        const int64_t columns = padded(most(visible(row, &task, block + count - 1), 1), STEP);
        float factors[ROWS];
        load_rows(rows, &row->query, task.query + block, head, count, size);
        row->multiply(used, columns, size, size, width, width, false, rows, (bf16 *)keys, raw, true);
        for (int64_t r = 0; r < count; r++) {
            const float *from = raw + r * width;
            const int64_t limit = visible(row, &task, block + r);
            __m512 largest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
            for (int64_t j = 0; j < limit; j += 16) largest = _mm512_mask_max_ps(largest, before(j, limit), largest, _mm512_loadu_ps(from + j));
            const float peak = limit ? _mm512_reduce_max_ps(largest) * to_log2 : 0.0f;
            for (int64_t j = 0; j < columns; j += 32) {
                __m512 parts[2];
                for (int n = 0; n < 2; n++) {
                    __m512 power = _mm512_fmsub_ps(_mm512_loadu_ps(from + j + 16 * n), _mm512_set1_ps(to_log2), _mm512_set1_ps(peak));
                    parts[n] = _mm512_maskz_mov_ps(before(j + 16 * n, limit), exp2_of(power));
                    total = _mm512_add_ps(total, parts[n]);
                }
                __m512i both = narrow_two(parts[0], parts[1]);
                _mm512_storeu_si512(weights + r * width + j, _mm512_maskz_mov_epi16(kept(row, task.query + block + r, head, j), both));
            }
            const float sum = _mm512_reduce_add_ps(total);
            factors[r] = limit ? undropped / sum : 0.0f;
            row->log_sums[(task.query + block + r) * row->heads + head] = limit ? peak + log2f(sum) : INFINITY;
        }
        row->multiply(used, size, columns, width, size, size, false, weights, (bf16 *)values, sums, true);
        for (int64_t r = 0; r < count; r++) store_scaled(&row->output, task.query + block + r, head, sums + r * size, 1, factors[r], size);
    }
}

INLINE void backward_task(struct row *row, int64_t sequence, int64_t key_head, char *memory, const int size) {
    const struct task task = task_of(row, sequence);
    const int64_t width = task.width, group = row->heads / row->key_heads;
    const float to_log2 = row->scale * 1.44269504f, undropped = dropout_scale(row->drop);
    const __m512i interleave = _mm512_add_epi16( /* 0, 32, 1, 33, ...: element i of one vector, then of the other */
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47)),
        _mm512_setzero_si512());
    uint32_t *keys = (uint32_t *)memory, *values = keys + width * size / 2, *key_rows = values + width * size / 2;
    uint32_t *weight_pairs = key_rows + width * size / 2, *grad_pairs = weight_pairs + ROWS / 2 * width;
    float *raw = (float *)(grad_pairs + ROWS / 2 * width), *raw_grads = raw + ROWS * width, *of_query = raw_grads + ROWS * width;
    float *of_key = of_query + ROWS * size, *of_value = of_key + width * size; /* (size, width) */
    bf16 *grads = (bf16 *)(of_value + width * size), *rows = grads + ROWS * width, *outer = rows + ROWS * size;
    bf16 *features = outer + ROWS * size; /* (size, ROWS) */
    pack_features(keys, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    pack_features(values, at(&row->value, task.key, key_head), row->value.token, task.keys, width, size);
    pack_rows(key_rows, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    memset(of_key, 0, sizeof(float) * (size_t)(2 * width * size));
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
        for (int64_t block = 0; block < task.queries; block += ROWS) {
            const int64_t count = least(ROWS, task.queries - block), used = padded(count, TILE);
            const int64_t columns = padded(most(visible(row, &task, block + count - 1), 1), STEP);
            load_rows(rows, &row->query, task.query + block, head, count, size);
            load_rows(outer, &row->output_grad, task.query + block, head, count, size);
            row->multiply(used, columns, size, size, width, width, false, rows, (bf16 *)keys, raw, true);
            row->multiply(used, columns, size, size, width, width, false, outer, (bf16 *)values, raw_grads, true);
            for (int64_t r = 0; r < used; r += 2) {
                float log_sum[2] = {0, 0}, mean[2] = {0, 0};
                int64_t limit[2];
                for (int two = 0; two < 2; two++) {
                    limit[two] = visible(row, &task, block + r + two);
                    if (r + two >= count) continue;
                    const int64_t token = task.query + block + r + two;
                    __m512 total = _mm512_setzero_ps();
                    for (int f = 0; f < size; f += 16)
                        total = _mm512_fmadd_ps(widen(at(&row->output, token, head) + f), widen(outer + (r + two) * size + f), total);
                    mean[two] = _mm512_reduce_add_ps(total);
                    log_sum[two] = row->log_sums[token * row->heads + head];
                }
                for (int64_t j = 0; j < columns; j += 32) {
                    __m512i weight[2], grad[2];
                    for (int two = 0; two < 2; two++) {
                        const float *from = raw + (r + two) * width + j, *from_grads = raw_grads + (r + two) * width + j;
                        const __mmask32 keep = kept(row, task.query + block + r + two, head, j);
                        __m512 parts[2], part_grads[2];
                        for (int n = 0; n < 2; n++) {
                            __m512 power = _mm512_fmsub_ps(_mm512_loadu_ps(from + 16 * n), _mm512_set1_ps(to_log2), _mm512_set1_ps(log_sum[two]));
                            parts[n] = _mm512_maskz_mov_ps(before(j + 16 * n, limit[two]), exp2_of(power));
                            __m512 scaled = _mm512_maskz_mul_ps((__mmask16)(keep >> 16 * n), _mm512_loadu_ps(from_grads + 16 * n), _mm512_set1_ps(undropped));
                            part_grads[n] = _mm512_mul_ps(parts[n], _mm512_sub_ps(scaled, _mm512_set1_ps(mean[two])));
                        }
                        weight[two] = _mm512_maskz_mov_epi16(keep, narrow_two(parts[0], parts[1]));
                        grad[two] = narrow_two(part_grads[0], part_grads[1]);
                        _mm512_storeu_si512(grads + (r + two) * width + j, grad[two]);
                    }
                    for (int n = 0; n < 2; n++) {
                        const __m512i lanes = _mm512_add_epi16(interleave, _mm512_set1_epi16((short)(16 * n)));
                        _mm512_storeu_si512(weight_pairs + r / 2 * width + j + 16 * n, _mm512_permutex2var_epi16(weight[0], lanes, weight[1]));
                        _mm512_storeu_si512(grad_pairs + r / 2 * width + j + 16 * n, _mm512_permutex2var_epi16(grad[0], lanes, grad[1]));
                    }
                }
            }
            row->multiply(used, size, columns, width, size, size, false, grads, (bf16 *)key_rows, of_query, true);
            store_scaled(&row->query_grad, task.query + block, head, of_query, count, row->scale, size);
            transpose(features, rows, size);
            row->multiply(size, columns, used, ROWS, width, width, true, features, (bf16 *)grad_pairs, of_key, true);
            transpose(features, outer, size);
            row->multiply(size, columns, used, ROWS, width, width, true, features, (bf16 *)weight_pairs, of_value, true);
        }
    store_transposed(&row->key_grad, task.key, key_head, of_key, width, task.keys, row->scale, size);
    store_transposed(&row->value_grad, task.key, key_head, of_value, width, task.keys, undropped, size);
}

/* Bytes that a task needs for a sequence of this many keys. */
static size_t task_bytes(int64_t keys, int64_t size) {
    const int64_t width = padded(most(keys, 1), STEP);
    return (size_t)(2 * (3 * width * size + 3 * ROWS * width + 3 * ROWS * size) + 4 * (2 * ROWS * width + ROWS * size + 2 * width * size));
}

/* Run all tasks; returns 0, or 1 if there is no memory. */
INLINE int run_tasks(struct row *row, const int size, const int backward) {
    int64_t longest = 0, heads = backward ? row->key_heads : row->heads;
    int failed = 0;
    for (int64_t s = 0; s < row->sequences; s++)
        if (row->key_ends[s + 1] - row->key_ends[s] > longest) longest = row->key_ends[s + 1] - row->key_ends[s];
#pragma omp parallel num_threads(row->threads) reduction(| : failed)
    {
        char *memory = aligned_alloc(64, (size_t)padded((int64_t)task_bytes(longest, size), 64));
        failed |= !memory;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row->sequences * heads; task++)
            if (memory) {
                if (backward) backward_task(row, task / heads, task % heads, memory, size);
                else forward_task(row, task / heads, task % heads, memory, size);
            }
        row->release(true);
        free(memory);
    }
    return failed;
}

int attention_forward(struct row *row, int size) {
    return size == 32 ? run_tasks(row, 32, 0) : size == 64 ? run_tasks(row, 64, 0) : size == 128 ? run_tasks(row, 128, 0) : 2;
}

int attention_backward(struct row *row, int size) {
    return size == 32 ? run_tasks(row, 32, 1) : size == 64 ? run_tasks(row, 64, 1) : size == 128 ? run_tasks(row, 128, 1) : 2;
}
