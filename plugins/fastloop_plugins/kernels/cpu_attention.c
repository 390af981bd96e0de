/* Attention over a row of sequences: forward and backward, with dropout, in bfloat16. For processors with AVX512-BF16.
 *
 * Method: FlashAttention-2 (Dao, 2023) for a CPU. A task is one head of one sequence. It computes a block of query rows at a time, so
 * scores stay in the core's cache. Backward computes the probabilities again, from the log-sum-exp that forward keeps.
 *
 * Layout: token t and head h of a tensor begin at t * token + h * head elements, and the features of a head are contiguous. Products take
 * two bf16 numbers at a time (vdpbf16ps), so operands are packed in pairs: "pairs of features" for scores, "pairs of rows" for sums over rows.
 *
 * Dropout: element (query row, head, key) is dropped if 16 random bits are below a threshold. The bits are splitmix64 (Steele et al., 2014)
 * of a counter, so backward draws the same ones and no mask is kept.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

enum {
    ROWS = 32, /* query rows of a block: their probabilities stay in the second-level cache */
    STEP = 64, /* keys are padded to a multiple of this: four vectors of 16 floats */
};

struct view {
    bf16 *data;
    int64_t token, head; /* strides, in elements */
};

struct row {
    int64_t sequences, heads, key_heads;
    const int32_t *query_ends, *key_ends; /* (sequences + 1,): 0, then the end of each sequence */
    struct view query, key, value, output, output_grad, query_grad, key_grad, value_grad;
    float *log_sums;   /* (query rows, heads): base-2 log of each row's sum of exponentials */
    float scale;
    uint32_t drop;     /* an element is dropped if its 16 random bits are below this */
    uint64_t seed;
    int32_t causal, threads;
};

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t padded(int64_t tokens, int64_t step) { return (tokens + step - 1) / step * step; }

INLINE bf16 *at(const struct view *view, int64_t token, int64_t head) { return view->data + token * view->token + head * view->head; }

INLINE __m512 products(__m512 sum, uint32_t pair, __m512i pairs) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)pairs);
}

INLINE __m512 widen(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void narrow(bf16 *to, __m512 from) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(from)); }

INLINE __m512i narrow_two(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* 2^x for x <= 0, relative error below 3e-6: a polynomial of degree 5 on [-0.5, 0.5]. */
INLINE __m512 exp2_of(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.33335581e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.61812911e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.55041087e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40226507e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93147181e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
}

/* Which of 32 keys are kept for a query row: bit i is the key first + i. */
INLINE __mmask32 kept(const struct row *row, int64_t query, int64_t head, int64_t first) {
    if (!row->drop) return 0xffffffffu;
    const __m512i golden = _mm512_set1_epi64((long long)0x9e3779b97f4a7c15ull);
    uint64_t counter = ((((uint64_t)query * (uint64_t)row->heads + (uint64_t)head) << 20) | (uint64_t)(first / 32)) << 3;
    __m512i bits = _mm512_add_epi64(_mm512_set1_epi64((long long)counter), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    bits = _mm512_add_epi64(_mm512_set1_epi64((long long)row->seed), _mm512_mullo_epi64(bits, golden));
    bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30)), _mm512_set1_epi64((long long)0xbf58476d1ce4e5b9ull));
    bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27)), _mm512_set1_epi64((long long)0x94d049bb133111ebull));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31));
    return _mm512_cmpge_epu16_mask(bits, _mm512_set1_epi16((short)row->drop));
}

/* Pairs of features: to[i][t] = features 2i and 2i + 1 of token t. Tokens up to width are zero. */
INLINE void pack_features(uint32_t *to, const bf16 *from, int64_t stride, int64_t tokens, int64_t width, const int size) {
    for (int64_t token = 0; token < tokens; token++)
        for (int i = 0; i < size / 2; i++) memcpy(&to[i * width + token], from + token * stride + 2 * i, 4);
    for (int i = 0; i < size / 2; i++) memset(&to[i * width + tokens], 0, (size_t)(width - tokens) * 4);
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

/* Scores of four rows: to[m][t] = sum over features of rows[m] and the packed token t, for t < columns. */
INLINE void scores(float *to, const uint32_t *rows, const uint32_t *packed, int64_t columns, int64_t width, const int size) {
    for (int64_t first = 0; first < columns; first += STEP) {
        __m512 sums[4][4];
        for (int m = 0; m < 4; m++)
            for (int n = 0; n < 4; n++) sums[m][n] = _mm512_setzero_ps();
        for (int i = 0; i < size / 2; i++) {
            __m512i pairs[4];
            for (int n = 0; n < 4; n++) pairs[n] = _mm512_loadu_si512(packed + i * width + first + 16 * n);
            for (int m = 0; m < 4; m++)
                for (int n = 0; n < 4; n++) sums[m][n] = products(sums[m][n], rows[m * size / 2 + i], pairs[n]);
        }
        for (int m = 0; m < 4; m++)
            for (int n = 0; n < 4; n++) _mm512_storeu_ps(to + m * width + first + 16 * n, sums[m][n]);
    }
}

/* Weighted sums of packed rows, added to a block: to[m][f] += sum over pairs i of weights[m * across + i * along] and packed[i][f]. */
INLINE void add_sums(float *to, int64_t count, const uint32_t *weights, int64_t across, int64_t along, int64_t pairs, const uint32_t *packed, const int size) {
    enum { M = 4, N = 2 };
    for (int64_t m0 = 0; m0 < count; m0 += M)
        for (int f = 0; f < size; f += 16 * N) {
            __m512 sums[M][N];
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) sums[m][n] = _mm512_loadu_ps(to + (m0 + m) * size + f + 16 * n);
            for (int64_t i = 0; i < pairs; i++) {
                __m512i columns[N];
                for (int n = 0; n < N; n++) columns[n] = _mm512_loadu_si512(packed + i * size + f + 16 * n);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) sums[m][n] = products(sums[m][n], weights[(m0 + m) * across + i * along], columns[n]);
            }
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) _mm512_storeu_ps(to + (m0 + m) * size + f + 16 * n, sums[m][n]);
        }
}

INLINE void store_scaled(struct view *view, int64_t token, int64_t head, const float *from, int64_t tokens, float factor, const int size) {
    for (int64_t t = 0; t < tokens; t++)
        for (int f = 0; f < size; f += 16) narrow(at(view, token + t, head) + f, _mm512_mul_ps(_mm512_loadu_ps(from + t * size + f), _mm512_set1_ps(factor)));
}

/* Copy query rows; rows up to ROWS are zero. */
INLINE void load_rows(bf16 *to, const struct view *view, int64_t token, int64_t head, int64_t rows, const int size) {
    for (int64_t r = 0; r < ROWS; r++)
        if (r < rows) memcpy(to + r * size, at(view, token + r, head), (size_t)size * 2);
        else memset(to + r * size, 0, (size_t)size * 2);
}

/* The 16 lanes, of those that begin at key first, that are before key limit. */
INLINE __mmask16 before(int64_t first, int64_t limit) { return limit - first >= 16 ? 0xffff : limit <= first ? 0 : (__mmask16)((1u << (limit - first)) - 1); }

struct task {
    int64_t query, queries, key, keys, width; /* first token and number of tokens; keys padded to STEP */
};

INLINE struct task task_of(const struct row *row, int64_t sequence) {
    struct task task = {row->query_ends[sequence], 0, row->key_ends[sequence], 0, 0};
    task.queries = row->query_ends[sequence + 1] - task.query;
    task.keys = row->key_ends[sequence + 1] - task.key;
    task.width = padded(task.keys, STEP);
    return task;
}

/* Keys that query row r of a sequence attends to. */
INLINE int64_t visible(const struct row *row, const struct task *task, int64_t r) {
    if (r >= task->queries) return 0;
    int64_t limit = row->causal ? r + 1 + task->keys - task->queries : task->keys;
    return limit < 0 ? 0 : limit;
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE void forward_task(struct row *row, int64_t sequence, int64_t head, char *memory, const int size) {
    const struct task task = task_of(row, sequence);
    const int64_t width = task.width, key_head = head / (row->heads / row->key_heads);
    const float to_log2 = row->scale * 1.44269504f, undropped = 1.0f / (1.0f - (float)row->drop / 65536.0f);
    uint32_t *keys = (uint32_t *)memory, *values = keys + width * size / 2;
    float *raw = (float *)(values + width * size / 2), *sums = raw + 4 * width;
    bf16 *weights = (bf16 *)(sums + ROWS * size), *rows = weights + ROWS * width;
    pack_features(keys, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    pack_rows(values, at(&row->value, task.key, key_head), row->value.token, task.keys, width, size);
    for (int64_t block = 0; block < task.queries; block += ROWS) {
        const int64_t count = least(ROWS, task.queries - block), used = padded(count, 4);
        const int64_t columns = padded(visible(row, &task, block + count - 1), STEP);
        float factors[ROWS];
        load_rows(rows, &row->query, task.query + block, head, count, size);
        for (int64_t r = 0; r < used; r++) {
            if (r % 4 == 0) scores(raw, (uint32_t *)(rows + r * size), keys, columns, width, size);
            const float *from = raw + r % 4 * width;
            const int64_t limit = visible(row, &task, block + r);
            __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
            for (int64_t j = 0; j < limit; j += 16) most = _mm512_mask_max_ps(most, before(j, limit), most, _mm512_loadu_ps(from + j));
            const float peak = limit ? _mm512_reduce_max_ps(most) * to_log2 : 0.0f;
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
            if (r < count) row->log_sums[(task.query + block + r) * row->heads + head] = limit ? peak + log2f(sum) : INFINITY;
        }
        memset(sums, 0, sizeof(float) * (size_t)(used * size));
        add_sums(sums, used, (uint32_t *)weights, width / 2, 1, columns / 2, values, size);
        for (int64_t r = 0; r < count; r++) store_scaled(&row->output, task.query + block + r, head, sums + r * size, 1, factors[r], size);
    }
}

INLINE void backward_task(struct row *row, int64_t sequence, int64_t key_head, char *memory, const int size) {
    const struct task task = task_of(row, sequence);
    const int64_t width = task.width, group = row->heads / row->key_heads;
    const float to_log2 = row->scale * 1.44269504f, undropped = 1.0f / (1.0f - (float)row->drop / 65536.0f);
    const __m512i interleave = _mm512_add_epi16( /* 0, 32, 1, 33, ...: element i of one vector, then of the other */
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47)),
        _mm512_setzero_si512());
    uint32_t *keys = (uint32_t *)memory, *values = keys + width * size / 2, *key_rows = values + width * size / 2;
    uint32_t *weight_pairs = key_rows + width * size / 2, *grad_pairs = weight_pairs + ROWS / 2 * width;
    uint32_t *query_pairs = grad_pairs + ROWS / 2 * width, *output_pairs = query_pairs + ROWS / 2 * size;
    float *raw = (float *)(output_pairs + ROWS / 2 * size), *raw_grads = raw + 4 * width, *of_query = raw_grads + 4 * width;
    float *of_key = of_query + ROWS * size, *of_value = of_key + width * size;
    bf16 *grads = (bf16 *)(of_value + width * size), *rows = grads + ROWS * width, *outer = rows + ROWS * size;
    pack_features(keys, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    pack_features(values, at(&row->value, task.key, key_head), row->value.token, task.keys, width, size);
    pack_rows(key_rows, at(&row->key, task.key, key_head), row->key.token, task.keys, width, size);
    memset(of_key, 0, sizeof(float) * (size_t)(2 * width * size));
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
        for (int64_t block = 0; block < task.queries; block += ROWS) {
            const int64_t count = least(ROWS, task.queries - block), used = padded(count, 4);
            const int64_t columns = padded(visible(row, &task, block + count - 1), STEP);
            load_rows(rows, &row->query, task.query + block, head, count, size);
            load_rows(outer, &row->output_grad, task.query + block, head, count, size);
            for (int64_t r = 0; r < used; r += 2) {
                if (r % 4 == 0) {
                    scores(raw, (uint32_t *)(rows + r * size), keys, columns, width, size);
                    scores(raw_grads, (uint32_t *)(outer + r * size), values, columns, width, size);
                }
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
                        const float *from = raw + (r % 4 + two) * width + j, *from_grads = raw_grads + (r % 4 + two) * width + j;
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
            memset(of_query, 0, sizeof(float) * (size_t)(used * size));
            add_sums(of_query, used, (uint32_t *)grads, width / 2, 1, columns / 2, key_rows, size);
            store_scaled(&row->query_grad, task.query + block, head, of_query, count, row->scale, size);
            pack_rows(query_pairs, rows, size, used, used, size);
            pack_rows(output_pairs, outer, size, used, used, size);
            add_sums(of_key, columns, grad_pairs, 1, width, used / 2, query_pairs, size);
            add_sums(of_value, columns, weight_pairs, 1, width, used / 2, output_pairs, size);
        }
    store_scaled(&row->key_grad, task.key, key_head, of_key, task.keys, row->scale, size);
    store_scaled(&row->value_grad, task.key, key_head, of_value, task.keys, undropped, size);
}

/* Bytes that a task needs for a sequence of this many keys. */
static size_t task_bytes(int64_t keys, int64_t size) {
    const int64_t width = padded(keys, STEP);
    return (size_t)(width * size * 2 * 3 + ROWS * width * 2 * 2 + ROWS * size * 2 * 2 + width * 4 * 8 + ROWS * size * 4 + width * size * 8 + ROWS * width * 2 + ROWS * size * 4 + 64);
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
